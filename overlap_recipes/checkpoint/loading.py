# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/loading.py
"""Load a checkpoint into a job: what differs is listed before anything changes.

``dcp.load`` fills tensors that exist, so a new optimizer would have to make its state first. Here
the checkpoint's own list says what is made.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from ..ranks import keep_quiet_alone, on_all_ranks, on_first_rank, own_rank, own_result, world_size
from .checked_files import DamagedCheckpoint
from .fit import Entry, Fit, Skip, entries_below, lists_of
from .reader import Reader
from .shared_reads import SharedReads
from .state import TrainingState
from .state.differing import differing_frozen
from .stores.store import Store, name_of

LOG = logging.getLogger(__name__)


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
    keep_quiet_alone()
    reader = source if isinstance(source, dcp.StorageReader) else Reader(source)
    metadata = own_result(reader.read_metadata, process_group)
    entries: dict[str, list[Entry]] = {}
    lists: dict[str, object] = {}
    for key, state in states.items():
        if isinstance(state, TrainingState):
            entries[key] = entries_below(metadata, key)
            lists.update(lists_of(key, entries[key], metadata))
    if lists:
        dcp.load(lists, storage_reader=reader, process_group=process_group)

    def look() -> list[Fit]:
        return [Fit(key, states[key], entries[key], Skip(skip), lists) for key in entries]

    # up to the refusal nothing of the job changes
    fits = own_result(look, process_group)
    rooms: dict[str, object] = {}
    of_ranks: dict[str, int] = {}
    wrong: list[str] = []
    for fit in fits:
        rooms.update(fit.found.rooms)
        of_ranks.update(fit.found.of_ranks)
        wrong.extend(fit.found.wrong)
        trained = fit.job.trained
        wrong += differing_frozen(trained, fit.contents, fit.skip.covers, process_group)
    _refuse_on_all_ranks(wrong, source, process_group)

    others = {}  # what is no TrainingState
    for key in sorted(states.keys() - entries.keys()):  # in one order, as dcp.load does it
        state = states[key]
        others[key] = state.state_dict() if isinstance(state, Stateful) else state
    targets = rooms | others
    _read(targets, of_ranks, reader, process_group)
    for key in others:
        if isinstance(states[key], Stateful):
            states[key].load_state_dict(targets[key])
        else:
            states[key] = targets[key]
    for fit in fits:
        fit.finish(targets)


def _read(
    targets: dict[str, object],
    of_ranks: dict[str, int],
    reader: dcp.StorageReader,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Fill ``targets``, by name; what several ranks want is read on one, and sent.

    Args:
        of_ranks: those that all ranks want, and which rank has saved each: the files of one are
            opened by one.
    """
    ranks = world_size(process_group)
    own = dict(targets)
    for name, saved_by in of_ranks.items():
        if saved_by % ranks != own_rank(process_group):
            del own[name]
    planner = None
    if dist.is_initialized():
        planner = SharedReads(process_group)
    dcp.load(own, storage_reader=reader, planner=planner, process_group=process_group)
    if planner is not None:
        planner.send()
    targets.update(own)
    if of_ranks:
        read_here = own.keys() & of_ranks.keys()
        for read in on_all_ranks(lambda: {name: own[name] for name in read_here}, process_group):
            targets.update(read)


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


# -- which one is resumed


def load_newest(
    states: dict[str, object], store: Store, step: int | None, skip: Iterable[str]
) -> int | None:
    """Load the newest checkpoint that is as it was saved, or that of ``step``; all ranks call it.

    Those that are newer are set aside when it is loaded: a load that is refused hides none. One
    that turns out to be damaged while it is read is set aside, too, but the last stays: a job that
    is started again would begin again otherwise.

    Returns:
        Its step, the same on all ranks; None if there is none.
    """
    while True:
        chosen, newer = choose(store, step)
        if chosen is None:
            return None
        try:
            load(states, store.reader(chosen), skip=skip)
        except (DamagedCheckpoint, CheckpointException) as error:
            damage = _damage_of(error)
            if damage is None:
                raise
            if step is not None:
                raise damage from error
            if not _has_older(store, chosen):
                raise _nothing_older(name_of(chosen), damage) from error
        else:
            on_first_rank(partial(_set_newer_aside, store, chosen, newer))
            return chosen
        LOG.error("%s is damaged, an older one is loaded: %s", name_of(chosen), damage)
        on_first_rank(partial(store.set_aside, chosen, "set-aside"))


