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
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankproof.imports import DCP, after_import, around, main_thread_waits
from rankproof.ledger import GATE_KEY, Ledger, Save

NEED_SAVES = ("hold_write", "hold_staging", "finish_staging_first")
OPEN = "gates"  # folder of the run: a file in it opens the gate of a save on every rank
LOOK_S = 0.05
QUEUED_S = 1.0
QUEUED_FLOP_PER_S = 600e12  # bf16 products of a large GPU; on a smaller one the queue is longer
QUEUED_WIDTH = 8192
TURN_LIMIT = timedelta(seconds=60)
GATHERS = ("all_gather_single", "all_gather_into_tensor")  # FSDP2's, by torch version
COLLECTIVES = ("barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter_tensor")
COLLECTIVES += (*GATHERS, "reduce_scatter_single")


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


class _Held:
    """A value whose copy waits; it is copied first, so the whole staging copy waits with it."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __deepcopy__(self, memo: dict) -> str:
        self.event.wait()
        return "held"


def hold_staging(ledger: Ledger) -> None:
    """Hold an asynchronous staging copy until it is awaited, or an optimizer step is complete.

    A recipe that does not wait before ``optimizer.step()`` has every tensor of its checkpoint
    copied after the step; one that waits too late for a buffer has the buffer copied after forward.
    """
    pending: list[threading.Event] = []

    def extra_state(save: Save) -> dict:
        if save.kind != "async_save":
            return {}
        event = threading.Event()
        pending.append(event)
        save.listeners.append(lambda what: event.set() if what in ("staging", "upload") else None)
        return {GATE_KEY: _Held(event)}

    def after_step(*_) -> None:
        for event in pending:
            event.set()

    ledger.extra_state = extra_state
    ledger.on_save.append(lambda save: after_step())
    register_optimizer_step_post_hook(after_step)


def finish_staging_first(ledger: Ledger) -> None:
    """Have every asynchronous staging end before ``async_save`` goes on.

    That is when it reports a failed staging as done (torch 2.13): a recipe that looks at
    ``staging_completion`` alone sees success.
    """
    from torch.distributed.checkpoint.staging import DefaultStager

    def staged(result: object, *_: object, **__: object) -> None:
        if isinstance(result, Future):
            wait([result])

    around(DefaultStager, "stage", after=staged)


def queue_work(ledger: Ledger) -> None:
    """Queue about a second of work on the compute stream before each optimizer step but the first.

    The step's kernels then run long after it has returned, as in training that does not wait. The
    first step loads kernels, which synchronises; it is left alone.

    Raises:
        RuntimeError: there is no accelerator to queue work on.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise RuntimeError("the gate 'queue_work' needs an accelerator")
    products = round(QUEUED_S * QUEUED_FLOP_PER_S / (2 * QUEUED_WIDTH**3))
    factors: list[torch.Tensor] = []

    def before_step(optimizer: torch.optim.Optimizer, *_) -> None:
        tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return  # the host's own step: no stream holds it
        if not factors:
            factors.append(
                torch.ones(QUEUED_WIDTH, QUEUED_WIDTH, device=device, dtype=torch.bfloat16)
            )
            factors.append(torch.mm(factors[0], factors[0]))
            return
        for _ in range(products):
            torch.mm(factors[0], factors[0], out=factors[1])

    register_optimizer_step_pre_hook(before_step)


def cross_collectives(ledger: Ledger) -> None:
    """Make even and odd ranks enter the upload's and training's collectives in opposite order.

    Two threads that share one group may do so at any time; here they do it every time. With a
    group of its own for the upload nothing meets, and both orders are right.
    """
    upload_entered, training_entered = threading.Event(), threading.Event()
    upload_first = int(os.environ["RANK"]) % 2 == 0
    gather_object = dist.gather_object

    def in_background() -> bool:
        return threading.current_thread() is not threading.main_thread()

    def upload_gathers(*args, **kwargs):
        if in_background():
            if not upload_first:
                training_entered.wait()
            upload_entered.set()
        return gather_object(*args, **kwargs)

    def training_gathers(original: Callable) -> Callable:
        def gather(*args, **kwargs):
            during_upload = not in_background() and any(s.in_flight for s in ledger.saves)
            if during_upload and upload_first:
                upload_entered.wait()
            result = original(*args, **kwargs)
            if during_upload:
                training_entered.set()
            return result

        return gather

    for module in (dist, dist.distributed_c10d):
        module.gather_object = upload_gathers
        for name in filter(lambda name: hasattr(module, name), GATHERS):
            setattr(module, name, training_gathers(getattr(module, name)))


def _take_turns(waits: Callable[[int], bool]) -> None:
    """After each collective, hold the ranks that ``waits`` names until all others enter their next.

    What lies between two collectives then runs on one side first and on the other after it: the
    worst schedule for two ranks that share memory and forgot a barrier, and a legal one for those
    that did not. All ranks must call the same collectives in the same order.
    """
    entered = 0
    stores: list[dist.Store] = []
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def enter() -> None:
        nonlocal entered
        entered += 1
        stores[:] = stores or [dist.distributed_c10d._get_default_store()]
        stores[0].set(f"turn/{rank}/{entered}", "")

    def held(*_: object, **__: object) -> None:
        if waits(rank):
            others = [other for other in range(ranks) if waits(other) != waits(rank)]
            stores[0].wait([f"turn/{other}/{entered + 1}" for other in others], TURN_LIMIT)

    def ends(group: dist.ProcessGroup | None = None) -> None:
        if group is None:
            enter()

    for module in (dist, dist.distributed_c10d):
        for name in filter(lambda name: hasattr(module, name), COLLECTIVES):
            around(module, name, lambda *_, **__: enter(), held)
        around(module, "destroy_process_group", ends)


def rank_0_first(ledger: Ledger) -> None:
    """Between collectives, let rank 0 run ahead: it writes before the others have read."""
    _take_turns(lambda rank: rank != 0)


def rank_0_last(ledger: Ledger) -> None:
    """Between collectives, let rank 0 come last: the others read before it has written."""
    _take_turns(lambda rank: rank == 0)


def install(name: str, ledger: Ledger) -> None:
    """Put a gate, one of :data:`rankproof.recipe.GATES`, into this rank, before the recipe runs."""
    if name in NEED_SAVES:
        after_import(DCP, lambda: globals()[name](ledger))
    else:
        globals()[name](ledger)
