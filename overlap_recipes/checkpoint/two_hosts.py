# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/two_hosts.py
"""Saves to each host's own disk, with a copy at a partner; a restart gathers what is left."""

import json
import os
import shutil
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from .digests import DamagedCheckpoint
from .names import check_kept, check_name, name_of, refuse_below, steps_left_out, steps_of
from .saves import CALLING, Job, Saves

PIECE = 64 << 20  # bytes that are sent at a time
FEWEST = 2  # checkpoints on each host: the newest may have its name on some hosts only
LISTING = "files.json"  # which save it is, names and sizes of all its files on any host
NONE_IS_WHOLE = (
    "the hosts have no checkpoint with all of its files between them, by step: %s. Start with "
    "those that wrote them; to begin anew, remove them or take another directory"
)
OTHER_HOSTS = (
    "hosts need equal numbers of ranks, that follow each other; by name they are on %s: give "
    "PartnerSaves per_host, or set LOCAL_WORLD_SIZE"
)


def pieces_of(file: Path) -> tuple[torch.Tensor, ...]:
    """The bytes of ``file``, which is mapped, as tensors."""
    size = file.stat().st_size
    if size == 0:
        return ()
    return torch.from_file(str(file), size=size, dtype=torch.uint8).split(PIECE)


def arriving(size: int, receive) -> Iterator[bytearray]:
    """``size`` bytes that ``receive`` puts into one tensor after another."""
    for begin in range(0, size, PIECE):
        memory = bytearray(min(PIECE, size - begin))
        receive(torch.frombuffer(memory, dtype=torch.uint8))
        yield memory


