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

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ranks import wait_of_ranks

AGAIN = 85  # exit code: saved, start me again
_MARGIN_S = 2.0  # before SIGKILL
TOO_LATE = 86  # exit code: start me again; no time for the last save, older checkpoints are whole


class _Sigterm:
    """What SIGTERM does as long as a ``Preemption`` is open: it asks all that are.

    Attributes:
        open: those whose block has not ended; one that nobody has kept or entered is none.
        before: the handler of before, which comes back with the end of the last.
        process: that has made them.
        is_ignored: the last has ended because it was asked.
    """

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Preemption] = weakref.WeakSet()
        self.before: object = signal.SIG_DFL
        self.process = 0
        self.is_ignored = False

    def ask(self, one: "Preemption") -> None:
        """Ask ``one``, too, from now on."""
        found = signal.signal(signal.SIGTERM, self.on_signal) or signal.SIG_DFL
        if found != self.on_signal:
            self.before = found
        if self.process != os.getpid():
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
            signal.signal(signal.SIGTERM, signal.SIG_IGN if one.asked else self.before)

    def on_signal(self, number: int, frame: object) -> None:
        is_child = os.getpid() != self.process  # forked just now
        if is_child or not self.open:
            signal.signal(number, self.before)
            os.kill(os.getpid(), number)
            return
        for one in list(self.open):
            one.ask()

    def give_back_handler(self) -> None:
        """In a forked child: a handler in Python would not end it while it waits for a lock."""
        if self.is_ignored or signal.getsignal(signal.SIGTERM) == self.on_signal:
            signal.signal(signal.SIGTERM, self.before)


_SIGTERM = _Sigterm()


class Preemption:
    """Watch for SIGTERM and agree on the last step; a context manager around the loop.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL; this process gives up 2 s before that.

    Construct it on the main thread of every rank, as early as you can. Enter it when the process
    group exists. Where there are several, in each other or in turn, SIGTERM asks all of them. It
    acts in this process alone: in a forked child, such as a worker of a pool or of a data loader,
    SIGTERM does what it did before.

    Raises:
        ValueError: this is not the main thread.
    """

    def __init__(self, grace_s: float) -> None:
        self.leave_s = grace_s - _MARGIN_S
        self.asked = False  # this rank, by SIGTERM
        self.answer = False
        self.is_answered = False  # in this step
        self.has_stepped = False
        self.entered = False
        self.left = threading.Event()
        self.listener: threading.Thread | None = None
        self.vote: tuple[torch.Tensor, dist.Work] | None = None
        self.hook = None
        _SIGTERM.ask(self)

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

    def ask(self) -> None:
        """SIGTERM has come."""
        if self.asked or self.left.is_set():
            return
        self.asked = True
        threading.Thread(target=self.watch, name="deadline", daemon=True).start()
        if self.entered:
            self.start_listening()

    def watch(self) -> None:
        if not self.left.wait(self.leave_s):
            os.write(2, b"preempted: no time left, the save has not ended\n")
            os._exit(TOO_LATE)

    def start_listening(self) -> None:
        self.listener = threading.Thread(target=self.listen, name="peers", daemon=True)
        self.listener.start()

    def listen(self) -> None:
        try:
            dist.all_reduce(torch.zeros(1), group=self.peers)
        except RuntimeError:
            if not self.left.is_set():
                os.write(2, b"asked to leave, and another rank has gone already\n")
                os._exit(1)

    def begin_step(self, *hooked: object) -> None:
        """Let the next ``agreed`` give another answer: an optimizer has stepped."""
        self.is_answered = False
        self.has_stepped = True

    def agreed(self) -> bool:
        """Whether to save and leave now, because a rank had been asked to; the same on all ranks.

        Ask on all ranks in the same steps, as often as you like. A step ends where an optimizer has
        stepped: until then each call gives the answer of the first. True is for good. A signal
        counts from the step behind the one in which it was there when ``agreed`` was called;
        without a process group from the next answer on. Where no optimizer has stepped yet, or
        ever will on this rank, each call gives an answer of its own: ask once a step.

        Raises:
            RuntimeError: the process group was made, and the block was not entered behind that.
        """
        if dist.is_initialized() and not self.entered:
            raise RuntimeError("enter its block when the process group is there")
        if self.answer or self.is_answered:
            return self.answer
        self.answer = self.ask_all_ranks() if self.entered else self.asked
        self.is_answered = self.has_stepped
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
            if self.listener is None:
                self.listen()
            else:
                self.listener.join()
        _SIGTERM.forget(self)
