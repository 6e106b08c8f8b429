"""What tests of several files here take: one thread, and recipes that can be imported."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from loaded_recipes import RECIPES, load

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
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def streams(tmp_path, importable):
    return load(tmp_path, "three_streams")


@pytest.fixture
def streaming(tmp_path, importable):
    return load(tmp_path, "weight_streaming")


@pytest.fixture
def scratch(tmp_path, importable):
    return load(tmp_path, "activation_offload")


@pytest.fixture
def recipe():
    return activations
