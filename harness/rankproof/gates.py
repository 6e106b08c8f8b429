"""Gates: events that hold a background step until the recipe has done something.

They replace luck. A gate opens at the moment when a correct recipe needs it open, or when a recipe
that lacks the line under test has gone past it; so the correct recipe passes under every gate.
"""

import hashlib
import os
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from rankproof.imports import DCP, HARNESS, after_import, around, main_thread_waits
from rankproof.ledger import Ledger, Save

OPEN = "gates"  # folder of the run: a file in it opens the gate of a save on every rank
LOOK_S = 0.05


def _when_main_thread_waits(listener: Callable[[], None]) -> None:
    """Have ``listener`` called whenever the recipe's main thread waits, looks whether an event is
    set, or has completed an optimizer step.

    Conditions are what events, queues, barriers and futures wait with.
    """

    def waits(*_: object, **__: object) -> None:
        if main_thread_waits():
            listener()

    for owner, name in (
        (threading.Condition, "wait"),
        (threading.Event, "is_set"),
        (threading.Thread, "join"),
        (selectors.DefaultSelector, "select"),
        (time, "sleep"),
    ):
        around(owner, name, waits)
    register_optimizer_step_post_hook(lambda *_: listener())


def hold_write(ledger: Ledger) -> None:
    """Hold every asynchronous write until a rank awaits its upload, or another upload begins.

    A recipe that never awaits its last save loads it, or ends, before a byte is written; one that
    does not wait between saves has two uploads at a time.

    Other ways to learn of the end open the gate too. One is to ask ``done()`` in a loop: the second
    time opens it. Another is a callback: what opens it is that the main thread then waits for
    anything, or takes an optimizer step. If after that the recipe ends without having seen
    ``done()`` say yes, or before the callback, its save is noted as *unfinished*. A loop that only
    reads a variable, which the callback sets, waits forever.
    """
    from torch.distributed.checkpoint import FileSystemWriter

    gates: dict[Save, _Gate] = {}
    seen: set[tuple[Save, str]] = set()

    def on_save(save: Save) -> None:
        if save.kind == "async_save":
            gates[save] = _Gate(ledger.run_dir / OPEN, save)
            save.listeners.append(lambda event: on_event(save, event))

    def on_event(save: Save, event: str) -> None:
        if event == "upload" or (event == "asked" and (save, event) in seen):
            gates[save].set()
        seen.add((save, event))

    def on_upload(begun: Save) -> None:
        for save, gate in gates.items():
            if save.directory != begun.directory:
                gate.set()

    def on_wait() -> None:
        for save, event in list(seen):
            if event == "to be called":
                gates[save].set()

    def on_end() -> None:
        for save, gate in gates.items():
            asked, called = (save, "asked") in seen, (save, "to be called") in seen
            if not save.end_known and (save.in_flight if called else asked):
                ledger.note("unfinished", number=save.number)
            gate.abandon()

    original = FileSystemWriter.write_data

    def write_data(self, plan, planner):
        path = os.path.abspath(self.path)
        held = [gate for save, gate in gates.items() if save.directory == path]
        if held and threading.current_thread() is not threading.main_thread():
            held[-1].wait()
            if held[-1].abandoned:
                raise RuntimeError("held until the end: nobody has awaited this save")
        return original(self, plan, planner)

    ledger.on_save.append(on_save)
    ledger.on_upload.append(on_upload)
    ledger.on_end.append(on_end)
    _when_main_thread_waits(on_wait)
    FileSystemWriter.write_data = write_data


class _Gate(threading.Event):
    """An event that opens on every rank: one may await for all, before a barrier that all join."""

    def __init__(self, folder: Path, save: Save) -> None:
        super().__init__()
        key = hashlib.sha256(f"{save.number} {save.directory}".encode()).hexdigest()
        self.file = folder / key
        self.abandoned = False

    def abandon(self) -> None:
        """The recipe has ended: if it has not awaited the save by now, nothing is written."""
        self.abandoned = not self.is_set() and not self.file.exists()
        super().set()

    def set(self) -> None:
        super().set()
        self.file.parent.mkdir(exist_ok=True)
        self.file.touch()

    def wait(self, timeout: float | None = None) -> bool:
        while not super().wait(LOOK_S) and not self.file.exists():
            pass
        return True


def install(name: str, ledger: Ledger) -> None:
    """Put a gate into this rank, before the recipe runs.

    ``name`` is one of :data:`rankproof.recipe.GATES`, or ``file.py:function``: a gate of anybody's
    own, which is called with the ledger. Its frames count as the harness's.
    """
    file, _, function = name.rpartition(":")
    if not file:
        after_import(DCP, lambda: globals()[name](ledger))
        return
    own: dict = {}
    exec(compile(Path(file).read_bytes(), f"{HARNESS}/{file}", "exec"), own)
    own[function](ledger)
