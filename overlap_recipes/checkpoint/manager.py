# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/manager.py
"""Checkpoints of a job in one object: saves during training, retention, resume, preemption."""

import atexit
import logging
import operator
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .forgotten import Forgotten
from .kept import Checkpoint, check_kept
from .loading import load_newest
from .preemption import AGAIN, Preemption
from .saves import Saves, is_end_of_job
from .state import DifferingRanks, TrainingState
from .stores import store_of

LOG = logging.getLogger(__name__)
GRACE_S = 30.0  # from SIGTERM to SIGKILL, as in Kubernetes and Slurm
SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # how many ranks torchrun, and srun, have started

_WRAPPERS = {  # by the private name of what is inside, in the order in which torch can load them
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_orig_mod": "torch.compile",
}


class CheckpointManager:
    """Saves ``state`` during training, keeps the newest checkpoints, resumes from them.

    A context manager around the training loop, on all ranks or in one process::

        state = TrainingState(model, optimizer, scheduler=scheduler, per_rank={"data": loader})
        with CheckpointManager("checkpoints", state, keep_last=2) as checkpoints:
            done = checkpoints.resume()  # 0 in a new run
            for step, batch in enumerate(loader, done + 1):
                train_step(batch)
                leave = checkpoints.preempted()
                if leave or step % 100 == 0:
                    checkpoints.save(step)
                if leave:
                    break
        sys.exit(checkpoints.exit_code)

    At the second step, memory for a save is locked during training, so the first save need not wait
    for it; a driver may launch nothing while it locks, which can cost training seconds, once. A
    save that comes before the one before it is written waits until it is. The end of the block, by
    ``sys.exit`` too, waits for the saves and raises if the last one failed. After any other
    exception it waits for 30 s at most for what all ranks have called; a handler that saves and
    needs longer waits itself: ``save(step).result()``.

    Args:
        root: a directory that all ranks see, made if it is missing; or a URL, as text, that
            fsspec knows, such as ``s3://bucket/run``. Checkpoints are ``step<N>`` below it.
        state: what is saved.
        keep_last: how many of the newest checkpoints stay.
        keep_every: steps that it divides stay, too; 0: none.
        grace_s: seconds from SIGTERM to SIGKILL; or of several signals, by their number:
            ``{SIGTERM: 30, SIGUSR1: 300}``. From here to the end of the block such a signal does
            not end the process: ``preempted`` says that it came, and 2 s before the time is over
            the process ends by ``TOO_LATE`` (86). None: no signal is handled, as on a thread,
            where Python cannot; call ``ask_to_leave``.
        host_bytes: how much page-locked memory this rank may take for saves; None: no bound. A save
            takes as much as this rank's part of the state.
        write_threads: how many threads write; None: two, and more where a save comes before the one
            before it is written.

    Attributes:
        exit_code: for ``sys.exit`` after the block. 0, or ``AGAIN`` (85) if the job has left early
            and is to be started again.

    Raises:
        TypeError: ``state`` is no ``TrainingState``, or its model has ``checkpoint_wrapper`` right
            around ``FullyShardedDataParallel``, or one of both right around ``torch.compile``.
        ValueError: a setting has no meaning; on another than the main thread, ``grace_s`` is not
            None; ``root`` is a URL as a ``Path``, or has credentials.
        ImportError: ``root`` is a URL, and fsspec is not installed.
        RuntimeError: on entry, on all ranks. WORLD_SIZE is above 1, and there is no process group.
            Of ``FullyShardedDataParallel``: a rank holds nothing of what an optimizer trains.
            A rank does not see what rank 0 writes below the root. Of a directory: it cannot be
            made, another job writes to it, or its file system has no locks. Of a URL: the store
            cannot be reached, or would take two checkpoints of one step. A store has no locks:
            a second job takes the root, and the first one's later saves fail.
    """

    def __init__(
        self,
        root: Path | str,
        state: TrainingState,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        grace_s: float | Mapping[int, float] | None = GRACE_S,
        host_bytes: int | None = None,
        write_threads: int | None = None,
    ) -> None:
        if not isinstance(state, TrainingState):
            raise TypeError(f"state is a {type(state).__name__}: pass TrainingState(model, ...)")
        _refuse_wrappers(state.model)
        check_kept(keep_last, keep_every)
        self.state = state
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.store = store_of(root)
        self.saves = Saves(_device_of(state), state.model.buffers, host_bytes, write_threads)
        self.forgotten = Forgotten(state)
        self.preemption = Preemption(grace_s, self.forgotten.is_of_job)
        self.exit_code = 0
        self.newest_on_entry: int | None = None  # the step of a checkpoint below the root
        self.has_resumed = False
        self.latest_step: int | None = None
        self.latest: Future | None = None
        self.block = ExitStack()
        self.entered_by = 0  # a process

    def __enter__(self) -> "CheckpointManager":
        _refuse_ranks_without_a_group()
        with ExitStack() as block:
            block.enter_context(self.preemption)
            block.callback(self.store.close)  # before it is opened: a part of that may go well
            self.saves.calling.on_first_rank(self.store.open)
            block.enter_context(self.saves)
            block.enter_context(self.forgotten)
            self.refuse_ranks_without_state()
            self.refuse_ranks_elsewhere()
            self.preemption.all_step = all(self.saves.calling.together(self.has_optimizers))
            self.newest_on_entry = self.saves.calling.on_first_rank(self.newest_step)
            self.saves.prepare({"app": self.state})
            self.block = block.pop_all()  # what __exit__ ends; after an error it has ended already
        self.entered_by = os.getpid()
        atexit.register(self.end_at_exit)
        return self

    def refuse_ranks_without_state(self) -> None:
        """Raise on all ranks where one has no part of what an optimizer trains, under FSDP1."""
        if not self.state.has_flat_parameters():
            return
        by_rank = self.saves.calling.together(_elements_trained, self.state)
        by_optimizer = zip(*by_rank, strict=True)
        for number, elements in enumerate(by_optimizer):
            is_trained = any(elements)
            if is_trained and 0 in elements:
                raise RuntimeError(
                    f"rank {elements.index(0)} holds nothing of what optimizer {number} "
                    f"trains, so that it has no state there, and FullyShardedDataParallel cannot "
                    f"save it: shard each layer by itself (auto_wrap_policy), or use fully_shard"
                )

    def refuse_ranks_elsewhere(self) -> None:
        """Raise on all ranks where one has another place than rank 0 under the name of the root."""
        talk = self.saves.calling
        probe = talk.on_first_rank(self.store.leave_probe)
        try:
            seen = talk.together(self.store.sees, probe)
        finally:
            talk.on_first_rank(self.store.remove_probe, probe)
        elsewhere = [str(rank) for rank, sees in enumerate(seen) if not sees]
        if elsewhere:
            raise RuntimeError(
                f"ranks {', '.join(elsewhere)} do not see in {self.store.root} what rank 0 has "
                f"written there, and no checkpoint would be whole: give a directory that all ranks "
                f"see, or a URL of a store"
            )

    def has_optimizers(self) -> bool:
        return bool(self.state.optimizers)

    def newest_step(self) -> int | None:
        return max(self.store.steps(), default=None)

    @torch.inference_mode(False)
    def resume(self, step: int | None = None, skip: Iterable[str] = ()) -> int:
        """Load the newest whole checkpoint; all ranks call it, before the first step.

        Checkpoints that are newer than what is loaded get another name (``.set-aside-``), under
        which they are found no more. So does one whose bytes turn out to be others than were saved,
        and the one before it is loaded. A store's checkpoints of versions before 0.3 have no
        digests: of those sizes alone are compared.

        Args:
            step: load this one instead.
            skip: names of parameters, buffers, modules, or of parts of the state such as ``data``,
                that stay as they are here.

        Returns:
            The step of the checkpoint; 0 if there is none.

        Raises:
            RuntimeError: after a save; outside the block. The storage cannot be read; a rank does
                not see the checkpoint, or that of ``step`` is not there or lacks files.
            ValueError: it does not fit this job; the message lists what differs. Ranks give
                another ``step`` or ``skip``.
            DamagedCheckpoint: no checkpoint is as it was saved, or bytes of that of ``step`` are
                not.
            CheckpointException: the storage has failed on a rank.
        """
        self.saves.check_is_open()
        if self.latest_step is not None:
            raise RuntimeError("resume once, before the first save")
        if not isinstance(skip, str):  # which the load refuses
            skip = sorted(skip)
        wanted = self.saves.calling.together(lambda: (step, skip))
        if any(each != wanted[0] for each in wanted):
            raise ValueError(
                f"ranks resume otherwise, by rank (step, skip): {wanted}. Give all the same, as "
                f"what rank 0 has found: torch.distributed.broadcast_object_list"
            )
        chosen = load_newest({"app": self.state}, self.store, step, skip)
        self.has_resumed = True
        if chosen is None:
            return 0
        self.state.step = chosen
        self.latest_step = chosen
        self.latest = Future()
        self.latest.set_result(None)
        LOG.info("resumed from step %d", chosen)
        return chosen

    def save(self, step: int) -> Future:
        """Save the state as it is now, during training; all ranks call it with the same step.

        The step that was saved last is not saved again: the call returns when that save has ended.
        Gradients are not saved: a warning says if there are some that no optimizer has used, and
        the first save warns of a scheduler that ``state`` does not have.

        Returns:
            A future: done when the checkpoint is on the storage of all ranks. It raises if the save
            failed on one of them. Such a save is logged and is no checkpoint; training may go on.

        Raises:
            TypeError: ``step`` is no whole number.
            ValueError: it is negative, or below one that was saved.
            RuntimeError: there are checkpoints below the root, and ``resume`` was not called;
                outside the block; this state can never be saved; ranks differ in what they share,
                now at the first save, later at the save before this one; a rank died or came later
                than ranks wait, so that no later save can succeed.
        """
        number = _checked_step(step)
        if not self.has_resumed and self.newest_on_entry is not None:
            raise RuntimeError(
                f"step {self.newest_on_entry} is below {self.store.root}: call resume() before the "
                f"first save, or take another root"
            )
        if self.latest_step is not None and number < self.latest_step:
            raise ValueError(f"step {number} comes after step {self.latest_step}, which is saved")
        if number == self.latest_step:
            failure = self.latest.exception()  # when it has ended
            if failure is None:
                return self.latest
        self.forgotten.look(number)
        if self.preemption.all_step and self.saves.calls == 0 and number > 0:
            self.listen_without_hooks()
        self.state.step = number
        target = Checkpoint(self.store, number, self.keep_last, self.keep_every)
        try:
            self.latest = self.saves.save({"app": self.state}, target)
        except DifferingRanks:  # of the save before; this one is under way
            self.latest = self.saves.latest
            self.latest_step = number
            raise
        finally:
            self.forgotten.count_from_here()
        self.latest_step = number
        return self.latest

    def listen_without_hooks(self) -> None:
        """Let each ``preempted`` ask where the optimizers of a rank step and tell nobody."""
        told = self.saves.calling.together(self.preemption.steps_are_told)
        self.preemption.all_step = all(told)
        if not all(told):
            LOG.warning(
                "no optimizer has called torch's hooks, as none in a CUDA graph does: until now "
                "preempted() has heard of nothing. From now on each call asks all ranks: call it "
                "once a step, on all of them"
            )

    def before_update(self) -> None:
        """Call this before something but an optimizer writes saved tensors, such as an average.

        The current stream then waits until the latest save has read them.
        """
        self.saves.before_update()

    def wait(self) -> None:
        """Return when all saves have ended.

        Raises:
            RuntimeError: the latest one failed.
        """
        with suppress(RuntimeError):  # earlier failures have been logged
            self.saves.wait()
        if _has_failed(self.latest):
            self.latest.result()

    def preempted(self) -> bool:
        """Whether to save and leave now, since a rank was asked to; the same on all ranks.

        Ask on all ranks in the same steps, as often as you like, by one rank alone in an evaluation
        too: the answer changes at most where an optimizer of the job steps, and true is for good.
        Ranks that leave out other steps of it leave at other steps, and their save fails. Where its
        steps call no hook of torch, as in a CUDA graph, a signal counts from the first save on.

        Raises:
            RuntimeError: outside the block.
        """
        leave = self.preemption.agreed()
        if leave:
            self.exit_code = AGAIN
        return leave

    def ask_to_leave(self) -> None:
        """Let ``preempted`` say yes from one of the next steps on, on all ranks.

        For a preemption that comes by no signal: a cloud's notice, Ray's, an operator's. One rank
        is enough. Call it from any thread; it sets no deadline.
        """
        self.preemption.ask_to_leave()

    def end_at_exit(self) -> None:
        """Wait for the save under way of a script that ends inside the block, and say so."""
        if self.latest is None or self.latest.done():
            return
        if os.getpid() != self.entered_by:  # a forked process, which has no thread that saves
            return
        LOG.error(
            "the script ends during the save of step %s; nobody has left the manager: use `with`",
            self.latest_step,
        )
        with suppress(Exception):  # the save logs why it failed
            self.latest.result()

    def __exit__(self, kind, error, trace) -> None:
        atexit.unregister(self.end_at_exit)
        if os.getpid() != self.entered_by:  # a forked process: locks and threads are its parent's
            return
        try:
            if is_end_of_job(kind):
                self.wait()
        finally:
            self.block.__exit__(kind, error, trace)


