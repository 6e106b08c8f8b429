"""torchtitan's own ``async_with_pinned_mem``, in the order of its trainer's loop.

On a CPU, two things stand in for what needs an accelerator, and neither touches the order of the
copy: the stager gets the options that it accepts there, and a thread uploads instead of a process.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import dcp as torchtitan_dcp
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw


class StagerOnCPU(DefaultStager):
    def __init__(self, options: StagingOptions) -> None:
        if torch.accelerator.is_available():
            wanted = StagingOptions()  # torchtitan's own
        else:
            wanted = StagingOptions(False, False, options.use_async_staging, False)
        super().__init__(wanted)


class TrainState:
    def state_dict(self) -> dict:
        return {"step": 0}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


def main(directory: Path) -> None:
    torchtitan_dcp.DefaultStager = StagerOnCPU
    torchtitan_dcp.AsyncCheckpointerType = SimpleNamespace(PROCESS=AsyncCheckpointerType.THREAD)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(32, 32) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    for module in (*layers, model):
        fully_shard(module)
    optimizer = default_adamw(lr=1e-2)
    optimizer.implementation = "for-loop"
    optimizers = optimizer.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(
        optimizers=optimizers, training_steps=9
    )
    manager = torchtitan_dcp.CheckpointManager.Config(
        enable=True,
        folder=str(directory),
        interval=2,
        async_mode="async_with_pinned_mem",
        initial_load_model_only=False,
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": TrainState()},
        sd_adapter=None,
    )
    manager.states = {key: state for key, state in manager.states.items() if state is not None}
    for step in range(1, 5):
        model(torch.ones(4, 32)).square().mean().backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        manager.save(step)
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
