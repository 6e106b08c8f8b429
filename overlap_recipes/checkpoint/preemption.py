# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/preemption.py
"""Leave before the deadline of a preemption: all ranks save the same step, and end.

A job's exit code tells its scheduler to start it again. After its last save the script ends by
``sys.exit(AGAIN)``. ``Preemption`` itself ends a process with ``TOO_LATE`` shortly before the
deadline, if the save has not ended by then. Either way the next start resumes from the newest
checkpoint.
"""

import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ranks import wait_of_ranks

AGAIN = 85  # exit code: saved, start me again
_MARGIN_S = 2.0  # before SIGKILL
TOO_LATE = 86  # exit code: start me again; no time for the last save, older checkpoints are whole


class _Handler:
    """What one signal does as long as a ``Preemption`` that watches for it is open: it asks all.

    Attributes:
        number: of the signal.
        open: those whose block has not ended; one that nobody has kept or entered is none.
        before: the handler of before, which comes back with the end of the last.
        process: that has made them.
        is_ignored: the last has ended because it was asked.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.open: weakref.WeakSet[Preemption] = weakref.WeakSet()
        self.before: object = signal.SIG_DFL
        self.process = 0
        self.is_ignored = False

    def ask(self, one: "Preemption") -> None:
        """Ask ``one``, too, from now on."""
        replaced = signal.signal(self.number, self.on_signal)
        if replaced is None:  # a handler of C
            replaced = signal.SIG_DFL
        if replaced != self.on_signal:
            self.before = replaced
        if self.process != os.getpid():  # the first time, or those that are open are a parent's
            self.process = os.getpid()
            self.open = weakref.WeakSet()
            os.register_at_fork(after_in_child=self.give_back_handler)
        self.is_ignored = False
        self.open.add(one)

    def forget(self, one: "Preemption") -> None:
        self.open.discard(one)
        if not self.open:
            # Asked once more, a process that is on its way out still gives its own exit code.
            self.is_ignored = one.asked
            signal.signal(self.number, signal.SIG_IGN if one.asked else self.before)

    def on_signal(self, number: int, frame: object) -> None:
        is_child = os.getpid() != self.process  # forked just now
        if is_child or not self.open:
            signal.signal(number, self.before)
            os.kill(os.getpid(), number)
            return
        for one in list(self.open):
            one.on_signal(number)

    def give_back_handler(self) -> None:
        """In a forked child: a handler in Python would not end it while it waits for a lock."""
        if self.is_ignored or signal.getsignal(self.number) == self.on_signal:
            signal.signal(self.number, self.before)
            if _is_loaders_worker():
                signal.pthread_sigmask(signal.SIG_BLOCK, {self.number})
                threading.Thread(target=self.end_for_parent, name="signals", daemon=True).start()

    def end_for_parent(self) -> None:
        """In a worker of a loader: end it when its parent says so.

        torchrun and Slurm signal all processes of a rank, and a loader whose worker is killed
        raises in the loop. So what others send is passed over.
        """
        while signal.sigwaitinfo({self.number}).si_pid != os.getppid():
            pass
        os._exit(0)  # as torch's own handler


def _is_loaders_worker() -> bool:
    """Whether this process, which is being forked, is to be a worker of a ``DataLoader``."""
    frame = sys._getframe()
    while frame is not None:
        process = frame.f_locals.get("process_obj")  # of multiprocessing
        if getattr(getattr(process, "_target", None), "__name__", "") == "_worker_loop":
            return True
        frame = frame.f_back
    return False


_HANDLERS: dict[int, _Handler] = {}  # by the number of the signal


class Preemption:
    """Watch for signals and agree on the last step; a context manager around the loop.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL; this process gives up 2 s before that. Or the
            seconds of several signals, by their number: ``{SIGTERM: 30, SIGUSR1: 300}``. None: of
            none; ``ask_to_leave`` alone asks.
        is_of_job: whether a step of this optimizer is one of the job, and no rank's own.

    Construct it on the main thread of every rank, as early as you can; with None, on any thread.
    Enter it when the process group exists. Where there are several, in each other or in turn, a
    signal asks all of them. It acts in this process alone: in a forked child, such as a worker of
    a pool or of a data loader, the signal does what it did before.

    Attributes:
        asked: this rank, by a signal or by ``ask_to_leave``.
        all_step: an optimizer of torch's steps on each rank, so that none has to agree before.

    Raises:
        ValueError: this is not the main thread, and a signal is named; or it is none that a process
            can handle; or the seconds are no more than the margin.
    """

    def __init__(
        self,
        grace_s: float | Mapping[int, float] | None,
        is_of_job: Callable[[torch.optim.Optimizer], bool] = lambda optimizer: True,
    ) -> None:
        if grace_s is None:
            grace_s = {}
        elif not isinstance(grace_s, Mapping):
            grace_s = {signal.SIGTERM: grace_s}
        self.grace_s = {}
        for number, seconds in grace_s.items():
            self.grace_s[_checked_signal(number)] = _checked_seconds(seconds)
        self.refuse_thread()
        self.any_grace = bool(grace_s)  # on any rank, once the block is entered
        self.is_of_job = is_of_job
        self.asked = False
        self.all_step = False
        self.answer = False  # the latest
        self.is_answered = False  # in this step
        self.has_stepped = False  # an optimizer, since the block was entered
        self.entered = False  # with a process group
        self.left = threading.Event()
        self.may_listen = threading.Lock()  # who gets it listens; nobody gives it back
        self.has_listened = threading.Event()  # all ranks leave
        self.vote: tuple[torch.Tensor, dist.Work] | None = None  # under way
        self.hook = None
        for number in self.grace_s:
            _HANDLERS.setdefault(number, _Handler(number)).ask(self)

    def refuse_thread(self) -> None:
        if self.grace_s and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "Python handles signals on the main thread alone, and this is another: give "
                "grace_s=None, and call ask_to_leave() where you hear of a preemption"
            )

    def __enter__(self) -> "Preemption":
        self.refuse_thread()
        self.hook = register_optimizer_step_post_hook(self.begin_step)
        if dist.is_initialized():
            wait = wait_of_ranks()
            self.votes = dist.new_group(backend="gloo", timeout=wait)
            self.peers = dist.new_group(backend="gloo", timeout=wait)
            graces = torch.tensor(int(self.any_grace))
            dist.all_reduce(graces, dist.ReduceOp.MAX, self.votes)
            self.any_grace = bool(graces)
            self.entered = True
            if self.asked:  # while the job was starting
                self.start_listening()
        return self

    def on_signal(self, number: int) -> None:
        """A signal has come: leave, and before its deadline."""
        if self.left.is_set():
            return
        watching = threading.Thread(
            target=self.watch, args=(self.grace_s[number],), name="deadline", daemon=True
        )
        watching.start()
        self.ask_to_leave()

    def ask_to_leave(self) -> None:
        """Save and leave soon: the next answers of ``agreed`` are true on all ranks."""
        self.asked = True
        if self.entered and not self.left.is_set():
            self.start_listening()

    def watch(self, grace_s: float) -> None:
        if not self.left.wait(min(grace_s - _MARGIN_S, threading.TIMEOUT_MAX)):
            os.write(2, b"preempted: no time left, the save has not ended\n")
            os._exit(TOO_LATE)

    def start_listening(self) -> None:
        """Once, from whichever thread; a signal may come in the middle of it."""
        if self.may_listen.acquire(blocking=False):
            threading.Thread(target=self.listen, name="peers", daemon=True).start()

    def listen(self) -> None:
        """Return when all ranks leave; end this process if another has gone before."""
        try:
            dist.all_reduce(torch.zeros(1), group=self.peers)
        except RuntimeError:
            if not self.left.is_set():
                os.write(2, b"asked to leave, and another rank has gone already\n")
                os._exit(1)
        self.has_listened.set()

    @torch.compiler.disable  # a compiled optimizer step would keep the first answer
    def begin_step(self, optimizer: torch.optim.Optimizer, *hooked: object) -> None:
        """Let the next ``agreed`` give another answer: an optimizer has stepped."""
        if self.is_of_job(optimizer):
            self.is_answered = False
            self.has_stepped = True

    def steps_are_told(self) -> bool:
        """Whether an optimizer has stepped as torch's hooks know it."""
        return self.has_stepped

    def agreed(self) -> bool:
        """Whether to save and leave now, because a rank had been asked to; the same on all ranks.

        Ask on all ranks in the same steps, as often as you like. A step ends where an optimizer has
        stepped: until then each call gives the answer of the first. True is for good. A signal
        counts from the step after the one in which it was there when ``agreed`` was called;
        without a process group from the next answer on. Before the first step of an optimizer the
        answer is no if ``all_step``; else each call gives an answer of its own: ask once a step.

        Raises:
            RuntimeError: outside the block, or the process group was made in it.
        """
        if self.answer:
            return True  # for good
        is_open = self.hook is not None and not self.left.is_set()
        if not is_open or dist.is_initialized() != self.entered:
            raise RuntimeError("ask inside its block, entered when the process group is there")
        if self.is_answered:
            return False  # until an optimizer steps
        if not self.entered:
            self.answer = self.asked  # this rank is alone
        elif self.all_step and not self.has_stepped:
            return False
        else:
            self.answer = self.ask_all_ranks()
        self.is_answered = self.has_stepped  # before the first step nothing ends an answer
        return self.answer

    def ask_all_ranks(self) -> bool:
        """Whether any rank had been asked at the previous vote; begin the next one."""
        stop = False
        if self.vote is not None:
            asked, work = self.vote
            work.wait()
            stop = bool(asked)
        asked = torch.tensor(int(self.asked))
        self.vote = asked, dist.all_reduce(asked, dist.ReduceOp.MAX, self.votes, async_op=True)
        return stop

    def __exit__(self, kind, error, trace) -> None:
        self.hook.remove()
        self.left.set()
        if kind is None and self.entered:
            if self.vote is not None:
                self.vote[1].wait()
            if self.any_grace or self.answer:  # else no rank has heard of a signal
                self.start_listening()
                self.has_listened.wait()
        elif self.vote is not None:
            threading.Thread(target=self.end_vote, name="last vote", daemon=True).start()
        for number in self.grace_s:
            _HANDLERS[number].forget(self)

    def end_vote(self) -> None:
        """Hold the group until the last vote has ended, or the process.

        A rank that was lost with its host never answers. Where nothing holds the group, the end of
        the process waits until the vote has timed out, and the launcher until then.
        """
        with suppress(RuntimeError):
            self.vote[1].wait()


def _checked_signal(number: int) -> int:
    known = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if number not in known:
        raise ValueError(
            f"grace_s has {number!r}, which is no signal that a process can handle: give "
            f"{{signal.SIGUSR1: 300}}"
        )
    return int(number)


def _checked_seconds(seconds: float) -> float:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or math.isnan(seconds) or seconds <= _MARGIN_S:
        raise ValueError(
            f"grace_s is {seconds!r}: give the seconds from the signal to SIGKILL, more than the "
            f"{_MARGIN_S:g} that are kept as a margin; or None, where no signal comes"
        )
    return seconds