def _refuse_ranks_without_a_group() -> None:
    """Raise where a launcher has started several ranks, and they do not know of each other."""
    if dist.is_initialized():
        return
    for name in SIZES:
        ranks = os.environ.get(name, "1")
        if ranks.isdigit() and int(ranks) > 1:
            raise RuntimeError(
                f"this is one of {ranks} ranks, as {name} says, without a process group, and each "
                f"would save as if it were the only one: call "
                f"torch.distributed.init_process_group first. If this job is alone, and its "
                f"launcher has started others next to it: del os.environ[{name!r}]"
            )


def _refuse_wrappers(model: nn.Module) -> None:
    """Raise where a wrapper is right around another from which torch cannot load it."""
    layers = {inside: number for number, inside in enumerate(_WRAPPERS)}  # 0: the innermost
    for name, module in model.named_modules():
        outer = _name_inside(module)
        if outer is None:
            continue
        for inner_module in module.children():
            inner = _name_inside(inner_module)
            if inner is None:
                continue
            if layers[outer] < layers[inner]:
                shown = [part for part in name.split(".") if part not in _WRAPPERS]
                where = ".".join(shown) or "the model"
                raise TypeError(
                    f"{where} is {_WRAPPERS[outer]} around {_WRAPPERS[inner]}: torch saves it "
                    f"under names that it cannot load. Wrap it in another order: torch.compile("
                    f"FullyShardedDataParallel(checkpoint_wrapper(layer))) can be loaded"
                )


def _name_inside(module: nn.Module) -> str | None:
    """The name under which ``module`` holds what it wraps; None if it is no wrapper."""
    for name, _ in module.named_children():
        if name in _WRAPPERS:
            return name
    return None


def _elements_trained(state: TrainingState) -> list[int]:
    """How many elements of parameters each optimizer trains on this rank."""
    found = []
    for optimizer in state.optimizers:
        trained = 0
        for group in optimizer.param_groups:
            trained += sum(p.numel() for p in group["params"] if p.requires_grad)
        found.append(trained)
    return found


def _checked_step(step: int) -> int:
    if isinstance(step, bool):
        raise TypeError("step is a bool: give the number of steps taken")
    try:
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(f"step is {step!r}: give the number of steps taken") from error
    if number < 0:
        raise ValueError(f"step is {number}: give the number of steps taken")
    return number


def _has_failed(upload: Future | None) -> bool:
    return upload is not None and upload.done() and upload.exception() is not None


def _device_of(state: TrainingState) -> torch.device:
    """The accelerator that holds parameters of ``state``, else the CPU."""
    parameters = list(state.model.parameters())
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            parameters.extend(group["params"])
    for parameter in parameters:
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
    return torch.device("cpu")