def choose(store: Store, step: int | None) -> tuple[int | None, list[int] | None]:
    """The step to resume from, None if there is no checkpoint; and those that are newer, if known.

    The same on all ranks. Names and sizes are looked at; the load checks the bytes that it reads.

    Raises:
        RuntimeError: the store cannot be read; a rank does not see this checkpoint, or sees another
            content.
        DamagedCheckpoint: there are checkpoints, and none is complete; they stay where they are.
    """
    chosen, newer, sizes = on_first_rank(partial(_look, store, step))
    if chosen is None:
        return None, None
    wrong_by_rank = on_all_ranks(partial(_seen_wrong, store, chosen, sizes))
    if any(wrong_by_rank):
        raise RuntimeError(f"step {chosen} is not whole, by rank: {dict(enumerate(wrong_by_rank))}")
    return chosen, newer


def _look(store: Store, step: int | None) -> tuple[int | None, list[int] | None, str | None]:
    """The step to resume from, those that are newer, and a digest of its files' sizes.

    There is no digest where the checkpoint of ``step`` is not whole here.
    """
    chosen, newer = step, None
    if step is None:
        chosen, newer = _newest_whole(store)
    if chosen is None or (step is not None and store.wrong(step)):
        return chosen, newer, None
    sizes = ""
    if world_size() > 1:  # else nobody compares it
        sizes = _digest_of_sizes(store, chosen)
    return chosen, newer, sizes


def _digest_of_sizes(store: Store, step: int) -> str:
    """Other ranks compare it, and read no list of what each rank has written."""
    sizes = sorted(store.sizes(step).items())
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def _newest_whole(store: Store) -> tuple[int | None, list[int]]:
    """The newest step whose checkpoint is complete, by names and sizes, and those that are newer.

    None if there is no checkpoint.

    Raises:
        DamagedCheckpoint: there are checkpoints, and none is complete.
        RuntimeError: the store cannot be read.
    """
    try:
        there = store.steps()
        newest_wrong: list[str] = []
        for number, step in enumerate(there):
            wrong = store.wrong(step)
            if not wrong:
                return step, there[:number]
            newest_wrong = newest_wrong or wrong
    except Exception as error:  # whatever a store raises
        raise RuntimeError(f"cannot resume from {store.root}: {error}") from error
    if not there:
        return None, []
    raise _nothing_older(f"{store.root}/{name_of(there[0])}", "; ".join(newest_wrong))


def _nothing_older(name: str, damage: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{name}: {damage}; there is no older checkpoint. To start over, remove it or take another "
        f"root"
    )


def _seen_wrong(store: Store, step: int, sizes: str | None) -> list[str]:
    """What this rank sees that is wrong with the checkpoint of ``step``.

    Nothing, without a look at each, if its files have the ``sizes`` of those that are whole.
    """
    if sizes is not None and (own_rank() == 0 or _digest_of_sizes(store, step) == sizes):
        return []
    wrong = store.wrong(step)
    if wrong:
        there = store.steps()
        if step not in there:
            return [f"there is none, only {there}"]
    return wrong


def _set_newer_aside(store: Store, step: int, found: list[int] | None) -> None:
    """Set those that were ``found`` aside, or all that are newer than ``step``."""
    newer = found
    if newer is None:
        newer = [each for each in store.steps() if each > step]
    for each in newer:
        store.set_aside(each, "set-aside")
        LOG.warning("%s is set aside: newer than what is resumed", name_of(each))


def _has_older(store: Store, step: int) -> bool:
    """Whether there is a complete checkpoint before that of ``step``; the same on all ranks."""

    def has_one() -> bool:
        for older in store.steps():
            if older < step and not store.wrong(older):
                return True
        return False

    return on_first_rank(has_one)


def _damage_of(error: BaseException) -> DamagedCheckpoint | None:
    """What is damaged, if that is all that made a load fail; the same on all ranks."""
    if isinstance(error, DamagedCheckpoint):
        return error
    damages = []
    for rank in sorted(error.failures):
        failure, _ = error.failures[rank]
        if not isinstance(failure, DamagedCheckpoint):
            return None
        damages.append(failure)
    return damages[0] if damages else None
