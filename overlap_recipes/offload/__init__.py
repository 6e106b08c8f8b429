# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/__init__.py
"""Train what does not fit on the device: layers, Adam and activations live in host memory."""

from .activations import ActivationOffload
from .first_step import check_first_step
from .streamed_model import resident_bytes
from .streaming import stream_layers
from .whole_step import HostAdamW

__all__ = [
    "ActivationOffload",
    "HostAdamW",
    "check_first_step",
    "resident_bytes",
    "stream_layers",
]
