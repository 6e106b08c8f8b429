"""Private mounts: what a script, its C++ code or its subprocesses write elsewhere lands aside.

A leader makes a mount namespace for its ranks and lays an *overlay* over the home directory,
``/tmp`` and the like: everything that is there can be read, and what is written goes to a layer
that only this run sees. When the ranks have ended, the layer holds what they have left. No root is
needed where the system lets users make namespaces; where it does not, :func:`enter` says so.
"""

import contextlib
import ctypes
import os
import shutil
import stat
from pathlib import Path

CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
PLACES = ("/tmp", "/var/tmp", "/dev/shm")


def _mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mount(
        source.encode(),
        target.encode(),
        kind.encode(),
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    if failed:
        raise OSError(ctypes.get_errno(), f"mount of {target}")


def _enter_namespace() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    user = os.geteuid()
    group = os.getegid()
    if libc.unshare(CLONE_NEWNS) == 0:
        return True
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
        return False
    _map_users(user, group)
    return True


def _map_users(user: int, group: int) -> None:
    """Have this process be, in its new namespace, who it was outside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _may_mount(folder: str) -> bool:
    """Whether this process may make a namespace and mount. A child tries it: it cannot be undone.

    Ubuntu lets anyone make a user namespace and then refuses what it is for, as AppArmor does in
    containers. A process that has got so far cannot go back.
    """
    child = os.fork()
    if child == 0:
        refused = 1
        try:
            if _enter_namespace():
                _mount("none", "/", "none", MS_REC | MS_PRIVATE)
                _mount("tmpfs", folder, "tmpfs")
                refused = 0
        finally:
            os._exit(refused)
    _, status = os.waitpid(child, 0)
    return status == 0


def _places() -> list[str]:
    """``PLACES`` and the home directory, as far as they are there; none that is in another."""
    wanted = set()
    for place in PLACES + (os.path.expanduser("~"),):
        if os.path.isdir(place):
            wanted.add(os.path.realpath(place))
    wanted.discard("/")
    inside = set()
    for place in wanted:
        if any(place.startswith(f"{other}/") for other in wanted):
            inside.add(place)
    return sorted(wanted - inside)


def enter(run_dir: str, through: list[str]) -> dict[str, str]:
    """Give this process, of one thread, and its children private layers; by place, the layer.

    ``run_dir`` and the directories in ``through`` that are there stay what they are; for others see
    :func:`move_made`. Empty where that is not allowed, and then nothing has changed.
    """
    layers: dict[str, str] = {}
    if not _may_mount(run_dir) or not _enter_namespace():
        return layers
    kept = {}  # opened before overlays hide them
    for path in through + [run_dir]:
        if os.path.isdir(path):
            kept[path] = os.open(path, os.O_PATH)
    _mount("none", "/", "none", MS_REC | MS_PRIVATE)
    root = Path(run_dir, "layers")
    root.mkdir()
    _mount("tmpfs", str(root), "tmpfs")
    for number, place in enumerate(_places()):
        upper = root / f"{number}"
        work = root / f"{number}.work"
        upper.mkdir()
        work.mkdir()
        options = f"lowerdir={place},upperdir={upper},workdir={work}"
        with contextlib.suppress(OSError):  # a file system that cannot be a layer
            _mount("overlay", place, "overlay", 0, options)
            layers[place] = os.path.join(run_dir, "layers", str(number))
        # From the second place on: /tmp, and ``run_dir`` in it, may be under an overlay by now.
        root = Path(f"/proc/self/fd/{kept[run_dir]}", "layers")
    for path, descriptor in kept.items():
        _mount(f"/proc/self/fd/{descriptor}", path, "none", MS_BIND | MS_REC)
        os.close(descriptor)
    return layers


def move_made(layers: dict[str, str], through: list[str], to: Path) -> None:
    """Move directories of ``through`` that ranks have made in a layer to ``to / <its number>``.

    A layer is gone with its namespace.
    """
    for number, path in enumerate(through):
        for place, upper in layers.items():
            made = upper + path.removeprefix(place)
            if path.startswith(f"{place}/") and os.path.isdir(made):
                to.mkdir(exist_ok=True)
                shutil.move(made, to / str(number))


def left_in(layers: dict[str, str]) -> list[str]:
    """Files that were written, and those that were removed (``-path``), by their own names."""
    found = []
    for place, upper in layers.items():
        for folder, _, files in os.walk(upper):
            for file in files:
                path = os.path.join(folder, file)
                own = place + path.removeprefix(upper)
                status = os.lstat(path)
                gone = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0  # an overlay's mark
                if gone:
                    own = f"-{own}"
                found.append(own)
    return sorted(found)
