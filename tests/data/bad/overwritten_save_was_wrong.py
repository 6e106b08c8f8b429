"""Keeps the last checkpoint alone; the first of two was a later step's."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager


class LiveStager(AsyncStager):
    _synchronize_after_execute = False

    def stage(self, state_dict):
        state_dict["weight"] += 1
        return state_dict

    def close(self):
        pass


if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    state = {"weight": torch.zeros(4)}
    dcp.async_save(
        state, checkpoint_id="last", process_group=group, async_stager=LiveStager()
    ).result()
    dcp.save(state, checkpoint_id="last")
    dist.destroy_process_group()
