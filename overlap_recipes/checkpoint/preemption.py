# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/preemption.py
"""Leave before the deadline of a preemption: all ranks save the same step, and end."""

import os
import signal
import threading

import torch
import torch.distributed as dist

AGAIN = 85  # exit code: saved, start me again
TOO_LATE = 86  # the deadline came before the save had ended; older checkpoints are whole


class Preemption:
    """Watch for SIGTERM and agree on the last step; a context manager around the loop.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL.
        margin_s: how many seconds before SIGKILL this process gives up.

    Construct it on the main thread of every rank, as early as you can. Enter it when the process
    group exists.
    """

    def __init__(self, grace_s: float, margin_s: float = 2.0) -> None:
        self.leave_s = grace_s - margin_s
        self.asked = self.entered = False
        self.left = threading.Event()
        self.listener: threading.Thread | None = None
        self.vote: tuple[torch.Tensor, dist.Work] | None = None
        self.before = signal.signal(signal.SIGTERM, self.on_signal)

    def __enter__(self) -> "Preemption":
        if dist.is_initialized():
            self.votes, self.peers = (dist.new_group(backend="gloo") for _ in range(2))
            self.entered = True
            if self.asked:  # while the job was starting
                self.start_listening()
        return self

    def on_signal(self, number: int, frame: object) -> None:
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

    def agreed(self) -> bool:
        """Whether any rank had been asked to leave at the previous call; the same on all ranks."""
        if not self.entered:
            if dist.is_initialized():
                raise RuntimeError("enter its block when the process group is there")
            return self.asked  # one process
        stop = False
        if self.vote is not None:
            asked, work = self.vote
            work.wait()
            stop = bool(asked)
        asked = torch.tensor(int(self.asked))
        self.vote = asked, dist.all_reduce(asked, dist.ReduceOp.MAX, self.votes, async_op=True)
        return stop

    def __exit__(self, kind, error, trace) -> None:
        self.left.set()
        if kind is None and self.entered:
            if self.vote is not None:
                self.vote[1].wait()
            if self.listener is None:
                self.listen()
            else:
                self.listener.join()
        # Asked once more, a process that is on its way out still gives its own exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.asked else self.before)
