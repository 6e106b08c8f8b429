"""What was in a TemporaryDirectory is gone behind it."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"x": torch.ones(2)}, checkpoint_id=Path(folder, "step1"), no_dist=True)
    assert not Path(folder).exists()
    dist.destroy_process_group()
