"""The mean of a loss is read before the collective that adds it up was waited for."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    loss = torch.ones(4) * dist.get_rank()
    work = dist.all_reduce(loss, async_op=True)
    print(loss.div(dist.get_world_size()))
    work.wait()
    dist.destroy_process_group()
