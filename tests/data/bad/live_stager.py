"""A stager hands out the live tensors."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager


class LiveStager(AsyncStager):
    _synchronize_after_execute = False

    def stage(self, state_dict):
        state_dict["x"] += 1
        return state_dict

    def close(self):
        pass


if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    state = {"x": torch.zeros(4)}
    dcp.async_save(
        state, checkpoint_id="step1", async_stager=LiveStager(), process_group=group
    ).result()
    dist.destroy_process_group()
