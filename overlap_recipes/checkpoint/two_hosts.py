# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.0, overlap_recipes/checkpoint/two_hosts.py
"""Saves to each host's own disk, with a copy at a partner; a restart gathers what is left."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from .names import check_kept, check_name, name_of, steps_left_out, steps_of
from .saves import Job, Saves

PIECE = 64 << 20  # bytes that are sent at a time
FEWEST = 2  # checkpoints on each host: the newest may have its name on some hosts only
LISTING = "files.json"  # which save it is, names and sizes of all its files on any host


def pieces_of(file: Path) -> tuple[torch.Tensor, ...]:
    size = file.stat().st_size
    return torch.from_file(str(file), size=size, dtype=torch.uint8).split(PIECE) if size else ()


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
        per_host: ranks per host, by default as many as torchrun has started here.
        keep_last: how many of the newest checkpoints stay on each host, two at least.
        keep_every: steps that it divides stay, too, until ``gather`` has brought a newer one.

    Raises:
        ValueError: ``keep_last`` is below 2.
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
        self.per_host = per_host or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.first_of_host = self.rank % self.per_host == 0

    def save(self, state_dict: dict, directory: Path) -> Future | None:
        """As ``Saves.save``; ``directory`` is ``local / name_of(step)``, on each host its own.

        Raises:
            ValueError: the name of ``directory`` does not stand for a step.
        """
        check_name(Path(directory))
        return super().save(state_dict, directory)

    def begin(self, job: Job, aside: Path) -> tuple:
        super().begin(job, aside)
        if self.first_of_host:  # what a job that died, or a save that failed, has left here
            for leftover in aside.parent.glob("step*.incomplete"):
                shutil.rmtree(leftover)
        return job.number, aside.name  # hosts have directories of their own

    def write(self, state: dict, directory: Path) -> None:
        super().write(state, directory)
        names = directory.glob(f"__{self.rank}_*.distcp")
        files = self.together(lambda: {file.name: file.stat().st_size for file in names})
        copy = ((directory / ".metadata").read_bytes(), uuid.uuid4().hex) if self.rank == 0 else ()
        metadata, save = self.together(lambda: copy)[0]
        if len(files) > self.per_host:
            self.exchange(directory, files)
        if self.first_of_host:
            write_file(directory / ".metadata", iter([metadata]))
            files.append({".metadata": len(metadata)})
            listing = {name: size for own in files for name, size in own.items()}
            write_listing(directory, save, listing)

    def exchange(self, directory: Path, files: list[dict[str, int]]) -> None:
        """Send this rank's files to the next host, and take those of the host before."""
        group, ranks = self.groups[0], len(files)
        to, source = (self.rank + self.per_host) % ranks, (self.rank - self.per_host) % ranks
        sends, failures = [], []
        for name in files[self.rank]:
            sends += [dist.isend(piece, to, group) for piece in pieces_of(directory / name)]
        for name, size in files[source].items():
            pieces = arriving(size, lambda piece: dist.recv(piece, source, group))
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


def gather(local: Path) -> int | None:
    """Bring the newest checkpoint that the hosts have between them to ``local`` of every host.

    All ranks call it. Other checkpoints are deleted when all hosts have this one. Returns its step;
    None if there is none.
    """
    group = dist.new_group(backend="gloo")
    hosts: list[dict] = [{}] * dist.get_world_size()
    own = held(local)
    dist.all_gather_object(hosts, own, group)
    for chosen in sorted({save for host in hosts for save in host}, reverse=True):
        views = [host.get(chosen, ({}, {})) for host in hosts]
        listing = next(listing for listing, _ in views if listing)
        owners = [
            (name, size, [rank for rank, (_, sizes) in enumerate(views) if sizes.get(name) == size])
            for name, size in listing.items()
        ]
        if all(ranks for _, _, ranks in owners):
            break
    else:
        return None
    directory = local / name_of(chosen[0])
    if chosen not in own:  # parts, or another save of the same step
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier(group)
    directory.mkdir(parents=True, exist_ok=True)
    for name, size, ranks in owners:
        send = partial(dist.broadcast, src=ranks[0], group=group)
        if len(ranks) == len(hosts):
            continue
        if dist.get_rank() == ranks[0]:
            for piece in pieces_of(directory / name):
                send(piece)
        else:
            write_file(directory / name, arriving(size, send))
    write_listing(directory, chosen[1], listing)
    dist.barrier(group)
    for other in local.glob("step*"):  # newer ones that nobody has all of, and what is older
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
    dist.destroy_process_group(group)
    return chosen[0]
