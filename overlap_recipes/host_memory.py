# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/host_memory.py
"""How much memory a host has left: asked before the kernel ends a job that takes more."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .ranks import on_all_ranks

ROOT = Path("/")
_LITTLE = 2**20  # bytes; to ask takes a millisecond


class Room(NamedTuple):
    """Memory that processes share: a host's, or what a cgroup may take of it."""

    name: str
    place: tuple  # the same on all ranks that take from it
    free: int  # bytes


def rooms(root: Path | None = None) -> list[Room]:
    """What this process takes its memory from, as far as the system says how much is left."""
    root = root or ROOT
    host = (os.uname().nodename, _text(root / "proc/sys/kernel/random/boot_id"))
    found = []
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
            found.append(Room("MemAvailable of /proc/meminfo", host, free))
    for folder in _cgroups(root):
        left = _left_of(folder)
        if left is not None:
            status = folder.stat()
            place = (*host, status.st_dev, status.st_ino)
            found.append(Room(f"the limit of the cgroup {folder}", place, left))
    return found


def refuse_more_than_free(
    count: Callable[[], int], what: str, advice: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on all ranks where those of a host are about to take more than it has left.

    Every rank of ``group`` calls it before it takes anything. Otherwise one would see what others
    have taken already, and count them again.

    Args:
        count: returns the bytes that this rank will take; what it raises is raised on all ranks.
        what, advice: words of the error.
        group: the job's own if None.

    Raises:
        RuntimeError: how much it is, how much is left, and what to do.
    """

    def look() -> tuple[int, list[Room]]:
        nbytes = count()
        if not dist.is_initialized():  # the host's ranks, each of which takes as much
            nbytes *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return nbytes, rooms()

    taken: dict[tuple, list[int]] = {}  # by place, of each rank
    least: dict[tuple, Room] = {}  # by place, what a rank has seen
    for nbytes, found in on_all_ranks(look, group):
        for room in found:
            taken.setdefault(room.place, []).append(nbytes)
            if room.place not in least or room.free < least[room.place].free:
                least[room.place] = room
    for place, room in least.items():
        total = sum(taken[place])
        if total > room.free:
            ranks = len(taken[place])
            of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
            raise RuntimeError(
                f"{what}{of_ranks} take {_in_words(total)} of host memory, and "
                f"{_in_words(room.free)} are left of {room.name}: {advice}"
            )


def refuse_now(nbytes: int) -> None:
    """Raise where this process alone takes more at once than is left; a little is not asked for.

    Raises:
        RuntimeError: how much is left.
    """
    if nbytes < _LITTLE:
        return
    for room in rooms():
        if nbytes > room.free:
            raise RuntimeError(f"{_in_words(room.free)} are left of {room.name}")


def _in_words(nbytes: int) -> str:
    """Bytes as a person says them."""
    if nbytes < 1e9:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e9:.1f} GB"


class MappedFiles:
    """What of this process's memory is that of files: freed, it gives the host nothing back.

    Weights that ``from_pretrained`` has read are such, unless it has changed their dtype.
    """

    def __init__(self) -> None:
        self.begins = []  # addresses, in order
        self.ends = []
        for line in _text(Path("/proc/self/maps")).splitlines():
            addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
            if inode != "0":
                begin, end = addresses.split("-")
                self.begins.append(int(begin, 16))
                self.ends.append(int(end, 16))

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies in a file's memory."""
        address = tensor.data_ptr()
        before = bisect_right(self.begins, address) - 1
        return before >= 0 and address < self.ends[before]


def is_shared_with(device: torch.device) -> bool:
    """Whether a GPU is part of a chip that has one memory for both, as GB10 or a Jetson."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "is_integrated", False))


def refuse_shared_with(device: torch.device, what: str) -> None:
    """Raise where a device computes in the host's memory.

    Raises:
        RuntimeError: says what to do.
    """
    if is_shared_with(device):
        raise RuntimeError(
            f"{device} shares the host's memory: {what} on the host frees none, and its copies "
            "take time. Train without; or pass unified_memory=True, to see what it does"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):  # not on this host
        return ""


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's cgroup and of those that hold it, of either version."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers != "":  # version 1
            if "memory" not in controllers.split(","):
                continue
            top = top / "memory"
        folder = top / path.lstrip("/")
        yield folder
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder


_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def _left_of(folder: Path) -> int | None:
    """A cgroup's limit less what it uses, but for files that it can drop."""
    for limit_name, used_name in _LIMITS:
        limit = _text(folder / limit_name).strip()
        used = _text(folder / used_name).strip()
        if not limit.isdecimal() or not used.isdecimal():  # no limit is "max"
            continue
        files = {}
        for line in _text(folder / "memory.stat").splitlines():
            name, value = line.split()
            files[name] = int(value)
        dropped = 0
        for name in ("inactive_file", "active_file"):
            # In version 1 that of the folders below is apart; in version 2 it is a part of it.
            dropped += files.get(f"total_{name}", files.get(name, 0))
        return max(0, int(limit) - int(used) + dropped)
    return None
