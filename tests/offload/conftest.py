"""What tests of several files here take: one thread, and recipes that can be imported."""

import gc
import importlib
import sys
from collections.abc import Iterator

import pytest
import torch
from selection import RECIPES

from overlap_recipes.offload import activations


@pytest.fixture(scope="module", autouse=True)
def imported_objects_are_no_garbage() -> None:
    """Each HostAdamW has Python look for garbage, which takes long among what is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES / "offload"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def streams(importable):
    return importlib.import_module("three_streams")


@pytest.fixture
def streaming(importable):
    return importlib.import_module("weight_streaming")


@pytest.fixture
def scratch(importable):
    return importlib.import_module("activation_offload")


@pytest.fixture
def recipe():
    return activations
