"""A checkpoint that holds an object of a class of the script's."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


@dataclass
class Progress:
    step: int


if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.ones(4), "progress": Progress(3)}, checkpoint_id="step1")
    dist.destroy_process_group()
