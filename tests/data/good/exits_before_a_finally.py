"""sys.exit(0), and only a finally comes after it."""

import sys

import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        dist.barrier()
        sys.exit(0)
    finally:
        dist.destroy_process_group()
