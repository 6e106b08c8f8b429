"""What scripts of troubles share: the troubles that the arguments name, in turn, on every rank."""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes_source" / "checkpoint"))

import _toys as basic  # noqa: E402
import torch.distributed as dist  # noqa: E402


def face(troubles: Mapping[str, Callable]) -> None:
    """Call those of ``troubles``, functions of a directory of all ranks and the rank's device."""
    device = basic.start_rank()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            root = basic.directory_of_rank_0(Path(temporary))
            for name in sys.argv[1:]:
                print(name, flush=True)
                place = root / name
                place.mkdir(exist_ok=True)
                troubles[name](place, device)
                dist.barrier()
    finally:
        dist.destroy_process_group()
