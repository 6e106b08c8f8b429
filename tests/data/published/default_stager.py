"""The DefaultStager loop, as published; kept to be judged.

From https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html
(PyTorch contributors, BSD-3-Clause). Changed: torchrun starts the ranks instead of mp.spawn, no
port is set, the device is the one there is, what the three share is imported from ``basic``,
and without an accelerator the stager leaves out the options that need one.
"""

import os

import torch
import torch.distributed.checkpoint as dcp
from basic import CHECKPOINT_DIR, DEVICE, AppState, ToyModel, cleanup, setup
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard

CPU_OPTIONS = StagingOptions(False, False, True, False)


def run_fsdp_checkpoint_save_example(rank, world_size):
    print(f"Running basic FSDP checkpoint saving example on rank {rank}.")
    setup()

    model = ToyModel().to(DEVICE)
    model = fully_shard(model)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    checkpoint_future = None
    for step in range(10):
        print(f"Step {step} starting...")
        optimizer.zero_grad()
        model(torch.rand(8, 16, device=DEVICE)).sum().backward()

        # Critical: We must ensure the previous checkpoint's D2H copy (staging)
        # is complete before the optimizer modifies the model parameters.
        if checkpoint_future is not None:
            checkpoint_future.staging_completion.result()

        optimizer.step()

        # waits for checkpointing to finish if one exists, avoiding queuing more then one
        # checkpoint request at a time
        if checkpoint_future is not None:
            checkpoint_future.upload_completion.result()

        state_dict = {"app": AppState(model, optimizer)}
        checkpoint_future = dcp.async_save(
            state_dict,
            checkpoint_id=f"{CHECKPOINT_DIR}_step{step}",
            async_stager=DefaultStager(*() if DEVICE.type != "cpu" else (CPU_OPTIONS,)),
        )

    # Ensure the last checkpoint completes
    if checkpoint_future:
        checkpoint_future.upload_completion.result()

    cleanup()


if __name__ == "__main__":
    world_size = int(os.environ["WORLD_SIZE"])
    print(f"Running async checkpoint example on {world_size} devices.")
    run_fsdp_checkpoint_save_example(int(os.environ["RANK"]), world_size)
