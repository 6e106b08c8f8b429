"""The pinned memory loop, as published; kept to be judged.

From https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html
(PyTorch contributors, BSD-3-Clause). Changed: torchrun starts the ranks instead of mp.spawn, no
port is set, the device is the one there is,
and the writer caches only where there is an accelerator to pin for (torch refuses otherwise).
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemWriter as StorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

CHECKPOINT_DIR = "checkpoint"
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class AppState(Stateful):
    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup():
    dist.init_process_group("gloo")
    if DEVICE.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))


def cleanup():
    dist.destroy_process_group()


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
