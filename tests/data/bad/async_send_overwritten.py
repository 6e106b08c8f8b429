"""A buffer is filled anew while it is still being sent."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    buffer = torch.ones(4)
    if dist.get_rank() == 0:
        sending = dist.isend(buffer, dst=1)
        buffer.fill_(2)
        sending.wait()
    else:
        dist.recv(buffer, src=0)
    dist.destroy_process_group()
