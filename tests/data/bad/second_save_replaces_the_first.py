"""The model and the optimizer's state go into one directory, by two saves: the model is gone."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"model": torch.ones(4)}, checkpoint_id="step1")
    dcp.save({"optimizer": torch.zeros(4)}, checkpoint_id="step1")
    dist.destroy_process_group()
