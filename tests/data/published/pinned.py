"""The pinned memory loop, as published; kept to be judged.

From https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html
(PyTorch contributors, BSD-3-Clause). Changed: torchrun starts the ranks instead of mp.spawn, no
port is set, the device is the one there is, what the three share is imported from ``basic``,
and the writer caches only where there is an accelerator to pin for (torch refuses otherwise).
"""

import os

import torch
import torch.distributed.checkpoint as dcp
from basic import CHECKPOINT_DIR, DEVICE, AppState, ToyModel, cleanup, setup
from torch.distributed.checkpoint import FileSystemWriter as StorageWriter
from torch.distributed.fsdp import fully_shard


def run_fsdp_checkpoint_save_example(rank, world_size):
    print(f"Running basic FSDP checkpoint saving example on rank {rank}.")
    setup()

    model = ToyModel().to(DEVICE)
    model = fully_shard(model)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    writer = StorageWriter(cache_staged_state_dict=DEVICE.type != "cpu", path=CHECKPOINT_DIR)
    checkpoint_future = None
    for step in range(10):
        optimizer.zero_grad()
        model(torch.rand(8, 16, device=DEVICE)).sum().backward()
        optimizer.step()

        state_dict = {"app": AppState(model, optimizer)}
        if checkpoint_future is not None:
            # waits for checkpointing to finish, avoiding queuing more then one checkpoint
            # request at a time
            checkpoint_future.result()
        checkpoint_future = dcp.async_save(
            state_dict, storage_writer=writer, checkpoint_id=f"{CHECKPOINT_DIR}_step{step}"
        )

    cleanup()


if __name__ == "__main__":
    world_size = int(os.environ["WORLD_SIZE"])
    print(f"Running async checkpoint example on {world_size} devices.")
    run_fsdp_checkpoint_save_example(int(os.environ["RANK"]), world_size)
