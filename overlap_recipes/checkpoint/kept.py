# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/kept.py
"""When a checkpoint counts, in any store: what is refused, and which stay."""

import logging
from concurrent.futures import ThreadPoolExecutor

from .checked_files import MANIFEST, manifest_text
from .stores.store import Store, name_of
from .writing import Sink

LOG = logging.getLogger(__name__)
_LOOKS = 8  # at a time, at checkpoints


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
        self.place = self.store.begin(self.step, nbytes)
        return self.place

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
    there = store.steps()
    if len(there) <= keep_last:
        return []
    with ThreadPoolExecutor(_LOOKS) as threads:  # a store takes its time to answer
        wrong = list(threads.map(store.wrong, there))
    whole = [step for step, found in zip(there, wrong, strict=True) if not found]
    older = whole[keep_last:]
    return [step for step in older if not keep_every or step % keep_every]


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
