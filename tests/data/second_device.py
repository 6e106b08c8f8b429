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

sys.path.insert(0, str(Path(__file__).parents[1] / "proofs"))


def overlapped_stager(device: torch.device) -> None:
    from overlap_recipes.checkpoint import Saves

    with tempfile.TemporaryDirectory() as root, Saves(device) as saves:
        saves.save({"x": torch.ones(1024, device=device)}, Path(root) / "step1")


def whole_step(device: torch.device) -> None:
    import whole_step as recipe

    from overlap_recipes.offload import HostAdamW
    from overlap_recipes.offload.streamed_model import StreamedModel

    model = recipe.Model().bfloat16()
    streamed = StreamedModel(model, model.encoder.layers, device)
    with closing(HostAdamW(model.parameters(), streamed)) as optimizer:
        recipe.train(optimizer, device)


RECIPES_WITH_THREADS: dict[str, Callable[[torch.device], None]] = {
    use.__name__: use for use in (overlapped_stager, whole_step)
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
