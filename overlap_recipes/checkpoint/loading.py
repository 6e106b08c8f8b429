# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/loading.py
"""Load a checkpoint into a job: what differs is listed before anything changes.

``dcp.load`` fills tensors that exist, so a new optimizer would have to make its state first. Here
the checkpoint's own list says what is made.
"""

from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from ..ranks import on_all_ranks, own_result
from .fit import Entry, Fit, Skip, entries_below, lists_of
from .reader import Reader
from .shared_reads import SharedReads
from .state import TrainingState
from .state.differing import differing_frozen


def load(
    states: dict[str, object],
    source: Path | str | dcp.StorageReader,
    *,
    skip: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load a checkpoint into the objects of ``states``; all ranks call it.

    What several ranks hold, such as all of a model under DDP, is read once and broadcast, if there
    is a GiB of it on a device for which the group has a backend.

    Args:
        states: as at the save: ``{"app": TrainingState(...)}``. What is no ``TrainingState`` is
            loaded as ``dcp.load`` does it.
        source: the directory, or a reader of it.
        skip: names of what stays as it is here: modules, parameters or buffers, with what the
            optimizer has of them; items that are shared or of each rank.
        process_group: of all ranks that load; the default group.

    Raises:
        ValueError: the checkpoint does not fit. The message lists what differs, on all ranks;
            nothing has changed then. What an optimizer's own ``load_state_dict`` refuses is told
            after the read: the weights are the checkpoint's then.
        DamagedCheckpoint: the list of contents is not as saved.
        OSError, RuntimeError: it is not there; it cannot be read.
        CheckpointException: a rank could not read its part: a file is missing, short, or not as
            saved. Raised on all ranks; what has been read till then stays.
    """
    reader = source if isinstance(source, dcp.StorageReader) else Reader(source)
    metadata = own_result(reader.read_metadata, process_group)
    entries: dict[str, list[Entry]] = {}
    lists: dict[str, object] = {}
    for key, state in states.items():
        if isinstance(state, TrainingState):
            entries[key] = entries_below(metadata, key)
            lists.update(lists_of(key, entries[key]))
    if lists:
        dcp.load(lists, storage_reader=reader, process_group=process_group)

    def look() -> list[Fit]:
        return [Fit(key, states[key], entries[key], Skip(skip), lists) for key in entries]

    fits = own_result(look, process_group)
    rooms: dict[str, object] = {}
    wrong: list[str] = []
    for fit in fits:
        rooms.update(fit.found.rooms)
        wrong.extend(fit.found.wrong)
        trained = fit.job.trained
        wrong += differing_frozen(trained, fit.contents, fit.skip.covers, process_group)
    _refuse_on_all_ranks(wrong, source, process_group)

    others = {}
    for key in sorted(states.keys() - entries.keys()):  # in one order, as dcp.load does it
        state = states[key]
        others[key] = state.state_dict() if isinstance(state, Stateful) else state
    targets = rooms | others
    planner = SharedReads(process_group) if dist.is_initialized() else None
    dcp.load(targets, storage_reader=reader, planner=planner, process_group=process_group)
    if planner is not None:
        planner.send()
    for key in others:
        if isinstance(states[key], Stateful):
            states[key].load_state_dict(targets[key])
        else:
            states[key] = targets[key]
    for fit in fits:
        fit.finish(targets)


def _refuse_on_all_ranks(
    wrong: list[str], source: object, process_group: dist.ProcessGroup | None
) -> None:
    lines: dict[str, None] = {}  # each once, in order
    for found in on_all_ranks(lambda: wrong, process_group):
        lines.update(dict.fromkeys(found))
    if lines:
        name = getattr(source, "checkpoint_id", source)
        told = "\n".join(lines)
        raise ValueError(
            f"{name} does not fit this job: give TrainingState what it lacks, or leave names as "
            f"they are here by skip=[...]\n{told}"
        )
