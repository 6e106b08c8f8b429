# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/streaming.py
"""Train a stock model whose layers live in host memory: one call around the loop."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import host_memory
from .one_copy_a_host import Host, SharedModel
from .streamed_model import StreamedModel
from .weight_streaming import SLOTS


@contextmanager
def stream_layers(
    model: nn.Module,
    layers: Iterable[nn.Module],
    device: torch.device | str,
    *,
    budget: int = 0,
    slots: int = SLOTS,
    gradient_dtype: torch.dtype | None = None,
    one_copy_a_host: bool = False,
    unified_memory: bool = False,
) -> Iterator[StreamedModel]:
    """Stream layers from host memory while the block runs; all else of the model is on the device.

    ``model`` is used as before, and so are its ``parameters()``. Call ``wait()`` of what the block
    gets before something but an optimizer or ``state_dict`` reads or changes weights. Behind the
    block the layers' weights are in ordinary host memory. All ranks of a job stream together: each
    is told what the others of its host are about to take.

    Args:
        model: any module; its forward is not changed.
        layers: those of its submodules that run one after the other, in order, such as
            ``model.model.layers``.
        device: where it runs; if it has an index, it must be the current device.
        budget: bytes of device memory for layers that stay there, the lowest ones, each with its
            gradients and the state of Adam: ``resident_bytes(layer)``.
        slots: layers whose weights are on the device at a time.
        gradient_dtype: of the gradients on the host, and so of sums of microbatches; that of their
            parameters if None.
        one_copy_a_host: whether the ranks of a host share one copy of weights and of Adam's state.
            All ranks of the job say the same. Weights become those of rank 0.
        unified_memory: stream though the device computes in the host's memory.

    Raises:
        TypeError: what is given as a layer is no module, has no forward, or has weights that are
            not plain, dense tensors.
        ValueError: a layer is no part of the model, is streamed already, or shares a parameter; two
            parameters share memory; something is on the meta device, or lazy; ``slots`` is below 1;
            another device is current; or, with ``one_copy_a_host``, there is no process group or no
            LOCAL_WORLD_SIZE.
        RuntimeError: the host has not, or cannot lock, as much memory; or the device shares it.
        Exception: at the end of the block, what kept the last updates from being made.
    """
    taken = list(layers)
    device = torch.device(device)
    if not unified_memory:
        host_memory.refuse_shared_with(device, "a layer")
    settings = {"budget": budget, "slots": slots, "gradient_dtype": gradient_dtype}
    if one_copy_a_host:
        streamed = SharedModel(model, taken, device, Host(), **settings)
    else:
        streamed = StreamedModel(model, taken, device, **settings)
    try:
        yield streamed
    except BaseException:
        close(streamed, waits=False)
        raise
    else:
        close(streamed, waits=True)


def close(streamed: StreamedModel, waits: bool) -> None:
    """End streaming, and before it the optimizer, if that has not ended in a block of its own."""
    try:
        if streamed.optimizer is not None:
            streamed.optimizer.end(waits)
        elif waits:
            streamed.wait()
    finally:
        streamed.close()
