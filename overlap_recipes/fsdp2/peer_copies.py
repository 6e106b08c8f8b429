# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/peer_copies.py
"""One call for gathers and reductions by peer copies, which refuses what it cannot do."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from . import peer_memory
from .faster_way import FasterWay
from .in_place_gather import Gathers, InPlaceGather, gather_in_place
from .in_place_reduce import InPlaceReduce, PushedGradients, reduce_in_place

_TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # versions of torch
_INSTEAD = (
    "Of stock FSDP2's settings these hide communication there: set_modules_to_forward_prefetch and "
    "set_modules_to_backward_prefetch gather earlier, set_reshard_after_forward(False) on the last "
    "units gathers less, set_separate_reduce_scatter_group() (PyTorch 2.13 on) lets reductions run "
    "during gathers"
)
_HOSTS = "With a mesh of (hosts, GPUs of a host), which is HSDP, gathers stay on a host."


@dataclass(frozen=True)
class PeerCopies:
    """What a model gathers and reduces by; None, where FSDP2 does it."""

    gathers: Gathers | None
    pushed: PushedGradients | None  # None with HSDP, whose gradients FSDP2 reduces

    def begin_next_forward(self) -> None:
        """Queue the next forward's first gathers; call it when no weight changes before that.

        Not after the last step: nobody waits for these gathers then, and they may still read
        shards when the model is gone and their memory is used again.
        """
        if self.gathers is not None:
            self.gathers.begin_next_forward()


def use_peer_copies(model: FSDPModule, slots: int = 4) -> PeerCopies:
    """Have every unit of ``model`` gather and reduce by peer copies, from now on. Collective.

    Call it between steps, once, after ``fully_shard`` and all settings of FSDP2. On one rank,
    which sends nothing, it changes nothing.

    Few tokens a step leave the host to set the pace, and then stock FSDP2 can be faster. So after
    15 steps by peer copies come 15 by stock FSDP2, in its memory, and the faster way goes on on all
    ranks; the log has both figures. Not under ``torch.use_deterministic_algorithms(True)``: sums of
    three ranks and more depend on the way. Not where little memory is free. A step is counted when
    all units that are trained have changed before it, and no evaluation has left one full.

    Args:
        model: the module that the training loop calls.
        slots: that equal units take turns in; the more, the fewer gathers in backward.

    Raises:
        RuntimeError: on every rank, before anything is changed: the ranks are on several hosts or
            cannot read each other's memory; a unit is offloaded, replicated, sharded on another
            dimension than the first, in another group, or has collectives or tensors with an
            all-gather of its own; nothing is sharded; the model's units have been given to peer
            copies before, by this copy of the library or another; nobody has tried this torch, or
            it has another FSDP2. The message says which, and what of stock FSDP2 would do instead.
    """
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in _TRIED:
        raise RuntimeError(
            f"nobody has tried peer copies with torch {torch.__version__}, but with "
            f"{', '.join(_TRIED)}. {_INSTEAD}"
        )
    groups = peer_memory.param_groups(model)
    for mixin in (InPlaceGather, InPlaceReduce):
        peer_memory.refuse_twice(groups, mixin)
    reasons = peer_memory.reasons_for_stock(groups)
    if reasons == {peer_memory.ONE_RANK}:
        return PeerCopies(None, None)
    if reasons:
        hint = _HOSTS if peer_memory.HOSTS in reasons else ""
        raise RuntimeError(f"no peer copies: {'; '.join(sorted(reasons))}. {_INSTEAD}. {hint}")
    gathers = gather_in_place(model, slots)
    pushed = reduce_in_place(model)
    if not torch.are_deterministic_algorithms_enabled():
        FasterWay(model, gathers, pushed)
    return PeerCopies(gathers, pushed)
