# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/preemption.py
"""Leave before the deadline of a preemption: all ranks save the same step, and end.

A job's exit code tells its scheduler to start it again. After its last save the script ends by
``sys.exit(AGAIN)``. ``Preemption`` itself ends a process with ``TOO_LATE`` shortly before the
deadline, if the save has not ended by then. Either way the next start resumes from the newest
checkpoint.
"""

import os
import signal
import threading
import weakref
from collections.abc import Mapping
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


_HANDLERS: dict[int, _Handler] = {}  # by the number of the signal


class Preemption:
    """Watch for signals and agree on the last step; a context manager around the loop.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL; this process gives up 2 s before that. Or the
            seconds of several signals, by their number: ``{SIGTERM: 30, SIGUSR1: 300}``. None: of
            none; ``ask_to_leave`` alone asks.

    Construct it on the main thread of every rank, as early as you can; with None, on any thread.
    Enter it when the process group exists. Where there are several, in each other or in turn, a
    signal asks all of them. It acts in this process alone: in a forked child, such as a worker of
    a pool or of a data loader, the signal does what it did before.

    Attributes:
        asked: this rank, by a signal or by ``ask_to_leave``.
        all_step: an optimizer of torch's steps on each rank, so that none has to agree before.

    Raises:
        ValueError: this is not the main thread, and a signal is named.
    """

    def __init__(self, grace_s: float | Mapping[int, float] | None) -> None:
        if grace_s is None:
            grace_s = {}
        elif not isinstance(grace_s, Mapping):
            grace_s = {signal.SIGTERM: grace_s}
        if grace_s and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "Python handles signals on the main thread alone, and this is another: give "
                "grace_s=None, and call ask_to_leave() where you hear of a preemption"
            )
        self.grace_s = {int(number): seconds for number, seconds in grace_s.items()}
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

    def __enter__(self) -> "Preemption":
        self.hook = register_optimizer_step_post_hook(self.begin_step)
        if dist.is_initialized():
            wait = wait_of_ranks()
            self.votes = dist.new_group(backend="gloo", timeout=wait)
            self.peers = dist.new_group(backend="gloo", timeout=wait)
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
        if not self.left.wait(grace_s - _MARGIN_S):
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

    def begin_step(self, *hooked: object) -> None:
        """Let the next ``agreed`` give another answer: an optimizer has stepped."""
        self.is_answered = False
        self.has_stepped = True

    def agreed(self) -> bool:
        """Whether to save and leave now, because a rank had been asked to; the same on all ranks.

        Ask on all ranks in the same steps, as often as you like. A step ends where an optimizer has
        stepped: until then each call gives the answer of the first. True is for good. A signal
        counts from the step after the one in which it was there when ``agreed`` was called;
        without a process group from the next answer on. Before the first step of an optimizer the
        answer is no if ``all_step``; else each call gives an answer of its own: ask once a step.

        Raises:
            RuntimeError: the process group was made, and the block was not entered after that.
        """
        if dist.is_initialized() and not self.entered:
            raise RuntimeError("enter its block when the process group is there")
        if self.answer:
            return True  # for good
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
            if self.grace_s or self.answer:  # else no rank has heard of a signal
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
