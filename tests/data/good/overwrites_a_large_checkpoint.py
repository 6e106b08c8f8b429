"""Two saves into one directory; the first left more there than the harness copies."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step in range(2):
        dcp.save({"step": torch.tensor(step)}, checkpoint_id="last")
        if dist.get_rank() == 0:
            with open(Path("last", "index.bin"), "wb") as file:
                file.truncate(300 * 2**20)  # holds no blocks on disk
        dist.barrier()
    dist.destroy_process_group()
