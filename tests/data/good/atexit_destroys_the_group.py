"""A callback of atexit destroys the process group."""

import atexit

import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    dist.barrier()
