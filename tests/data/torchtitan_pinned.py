"""torchtitan's own ``async_with_pinned_mem``, in the order of its trainer's loop.

On a CPU, two things stand in for what needs an accelerator, and neither touches the order of the
copy: the stager gets the options that it accepts there, and a thread uploads instead of a process.
``--ordered`` makes the staging thread wait for the step, which torchtitan does not.
"""

import argparse
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
    """The first value of the state: with ``event``, copying it orders the copies behind it."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered

    def state_dict(self) -> dict:
        event = torch.get_device_module("cpu").Event()
        event.record()
        return {"step": After(event) if self.ordered else 0}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


class After:
    def __init__(self, event) -> None:
        self.event = event

    def __deepcopy__(self, memo: dict) -> int:
        torch.get_device_module("cpu").current_stream().wait_event(self.event)
        return 0


def main(directory: Path, ordered: bool) -> None:
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
        states={"train_state": TrainState(ordered)},
        sd_adapter=None,
    )
    manager.states = {"train_state": manager.states.pop("train_state")} | {
        key: state for key, state in manager.states.items() if state is not None
    }
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--ordered", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(options.dir or Path(temporary), options.ordered)
