"""A rank of several on a node leaves the other ranks' devices alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from selection import with_library

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


@pytest.mark.parametrize("recipe", ["overlapped_stager", "whole_step"])
def test_threads_open_no_context_on_a_device_that_is_not_the_ranks(recipe: str) -> None:
    script = Path(__file__).parents[1] / "data" / "second_device.py"
    command = [sys.executable, str(script), recipe]
    run = subprocess.run(command, capture_output=True, text=True, env=with_library())
    assert run.returncode == 0, run.stderr[-2000:]
