# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/kept.py
"""When a checkpoint counts, in any store: what is refused, which one is resumed, which stay."""

import logging
from collections.abc import Iterable
from functools import partial

from torch.distributed.checkpoint.api import CheckpointException

from ..ranks import on_all_ranks, on_first_rank
from .digests import MANIFEST, DamagedCheckpoint, manifest_text
from .loading import load
from .stores.store import Sink, Store, name_of

LOG = logging.getLogger(__name__)


class Checkpoint:
    """One save of a job, which becomes the checkpoint of ``step`` in ``store``; see ``Target``.

    Each rank describes its files in a manifest, by sizes and digests, and all is on the storage
    before rank 0 gives the checkpoint its name. Then older checkpoints that neither rule keeps go.

    Args:
        keep_last: how many of the newest checkpoints stay.
        keep_every: steps that it divides stay, too; 0: none.
    """

    def __init__(self, store: Store, step: int, keep_last: int, keep_every: int) -> None:
        self.store = store
        self.step = step
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.name = f"{str(store.root).rstrip('/')}/{name_of(step)}"
        self.place = ""
        self.sinks: dict[str, Sink] = {}  # of this rank's files

    def begin(self, nbytes: int) -> str:
        """Refuse a save that the rules would delete at once, as the older one."""
        newest = max(self.store.steps(), default=0)
        if self.step < newest:
            raise RuntimeError(f"step{newest} is there: resume from it, or take another root")
        return self.store.begin(self.step, nbytes)

    def join(self, place: str) -> None:
        self.place = place
        self.store.join(place)

    def create(self, name: str) -> Sink:
        self.sinks[name] = self.store.create(self.place, name)
        return self.sinks[name]

    def finish(self, rank: int, ranks: int) -> dict[str, int]:
        described = {name: sink.described() for name, sink in self.sinks.items()}
        text = manifest_text(ranks, described).encode()
        name = MANIFEST.format(rank)
        with self.store.create(self.place, name) as sink:
            sink.write(len(text), [text])
        self.store.settle(self.place)
        sizes = {file: what["bytes"] for file, what in described.items()}
        return {**sizes, name: len(text)}

    def commit(self, files: dict[str, int]) -> None:
        """What has this name already is set aside if it is damaged; a whole one stays."""
        if self.step in self.store.steps():
            if not self.store.wrong(self.step, every_byte=True):
                self.store.drop(self.place)
                raise FileExistsError(f"{self.name} is there and whole")
            self.store.set_aside(self.step, "damaged")
        self.store.commit(self.step, self.place, files)
        self.prune()

    def prune(self) -> None:
        """What fails is logged, whatever a store raises: the new checkpoint is there."""
        try:
            doomed = left_out(self.store, self.keep_last, self.keep_every)
        except Exception as error:
            LOG.error("older steps cannot be deleted now: %s", error)
            return
        for step in doomed:
            try:
                self.store.remove(step)
            except Exception as error:
                LOG.error("%s cannot be deleted: %s", name_of(step), error)

    def abort(self) -> None:
        self.store.drop(self.place)


# -- which ones stay


