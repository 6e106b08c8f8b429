"""Use a recipe's threads on the second CUDA device; the argument names the recipe.

Ends with exit code 1 if that opened a context on the first device, which nothing here uses.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

RECIPES = Path(__file__).parents[2] / "recipes_source"
sys.path[:0] = [str(RECIPES / "checkpoint"), str(RECIPES / "offload")]


def overlapped_stager(device: torch.device) -> None:
    import overlapped_stager as recipe

    with tempfile.TemporaryDirectory() as root, recipe.OverlappedSaves(device) as saves:
        saves.save({"x": torch.ones(1024, device=device)}, Path(root) / "step1")


def accumulate_and_average(device: torch.device) -> None:
    import accumulate_and_average as recipe

    with closing(recipe.HostSums(recipe.build_layers(), device, backwards=1)) as stack:
        stack.step(recipe.batches_of(0, 0, device)[0], recipe.streaming.loss_of)
        stack.finish()


def pipelined_optimizer(device: torch.device) -> None:
    import pipelined_optimizer as recipe

    layers, settings = recipe.build_layers(), recipe.SETTINGS
    with closing(recipe.PipelinedAdamW(layers, device, adamw=settings)) as stack:
        recipe.prove(stack)


RECIPES_WITH_THREADS: dict[str, Callable[[torch.device], None]] = {
    use.__name__: use for use in (overlapped_stager, accumulate_and_average, pipelined_optimizer)
}

if __name__ == "__main__":
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    RECIPES_WITH_THREADS[sys.argv[1]](device)
    torch.cuda.synchronize()
    opened = torch._C._cuda_hasPrimaryContext(0)
    dist.destroy_process_group()
    sys.exit(f"{sys.argv[1]} opened a context on the first device" if opened else 0)