def write_file(file: Path, pieces: Iterator[bytes | bytearray]) -> None:
    """Write ``file`` and flush it; whoever sends ``pieces`` gets rid of them even if that fails."""
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with aside.open("wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    finally:
        for _ in pieces:
            pass


class PartnerSaves(Saves):
    """Overlapped saves to directories of each host, with copies on the next host.

    Args:
        per_host: ranks per host. None: as many as torchrun has started here; without it, as many
            as are on hosts of one name.
        keep_last: how many of the newest checkpoints stay on each host, two at least.
        keep_every: steps that it divides stay, too.

    Raises:
        ValueError: ``keep_last`` is below 2; or, without ``per_host`` and torchrun, hosts have
            other numbers of ranks, or ranks that do not follow each other.
    """

    def __init__(
        self,
        *args,
        per_host: int | None = None,
        keep_last: int = FEWEST,
        keep_every: int = 0,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        if keep_last < FEWEST:
            raise ValueError(f"keep_last is {keep_last}: {FEWEST} at least, one may be half there")
        check_kept(keep_last, keep_every)  # now, and not at the first save
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.per_host = per_host or self.count_ranks()
        self.first_of_host = self.rank % self.per_host == 0

    def count_ranks(self) -> int:
        """Ranks per host: as torchrun says, else by the names of the hosts."""
        if "LOCAL_WORLD_SIZE" in os.environ:
            return int(os.environ["LOCAL_WORLD_SIZE"])
        return ranks_of_a_host(self.together(socket.gethostname, group=CALLING))

    def save(self, state_dict: dict, directory: Path) -> Future | None:
        """As ``Saves.save``; ``directory`` is ``local / name_of(step)``, on each host its own.

        Raises:
            ValueError: the name of ``directory`` does not stand for a step.
        """
        check_name(Path(directory))
        return super().save(state_dict, directory)

    def begin(self, job: Job, aside: Path) -> tuple:
        super().begin(job, aside)
        refuse_below(steps_in(aside.parent), job.directory)
        if self.first_of_host:  # what a job that died, or a save that failed, has left here
            for leftover in aside.parent.glob("step*.incomplete"):
                shutil.rmtree(leftover)
        return job.number, aside.name  # hosts have directories of their own

    def write(self, state: dict, directory: Path) -> None:
        super().write(state, directory)
        files = self.together(self.own_files, directory)
        metadata, save = self.together(self.metadata_and_name, directory)[0]
        if len(files) > self.per_host:
            self.exchange(directory, files)
        if self.first_of_host:
            write_file(directory / ".metadata", iter([metadata]))
            listing: dict[str, int] = {}
            for of_rank in files:
                listing |= of_rank
            listing[".metadata"] = len(metadata)
            write_listing(directory, save, listing)

    def own_files(self, directory: Path) -> dict[str, int]:
        """Names and sizes of this rank's files."""
        files = directory.glob(f"__{self.rank}_*.distcp")
        return {file.name: file.stat().st_size for file in files}

    def metadata_and_name(self, directory: Path) -> tuple[bytes, str] | None:
        """On rank 0: the bytes of ``.metadata``, and a name that no other save has; later ones sort
        behind it."""
        if self.rank != 0:
            return None
        name = f"{time.time_ns()}-{uuid.uuid4().hex}"
        return (directory / ".metadata").read_bytes(), name

    def exchange(self, directory: Path, files: list[dict[str, int]]) -> None:
        """Send this rank's files to the next host, and take those of the host before."""
        group = self.groups[0]
        ranks = len(files)
        to = (self.rank + self.per_host) % ranks
        source = (self.rank - self.per_host) % ranks
        sends = []
        failures = []
        for name in files[self.rank]:
            sends += [dist.isend(piece, to, group) for piece in pieces_of(directory / name)]
        for name, size in files[source].items():
            pieces = arriving(size, partial(dist.recv, src=source, group=group))
            try:
                write_file(directory / name, pieces)
            except OSError as failure:
                failures.append(failure)
        for send in sends:
            send.wait()
        if failures:
            raise failures[0]

    def commit(self, aside: Path, directory: Path) -> None:
        if self.first_of_host:
            shutil.rmtree(directory, ignore_errors=True)
            aside.rename(directory)
            there = steps_in(directory.parent)
            for step in steps_left_out(there, self.keep_last, self.keep_every):
                shutil.rmtree(directory.with_name(name_of(step)))


def ranks_of_a_host(hosts: list[str]) -> int:
    """How many ranks each host has.

    Args:
        hosts: the name of each rank's host.

    Raises:
        ValueError: hosts have different numbers of ranks, or ranks that do not follow each other.
    """
    per_host = hosts.count(hosts[0])
    for rank, host in enumerate(hosts):
        first = rank - rank % per_host
        if host != hosts[first] or hosts.count(host) != per_host:
            raise ValueError(OTHER_HOSTS % (hosts,))
    return per_host


def steps_in(local: Path) -> list[int]:
    """The steps that have a name and a listing on this host, the newest first."""
    return steps_of(listing.parent.name for listing in local.glob(f"step*/{LISTING}"))


def write_listing(directory: Path, save: str, files: dict[str, int]) -> None:
    text = json.dumps({"save": save, "files": files})
    write_file(directory / LISTING, iter([text.encode()]))


def held(local: Path) -> dict[tuple[int, str], tuple[dict, dict]]:
    """By step and save: the sizes of the files that it consists of, and of those that are here."""
    found = {}
    for step in steps_in(local):
        directory = local / name_of(step)
        with suppress(OSError, ValueError):  # a power cut may have emptied the listing
            listing = json.loads((directory / LISTING).read_text())
            sizes = {file.name: file.stat().st_size for file in directory.iterdir()}
            found[step, listing["save"]] = listing["files"], sizes
    return found


@dataclass(frozen=True)
class WholeSave:
    """A save of which every file is on some host."""

    step: int
    save: str
    sizes: dict[str, int]
    owners: dict[str, list[int]]  # by file, the ranks on whose host it is


def whole_saves(hosts: list[dict]) -> list[WholeSave]:
    """Saves of which ``hosts`` have every file between them, the newest first.

    Of two saves of one step, the later one is the newer.

    Args:
        hosts: what is ``held``, by rank.
    """
    found = []
    every = set()
    for host in hosts:
        every.update(host)
    for step, save in sorted(every, reverse=True):
        views = [host.get((step, save), ({}, {})) for host in hosts]
        sizes = next(listing for listing, _ in views if listing)
        owners = {}
        for name, size in sizes.items():
            owners[name] = [rank for rank, (_, here) in enumerate(views) if here.get(name) == size]
        if all(owners.values()):
            found.append(WholeSave(step, save, sizes, owners))
    return found


def gather(local: Path) -> int | None:
    """Bring the newest checkpoint that the hosts have between them to ``local`` of every host.

    All ranks call it. When all hosts have this one, newer ones are deleted: nobody has all of them,
    and training takes these steps again. Older ones stay; of two saves of one step, by a job that
    lost a host and by the one that went on, only the later whole one does.

    Returns:
        Its step; None if no host has a checkpoint.

    Raises:
        DamagedCheckpoint: there are checkpoints, and the hosts have none with all of its files.
    """
    group = dist.new_group(backend="gloo")
    try:
        return gather_in(group, local)
    finally:
        dist.destroy_process_group(group)


def gather_in(group: dist.ProcessGroup, local: Path) -> int | None:
    """``gather``, by a group of all ranks."""
    own = held(local)
    named = steps_of(path.name for path in local.glob("step*"))  # some may have lost their listing
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (own, named), group)
    hosts = [held_there for held_there, _ in of_ranks]
    wholes = whole_saves(hosts)
    if not wholes:
        steps = set()
        for _, named_there in of_ranks:
            steps.update(named_there)
        if steps:
            raise DamagedCheckpoint(NONE_IS_WHOLE % sorted(steps))
        return None
    newest = wholes[0]
    directory = local / name_of(newest.step)
    if (newest.step, newest.save) not in own:  # parts, or another save of the same step
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier(group)
    directory.mkdir(parents=True, exist_ok=True)
    for name, ranks in newest.owners.items():
        broadcast = partial(dist.broadcast, src=ranks[0], group=group)
        if len(ranks) == len(hosts):
            continue
        if dist.get_rank() == ranks[0]:
            for piece in pieces_of(directory / name):
                broadcast(piece)
        else:
            write_file(directory / name, arriving(newest.sizes[name], broadcast))
    write_listing(directory, newest.save, newest.sizes)
    dist.barrier(group)
    for step in steps_in(local):
        if step > newest.step:
            shutil.rmtree(local / name_of(step), ignore_errors=True)
    for step in mixed_steps(own, hosts, wholes):
        if step < newest.step:
            shutil.rmtree(local / name_of(step), ignore_errors=True)
    return newest.step


def mixed_steps(own: dict, hosts: list[dict], wholes: list[WholeSave]) -> list[int]:
    """Steps of which ``own`` has another save than other hosts, and not the latest whole one."""
    saves: dict[int, set[str]] = defaultdict(set)
    for host in hosts:
        for step, save in host:
            saves[step].add(save)
    latest: dict[int, str] = {}
    for whole in reversed(wholes):
        latest[whole.step] = whole.save
    found = []
    for step, save in own:
        if len(saves[step]) > 1 and save != latest.get(step):
            found.append(step)
    return found
