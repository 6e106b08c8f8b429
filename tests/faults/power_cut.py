"""What a power cut may leave: a log of file operations, replayed to the states that it allows.

A kill loses nothing that was written, so no kill can prove a flush. Here every operation of all
ranks below the root is logged; a cut may come after any of them. What is certain after a cut: the
content that a file had at its last ``fsync``, the names that a directory had at its own. Of what
came later any part may be there: a name without its content, content of zeros, one rename of two.
"""

import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAMES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


class OperationLog:
    """Appends what this process does below ``root`` to a file that all ranks share."""

    def __init__(self, root: Path, log: Path) -> None:
        self.root = f"{root}/"
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.busy = threading.local()

    def note(self, **operation: object) -> None:
        os.write(self.log, json.dumps(operation).encode() + b"\n")

    def below(self, path: object, dir_fd: int = -1) -> str | None:
        path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if dir_fd not in (None, -1):
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        return path.removeprefix(self.root) if path.startswith(self.root) else None

    def install(self) -> None:
        sys.addaudithook(self.hook)
        fsync = os.fsync

        def logged(fd: int) -> None:
            fsync(fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path == self.root[:-1]:
                self.note(do="flush", path="")
            elif (name := self.below(path)) is not None:
                content = None if os.path.isdir(path) else self.content(path)
                self.note(do="flush", path=name, content=content)

        os.fsync = logged

    def content(self, path: str) -> str:
        self.busy.now = True
        try:
            return Path(path).read_bytes().hex()
        finally:
            self.busy.now = False

    def hook(self, event: str, args: tuple) -> None:
        if event == "open":
            path, _, flags = args
            if getattr(self.busy, "now", False) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
            if (name := self.below(path)) is not None:
                self.note(do="create", path=name)
        elif event == "os.rename":
            old, new = self.below(args[0]), self.below(args[1])
            if old is not None and new is not None:
                self.note(do="rename", path=old, to=new)
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            name = self.below(args[0], args[-1])
            if name is not None:
                self.note(do=event.removeprefix("os."), path=name)


@dataclass
class Node:
    """A file, or a directory with the names it has now, those flushed, and what came since."""

    entries: dict[str, "Node"] | None = None
    flushed: dict[str, "Node"] = field(default_factory=dict)
    since: list[dict[str, "Node | None"]] = field(default_factory=list)  # each whole or not at all
    content: bytes | None = None  # at the last flush
    size: int = 0  # in the end

    def change(self, change: dict[str, "Node | None"]) -> None:
        self.since.append(change)
        self.entries = changed(self.entries, change)


def changed(entries: dict[str, Node], change: dict[str, Node | None]) -> dict[str, Node]:
    together = entries | change
    return {name: node for name, node in together.items() if node is not None}


class Disk:
    """The tree that the logged operations make."""

    def __init__(self) -> None:
        self.root = Node(entries={})

    def find(self, path: str) -> Node | None:
        node = self.root
        for part in filter(None, path.split("/")):
            node = (node.entries or {}).get(part)
            if node is None:
                return None
        return node

    def do(self, operation: dict) -> None:
        path = operation["path"]
        parent = self.find(os.path.dirname(path))
        name, node = os.path.basename(path), self.find(path)
        if operation["do"] == "flush":
            if node is None:
                return
            if node.entries is None:
                node.content = bytes.fromhex(operation["content"])
                node.size = len(node.content)
            else:
                node.flushed, node.since = dict(node.entries), []
        elif parent is None:
            return
        elif operation["do"] == "create":
            if node is None:
                parent.change({name: Node()})
            else:
                node.content = None  # it is written anew: nothing of it is certain
        elif operation["do"] == "mkdir":
            if node is None:
                parent.change({name: Node(entries={})})
        elif operation["do"] == "rename" and node is not None:
            parent.change({name: None, os.path.basename(operation["to"]): node})
        elif operation["do"] in ("remove", "rmdir") and node is not None:
            parent.change({name: None})

    def write(self, target: Path, node: Node, how: "How") -> None:
        """Make what a cut has left of ``node`` as ``target``."""
        if node.entries is None:
            certain = node.content is not None
            target.write_bytes(node.content if certain else how.lost_content())
            return
        target.mkdir(exist_ok=True)
        entries = node.flushed
        for change in node.since:
            if how.kept():
                entries = changed(entries, change)
        for name, child in entries.items():
            self.write(target / name, child, how)


class How:
    """Which of the uncertain things a cut has left."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind, self.rng = kind, rng

    def kept(self) -> bool:
        return {"nothing": False, "names": True}.get(self.kind, self.rng.random() < 0.5)

    def lost_content(self) -> bytes:
        return b"" if self.rng.random() < 0.5 else bytes(100)


def cuts(log: Path, scratch: Path, seed: int, chances: int) -> Iterator[tuple[Path, set[int], str]]:
    """Each state that a cut may leave, the steps whose save had returned by then, and the cut."""
    operations = [json.loads(line) for line in log.read_text().splitlines()]
    disk, returned = Disk(), {}
    for number, operation in enumerate(operations):
        if operation["do"] == "committed":
            returned.setdefault(operation["step"], set()).add(operation["rank"])
        else:
            disk.do(operation)
        durable = {step for step, ranks in returned.items() if len(ranks) == operation.get("of", 2)}
        for kind in ("nothing", "names", *(f"chance {n}" for n in range(chances))):
            state = scratch / "state"
            shutil.rmtree(state, ignore_errors=True)
            disk.write(state, disk.root, How(kind, random.Random(f"{seed}/{number}/{kind}")))
            yield state, durable, f"operation {number}, {operation['do']}, {kind}"


def judge(state: Path, durable: set[int], newest_step, faults) -> str | None:
    """What is wrong with the state that a cut has left, None if nothing is."""
    chosen = newest_step(state)
    if durable and (chosen is None or chosen < max(durable)):
        return f"step {max(durable)} was durable, {chosen} is chosen"
    if chosen is not None and (found := faults(state / f"step{chosen}", True)):
        return f"step {chosen} is chosen: {found}"
    for directory in state.glob("step*"):
        if directory.name[4:].isdigit() and (found := faults(directory, True)):
            return f"{directory.name} has its name and is not whole: {found}"
    pointer = state / "latest"
    if pointer.exists():
        name = pointer.read_text(errors="replace")
        if not name or faults(state / name):
            return f"the pointer names {name!r}, which is not whole"
    return None
