# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/random_numbers.py
"""A rank's random numbers: of Python, NumPy, torch, and the accelerator."""

import importlib
import logging
import random
import sys
import weakref
from collections.abc import Callable
from types import ModuleType

import torch

from ...ranks import own_rank, world_size

LOG = logging.getLogger(__name__)
_SEEDS_A_STEP = 1_000_003


class RandomNumbers:
    """The state of this rank's random numbers; on another number of ranks, all are seeded again.

    Args:
        job: has ``step``. It has this object, and loaders that are to end with it.
    """

    NAME = "random"

    def __init__(self, job: object) -> None:
        self._job = weakref.proxy(job)

    def state_dict(self) -> dict:
        state = numbers_of_host()
        accelerator = _accelerator()
        if accelerator is not None:
            state["device"] = accelerator.get_rng_state()
        return state

    def load_state_dict(self, state: dict) -> None:
        set_numbers_of_host(state)
        accelerator = _accelerator()
        if accelerator is not None and "device" in state:
            accelerator.set_rng_state(state["device"])

    def load_state_dicts(self, states: list[dict]) -> None:
        seed = _SEEDS_A_STEP * self._job.step + own_rank()
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        LOG.warning(
            "random numbers are seeded again: %d ranks, %d at the save", world_size(), len(states)
        )


def _accelerator() -> ModuleType | None:
    """What has the random numbers of this rank's accelerator, if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)


def numbers_of_host() -> dict:
    """The random numbers of Python, NumPy (if it was imported) and torch on the host."""
    numpy = sys.modules.get("numpy")
    state = {"python": random.getstate(), "host": torch.get_rng_state()}
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_numbers_of_host(state: dict) -> None:
    """Take what ``numbers_of_host`` gave; checkpoints of earlier versions have fewer."""
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        importlib.import_module("numpy.random").set_state(state["numpy"])
    if "host" in state:
        torch.set_rng_state(state["host"])


def drawn_between(before: dict, after: dict) -> set[str]:
    """From which of them random numbers were drawn between two of ``numbers_of_host``."""
    found = set()
    if after["python"] != before["python"]:
        found.add("python")
    if "numpy" in before and _value_of_numpy(after) != _value_of_numpy(before):
        found.add("numpy")
    if not torch.equal(after["host"], before["host"]):
        found.add("host")
    return found


def has_drawn_more_than_a_seed(before: dict) -> bool:
    """Whether random numbers were drawn since ``before``, but for what a loader draws itself."""
    after = numbers_of_host()
    drawn = drawn_between(before, after)
    if drawn != {"host"}:
        return bool(drawn)
    torch.set_rng_state(before["host"])
    torch.empty((), dtype=torch.int64).random_()  # as ``DataLoader`` draws the seed of workers
    of_seed = torch.get_rng_state()
    torch.set_rng_state(after["host"])
    return not torch.equal(after["host"], of_seed)


def _value_of_numpy(numbers: dict) -> tuple:
    kind, keys, *position = numbers["numpy"]
    return kind, keys.tobytes(), *position


# -- generators of a job's own ----------------------------------------------------------------


class OwnGenerator:
    """A source of random numbers of the job's own."""

    def __init__(self, read: Callable[[], object], write: Callable[[object], None]) -> None:
        self._read = read
        self._write = write

    def state_dict(self) -> dict:
        return {"numbers": self._read()}

    def load_state_dict(self, state: dict) -> None:
        self._write(state["numbers"])


def as_generator(item: object) -> OwnGenerator | None:
    """The state of ``item``, if it is a generator of torch, Python or NumPy."""
    if isinstance(item, torch.Generator):
        return OwnGenerator(item.get_state, item.set_state)
    if isinstance(item, random.Random):
        return OwnGenerator(item.getstate, item.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(item, numpy.random.RandomState):
        return OwnGenerator(item.get_state, item.set_state)
    if isinstance(item, numpy.random.Generator):
        bits = item.bit_generator
        return OwnGenerator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None
