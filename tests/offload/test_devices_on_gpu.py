"""A rank of several on a node leaves the other ranks' devices alone."""

import subprocess
import sys
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

TWO_DEVICES = torch.cuda.is_available() and torch.cuda.device_count() > 1


def save(device: torch.device, folder: str) -> None:
    from overlap_recipes.checkpoint import Saves

    with Saves(device) as saves:
        saves.save({"x": torch.ones(1024, device=device)}, f"{folder}/step1")


def train(device: torch.device, folder: str) -> None:
    from host_training import batch, llama

    from overlap_recipes.offload import HostAdamW
    from overlap_recipes.offload.streamed_model import StreamedModel

    model = llama(torch.bfloat16)
    streamed = StreamedModel(model, model.model.layers, device)
    inputs = {name: tensor.to(device) for name, tensor in batch(0).items()}
    with closing(HostAdamW(model.parameters(), streamed)) as optimizer:
        for _ in range(2):
            model(**inputs).loss.backward()
            optimizer.step()


USES = {"saves": save, "whole_steps": train}


@pytest.mark.skipif(not TWO_DEVICES, reason="needs two CUDA devices")
@pytest.mark.parametrize("use", USES)
def test_threads_open_no_context_on_a_device_that_is_not_the_ranks(use: str, tmp_path) -> None:
    from selection import with_library

    command = [sys.executable, __file__, use, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, env=with_library())
    assert ran.returncode == 0, ran.stderr[-2000:]


if __name__ == "__main__":
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    USES[sys.argv[1]](device, sys.argv[2])
    torch.cuda.synchronize()
    opened = torch._C._cuda_hasPrimaryContext(0)
    dist.destroy_process_group()
    sys.exit("a context on the first device was opened" if opened else 0)
