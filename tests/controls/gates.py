"""Gates that the controls in this folder name, beside the harness's own (``rankproof.gates``).

A gate is called with the rank's ledger before the recipe runs. It stands in for luck: it makes the
schedule that a missing line goes wrong under happen every time, and a correct recipe passes under
it.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankproof.gates import hold_write
from rankproof.imports import DCP, after_import, around
from rankproof.ledger import EXCEPTION, Ledger, Save

QUEUED_S = 1.0
QUEUED_FLOP_PER_S = 600e12  # bf16 products of a large GPU; on a smaller one the queue is longer
QUEUED_WIDTH = 8192
TURN_LIMIT = timedelta(seconds=60)
SAME_GRADIENTS = "overlap_recipes.fsdp2.same_gradients"
FUNCTIONAL = "torch.distributed._functional_collectives"
GATHERS = ("all_gather_single", "all_gather_into_tensor")  # FSDP2's, by torch version
COLLECTIVES = ("barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter_tensor")
COLLECTIVES += (*GATHERS, "reduce_scatter_single")


def write_in_turn(ledger: Ledger) -> None:
    """``hold_write``, and a write that was held begins when all saves before it have ended.

    A writer that two saves share has the later one's path by then, so the thread tells which it is.
    """
    of_thread = threading.local()

    def on_upload(begun: Save) -> None:
        of_thread.number = begun.number

    def before_write(*_: object, **__: object) -> None:
        for save in ledger.saves[: getattr(of_thread, "number", 0)]:
            if save.in_flight:
                EXCEPTION(save.upload)  # waits

    def install() -> None:
        ledger.on_upload.append(on_upload)
        hold_write(ledger)
        around(sys.modules[DCP].FileSystemWriter, "write_data", before_write)

    after_import(DCP, install)


def finish_staging_first(ledger: Ledger) -> None:
    """Have every asynchronous staging end before ``async_save`` goes on.

    That is when it reports a failed staging as done (torch 2.13): a recipe that looks at
    ``staging_completion`` alone sees success.
    """

    def staged(result: object, *_: object, **__: object) -> None:
        if isinstance(result, Future):
            wait([result])

    def install() -> None:
        from torch.distributed.checkpoint.staging import DefaultStager

        around(DefaultStager, "stage", after=staged)

    after_import(DCP, install)


def queue_work(ledger: Ledger) -> None:
    """Queue about a second of work on the compute stream before each optimizer step but the first.

    The first step loads kernels, which synchronises; it is left alone.
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


def _leave_out_agreement() -> None:
    agreement = sys.modules[SAME_GRADIENTS].SameGradients
    agreement.exchange = lambda self, number, checksum: [0] * self.ranks


def _take_turns(waits: Callable[[int], bool]) -> None:
    """After each collective, hold the ranks that ``waits`` names until all others enter their next.

    What lies between two collectives then runs on one side first and on the other after it: the
    worst schedule for two ranks that share memory and forgot a barrier, and a legal one for those
    that did not. All ranks must call the same collectives in the same order. What the hosts agree
    on in their memory orders no streams, and is left out.
    """
    after_import(SAME_GRADIENTS, _leave_out_agreement)
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

    def of_dtensors() -> None:  # norms over all shards
        around(sys.modules[FUNCTIONAL], "all_reduce", lambda *_, **__: enter(), held)

    after_import(FUNCTIONAL, of_dtensors)


def rank_0_first(ledger: Ledger) -> None:
    """Between collectives, let rank 0 run ahead: it writes before the others have read."""
    _take_turns(lambda rank: rank != 0)


def rank_0_last(ledger: Ledger) -> None:
    """Between collectives, let rank 0 come last: the others read before it has written."""
    _take_turns(lambda rank: rank == 0)
