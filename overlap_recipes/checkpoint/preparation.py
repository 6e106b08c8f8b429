# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/preparation.py
"""What is made ready during a run's first steps, so that its first save need not wait for it."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from .state import read

LOG = logging.getLogger(__name__)


class Preparation:
    """The preparation of a run's first save.

    It begins before an optimizer's second step, when all have stepped: the state is asked for then,
    and one that has no state yet would have to be made to step.

    Args:
        state: what will be saved.

    Attributes:
        done: running when it has begun; it raises what has failed.
        leaves, tensors: the state that was asked for, and the tensors in it.
        error: why there is none.
    """

    def __init__(self, state: dict) -> None:
        self.state = state
        self.done: Future = Future()
        self.leaves: object = None
        self.tensors: list[torch.Tensor] = []
        self.error: BaseException | None = None
        self.stepped: set[int] = set()  # ids of optimizers

    def has_begun(self) -> bool:
        return self.done.running() or self.done.done()

    def is_due(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is time, now that ``optimizer`` is about to step."""
        own: set[int] = set()
        for part in self.state.values():
            own.update(id(each) for each in getattr(part, "optimizers", ()))
        if own and id(optimizer) not in own:
            return False  # it may step on this rank alone
        return id(optimizer) in self.stepped and own <= self.stepped

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped.add(id(optimizer))

    @torch.inference_mode(False)
    def ask(self) -> None:
        """Begin: ask for the state. If that fails, the save will fail of it, on all ranks."""
        self.done.set_running_or_notify_cancel()
        try:
            self.leaves = read(self.state, self.tensors)
        except BaseException as failure:
            self.error = failure
            if not isinstance(failure, Exception):
                raise

    def end(self, failure: BaseException | None) -> None:
        if failure is None:
            self.done.set_result(None)
        else:
            LOG.error("not prepared, the next save will try again: %s", failure)
            self.done.set_exception(failure)

    def wait(self) -> None:
        """Return when it has ended; drop it if it has not begun."""
        if self.done.running():
            began = time.monotonic()
            wait([self.done])
            LOG.warning("a save waited %.1f s for its preparation", time.monotonic() - began)
        self.done.cancel()


class AskedLater:
    """State for ``prepare`` that is asked for by a function, when it is time.

    For trainers: they give saves new dicts, and make their optimizers late.

    Args:
        ask: returns what ``save`` will be given here.
        optimizers: returns those that must have stepped.
    """

    def __init__(
        self, ask: Callable[[], dict], optimizers: Callable[[], list[torch.optim.Optimizer]]
    ) -> None:
        self.state_dict = ask
        self.ask_for_optimizers = optimizers

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.ask_for_optimizers()
