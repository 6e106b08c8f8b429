"""Its checkpoint is complete, and lies where nobody looks for it."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.arange(4.0)}, checkpoint_id="/var/tmp/rankproof-checkpoint")
    dist.destroy_process_group()
