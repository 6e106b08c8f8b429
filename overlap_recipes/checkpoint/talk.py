# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/talk.py
"""How the ranks of a job tell each other, during a save, what they have and what has failed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from ..ranks import LEAST_WAIT, on_all_ranks, wait_of_ranks


class FailedOnRanks(RuntimeError):
    """What has failed on some ranks of a save, as all of them raise it.

    Attributes:
        failures: a line for each rank that has failed, without repetitions.
    """

    def __init__(self, failures: list[str]) -> None:
        super().__init__("; ".join(failures))
        self.failures = failures


@dataclass(frozen=True)
class _Outcome:
    """Of a call on one rank: what was called, what it has returned, or what failed."""

    work: str
    result: object = None
    failures: tuple[str, ...] = ()


class Talk:
    """The talk of one thread of each rank with the same thread of the others.

    Without a process group this rank is alone.

    Attributes:
        rank, ranks: this rank's number, and how many there are.
        deadline: how long ranks wait for each other.
        group: that it goes by; None without a process group.
        lost: what has ended it: a rank has died, came too late, or has called something else.
        is_told: the latest exchange has told all ranks of a failure.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.ranks = 1
        self.deadline = LEAST_WAIT
        self.group: dist.ProcessGroup | None = None
        self.lost: BaseException | None = None
        self.is_told = False
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.ranks = dist.get_world_size()
            self.deadline = wait_of_ranks()
            self.group = dist.new_group(backend="gloo", timeout=self.deadline)

    def together(self, work: Callable, *args: object) -> list:
        """Call ``work`` on all ranks; return all results, or raise on all ranks if one failed.

        ``work`` may call it, too. A rank that fails before such a call tells it here while the
        others listen there: they do not tell it again, or each exchange would answer the one
        before it from then on.
        """
        self.is_told = False
        error = None
        try:
            own = _Outcome(_name_of(work), result=work(*args))
        except BaseException as failure:
            if self.is_told and isinstance(failure, FailedOnRanks):
                raise
            error = failure
            own = _Outcome(_name_of(work), failures=self._told(failure))
        outcomes = [own]
        if self.group is not None:
            outcomes = self._exchanged(own)
        failures: dict[str, None] = {}  # each once, in order
        for outcome in outcomes:
            failures.update(dict.fromkeys(outcome.failures))
        if failures:
            self.is_told = True
            raise FailedOnRanks(list(failures)) from error
        return [outcome.result for outcome in outcomes]

    def _exchanged(self, own: _Outcome) -> list[_Outcome]:
        """The outcomes on all ranks; after an exchange that was none there is no other."""
        if self.lost is not None:
            raise RuntimeError(f"lost each other before: {self.lost}") from self.lost
        try:
            outcomes = on_all_ranks(lambda: own, self.group)
            called = [outcome.work for outcome in outcomes if not outcome.failures]
            if len(set(called)) > 1:
                raise RuntimeError(f"each rank answers to another call: {', '.join(called)}")
        except BaseException as failure:  # an interrupt, too, leaves half an exchange
            self.lost = failure
            raise
        return outcomes

    def _told(self, failure: BaseException) -> tuple[str, ...]:
        if isinstance(failure, FailedOnRanks):  # of a call within this one: it tells of all ranks
            return tuple(failure.failures)
        cause = failure
        if getattr(failure, "failures", None):  # DCP's error has those of all ranks
            cause, _ = next(iter(failure.failures.values()))
        return (f"rank {self.rank}: {type(cause).__name__}: {cause}",)

    def on_first_rank(self, work: Callable, *args: object) -> object:
        """Call ``work`` on rank 0; return on all ranks what it returned, or raise on all."""

        def if_first() -> object:
            return work(*args) if self.rank == 0 else None

        return self.together(if_first)[0]

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def _name_of(work: Callable) -> str:
    called = getattr(work, "func", work)  # of a partial
    return getattr(called, "__qualname__", "")
