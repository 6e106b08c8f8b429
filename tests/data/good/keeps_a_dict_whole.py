"""Saves a nested dict as one object."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    state = {"model": {"x": torch.ones(4)}, "step": 3}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id="step1", planner=planner)
    dist.destroy_process_group()
