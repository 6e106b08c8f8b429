# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/differing.py
"""What a job has otherwise than a checkpoint, though names and shapes are those of the save."""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from .contents import Contents, described, in_words, is_same_kind
from .frozen import digests_of_ranks, on_meta, own_sums
from .trained import States, Trained
from .trees import parts_of, shard_of

LOG = logging.getLogger(__name__)


def nothing(name: str) -> bool:
    """Skip nothing."""
    return False


def otherwise_here(
    contents: Contents,
    own: States,
    kinds: dict[str, object],
    is_skipped: Callable[[str], bool] = nothing,
) -> list[str]:
    """Lines for what has the name that it had, and is something else here.

    Args:
        kinds: of what the job has, as ``Contents.kinds``.
    """
    found = []
    for name, leaf in own.model.items():
        if torch.is_tensor(leaf) and leaf.is_meta and not is_skipped(name):
            found.append(f"  {name} lies on meta: give it memory first (model.to_empty)")
    for name, first in own.ties.items():
        names = {name, first}
        if contents.ties is None or any(is_skipped(each) for each in names):
            continue
        was_one = contents.ties.get(name, name) == contents.ties.get(first, first)
        if names <= contents.model.keys() and not was_one:
            found.append(
                f"  {name} and {first} are one parameter here, and were two at the save: untie "
                "them, or skip one"
            )
    for name in contents.kinds.keys() & kinds.keys() - {"optim"}:
        if not is_skipped(name) and not is_same_kind(contents.kinds[name], kinds[name]):
            saved = in_words(contents.kinds[name])
            found.append(f"  {name}: here is {in_words(kinds[name])}, saved {saved}")
    return found


def differing_frozen(
    trained: Trained,
    contents: Contents,
    is_skipped: Callable[[str], bool] = nothing,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Lines for parameters that the checkpoint has left out, and that are others here.

    All ranks of ``group`` call it.
    """
    if not contents.left_out:
        return []
    parameters = trained.parameters_of_model()
    found = []
    of_parts = {}
    for name, spec in contents.left_out.items():
        if name not in parameters or is_skipped(name):
            continue  # told elsewhere
        if shard_of(parameters[name]).is_meta:
            found.append("  " + on_meta(name))
        elif described(parameters[name]) == spec:
            of_parts[name] = parts_of(parameters[name])
    if contents.format < 3:
        LOG.warning("the base is not compared: its digests are of an earlier version")
        return found
    sums = own_sums(of_parts, group)
    for name, here in digests_of_ranks(sums, group).items():
        if here != contents.digests[name]:
            found.append(
                f"  {name}: frozen, left out of the checkpoint, and of other values than at "
                "the save"
            )
    return found


def warn_of_frozen(trained: Trained, contents: Contents, own: States) -> None:
    """Warn if other parameters require a gradient here than at the save."""
    if contents.frozen is None:
        return
    parameters = trained.parameters_of_model().keys()
    there = parameters & (contents.model.keys() | contents.left_out.keys())
    frozen_here = sorted((there & set(own.frozen)) - set(contents.frozen))
    trained_here = sorted((there & set(contents.frozen)) - set(own.frozen))
    if frozen_here:
        LOG.warning(
            "frozen here, and trained at the save: %s. Which parameters require a gradient is "
            "in no checkpoint: set it as it was, unless this is meant",
            ", ".join(frozen_here),
        )
    if trained_here:
        LOG.warning(
            "trained here, and frozen at the save: %s. Which parameters require a gradient is "
            "in no checkpoint: set it as it was, unless this is meant",
            ", ".join(trained_here),
        )
