# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/host_memory.py
"""How much memory a host has left: asked before the kernel ends a job that takes more."""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def free_bytes(root: Path = ROOT) -> int | None:
    """What this process may still take: the host's rest, or its cgroup's; None if nobody says."""
    found = []
    with_text = _text(root / "proc/meminfo")
    for line in with_text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(int(value.split()[0]) * 1024)
    for folder in _cgroups(root):
        left = _left_of(folder)
        if left is not None:
            found.append(left)
    return min(found, default=None)


def ranks_of_host() -> int:
    """How many ranks take memory of this host; each of them takes as much."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def refuse_more_than_free(nbytes: int, what: str, advice: str) -> None:
    """Raise where the host has not as much memory left.

    Raises:
        RuntimeError: how much it is, and what to do.
    """
    free = free_bytes()
    if free is not None and nbytes > free:
        raise RuntimeError(
            f"{what} take {nbytes / 1e9:.1f} GB of host memory, and {free / 1e9:.1f} GB are left "
            f"(MemAvailable, or the cgroup's limit): {advice}"
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
        dropped = 0
        for line in _text(folder / "memory.stat").splitlines():
            name, value = line.split()
            if name in ("inactive_file", "active_file"):
                dropped += int(value)
        return max(0, int(limit) - int(used) + dropped)
    return None
