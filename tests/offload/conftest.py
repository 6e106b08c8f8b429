"""What tests of several files here take: one thread, and recipes that can be imported."""

import sys
from collections.abc import Iterator

import pytest
import torch
from loaded_recipes import RECIPES, load


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
def recipe(tmp_path, importable):
    return load(tmp_path, "activation_offload")
