"""What scripts of troubles share: the trouble that the argument names, on every rank."""

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes_source" / "checkpoint"))

import _toys as basic  # noqa: E402
import torch.distributed as dist  # noqa: E402


def face(troubles: Iterable[Callable]) -> None:
    """Call that of ``troubles``, functions of a directory of all ranks and the rank's device."""
    device = basic.start_rank()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            root = basic.directory_of_rank_0(Path(temporary))
            {trouble.__name__: trouble for trouble in troubles}[sys.argv[1]](root, device)
            dist.barrier()
    finally:
        dist.destroy_process_group()
