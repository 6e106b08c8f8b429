"""Sets the rendezvous of its one rank itself, whatever a launcher has set."""

import os

import torch.distributed as dist

if __name__ == "__main__":
    os.environ["MASTER_PORT"] = "0"
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=1)
    dist.destroy_process_group()