def check_kept(keep_last: int, keep_every: int) -> None:
    """Refuse rules by which nothing would be kept.

    Raises:
        ValueError: of such a rule.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: keep one checkpoint at least")
    if keep_every < 0:
        raise ValueError(f"keep_every is {keep_every}: give the distance of steps, or 0")


def left_out(store: Store, keep_last: int, keep_every: int) -> list[int]:
    """The steps in ``store`` that neither rule keeps; what is damaged counts for none, and stays.

    Raises:
        ValueError: nothing would be kept.
    """
    check_kept(keep_last, keep_every)
    whole = [step for step in store.steps() if not store.wrong(step)]
    older = whole[keep_last:]
    return [step for step in older if not keep_every or step % keep_every]


# -- which one is resumed


def load_newest(
    states: dict[str, object], store: Store, step: int | None, skip: Iterable[str]
) -> int | None:
    """Load the newest checkpoint that is as it was saved, or that of ``step``; all ranks call it.

    A newer one that turns out to be damaged while it is read is set aside, but the last stays: a
    job that is started again would begin anew otherwise.

    Returns:
        Its step, the same on all ranks; None if there is none.
    """
    while True:
        chosen = choose(store, step)
        if chosen is None:
            return None
        try:
            load(states, store.reader(chosen), skip=skip)
        except (DamagedCheckpoint, CheckpointException) as error:
            damage = damage_of(error)
            if damage is None:
                raise
            if step is not None:
                raise damage from error
            if not has_older(store, chosen):
                raise nothing_older(name_of(chosen), damage) from error
        else:
            return chosen
        LOG.error("%s is damaged, an older one is loaded: %s", name_of(chosen), damage)
        on_first_rank(partial(store.set_aside, chosen, "set-aside"))


def choose(store: Store, step: int | None = None) -> int | None:
    """The step to resume from, the same on all ranks; None if there is no checkpoint.

    Names and sizes are looked at; the load checks the bytes that it reads. Newer ones are set
    aside.

    Raises:
        RuntimeError: the store cannot be read; a rank does not see this checkpoint, or sees another
            content.
        DamagedCheckpoint: there are checkpoints, and none is complete; they stay where they are.
    """
    chosen = step
    if step is None:
        chosen = on_first_rank(partial(newest_whole, store))
    if chosen is None:
        return None
    wrong_by_rank = on_all_ranks(partial(seen_wrong, store, chosen))
    if any(wrong_by_rank):
        raise RuntimeError(f"step {chosen} is not whole, by rank: {dict(enumerate(wrong_by_rank))}")
    on_first_rank(partial(set_newer_aside, store, chosen))
    return chosen


def newest_whole(store: Store) -> int | None:
    """The newest step whose checkpoint is complete, by names and sizes; None if there is nothing.

    Raises:
        DamagedCheckpoint: there are checkpoints, and none is complete.
        RuntimeError: the store cannot be read.
    """
    try:
        there = store.steps()
        newest_wrong: list[str] = []
        for step in there:
            wrong = store.wrong(step)
            if not wrong:
                return step
            newest_wrong = newest_wrong or wrong
    except Exception as error:  # whatever a store raises
        raise RuntimeError(f"cannot resume from {store.root}: {error}") from error
    if not there:
        return None
    raise nothing_older(f"{store.root}/{name_of(there[0])}", "; ".join(newest_wrong))


def nothing_older(name: str, damage: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{name}: {damage}; there is no older checkpoint. To begin anew, remove it or take another "
        f"root"
    )


def seen_wrong(store: Store, step: int) -> list[str]:
    """What this rank sees that is wrong with the checkpoint of ``step``."""
    there = store.steps()
    if step not in there:
        return [f"there is none, only {there}"]
    return store.wrong(step)


def set_newer_aside(store: Store, step: int) -> None:
    for newer in store.steps():
        if newer > step:
            store.set_aside(newer, "set-aside")
            LOG.warning("%s is set aside: newer than what is resumed", name_of(newer))


def has_older(store: Store, step: int) -> bool:
    """Whether there is a complete checkpoint before that of ``step``; the same on all ranks."""

    def has_one() -> bool:
        for older in store.steps():
            if older < step and not store.wrong(older):
                return True
        return False

    return on_first_rank(has_one)


def damage_of(error: BaseException) -> DamagedCheckpoint | None:
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


# -- for people


def show(store: Store, every_byte: bool) -> bool:
    """Print one line per checkpoint, the newest first; return whether all are complete.

    Without a checkpoint that is false: the root may be another than was meant.
    """
    whole = []
    damaged = []
    for step in store.steps():
        wrong = store.wrong(step, every_byte)
        if wrong:
            damaged.append(step)
        else:
            whole.append(step)
        sizes = store.sizes(step)
        gigabytes = sum(sizes.values()) / 1e9
        line = f"{name_of(step)}  {gigabytes:.3f} GB  {len(sizes)} files"
        print(f"{line}  {'; '.join(wrong) or 'whole'}")
    print(f"resume from: {max(whole, default=None)}; unfinished: {store.unfinished()}")
    if not whole and not damaged:
        print(f"no checkpoint in {store.root}: give the root that holds step<N>")
        return False
    return not damaged


def prune(store: Store, keep_last: int, keep_every: int, dry_run: bool) -> None:
    """Delete what neither rule keeps, and say so."""
    outcome = "would be deleted" if dry_run else "deleted"
    for step in left_out(store, keep_last, keep_every):
        print(f"{name_of(step)}: {outcome}")
        if not dry_run:
            store.remove(step)
