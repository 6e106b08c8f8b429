# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/metadata.py
"""Reads the list of contents of a DCP checkpoint of any torch that we list."""

import io
import pickle

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

FIELDS = 5  # of a tensor's properties up to torch 2.14; 2.15 has added the strides


class AnyProperties(TensorProperties):
    """Takes the properties of a tensor from a later torch than this one, too."""

    def __setstate__(self, state: tuple) -> None:
        try:
            super().__setstate__(state)
        except ValueError:  # this torch knows fewer
            super().__setstate__(state[:FIELDS])
        self.__class__ = TensorProperties


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == (TensorProperties.__module__, TensorProperties.__qualname__):
            return AnyProperties
        return super().find_class(module, name)


def unpickled_metadata(data: bytes) -> Metadata:
    """The list of contents that ``data``, a file ``.metadata``, holds."""
    return MetadataUnpickler(io.BytesIO(data)).load()
