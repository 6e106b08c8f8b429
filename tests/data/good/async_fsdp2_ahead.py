"""FSDP2 gathers the layers ahead, on request; a hook of DDP issues a collective."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def half_as_large(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].div_(2))


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    sharded, replicated = layers(), layers()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    replicated = DistributedDataParallel(replicated, gradient_as_bucket_view=True)
    replicated.register_comm_hook(None, half_as_large)
    for model in (sharded, replicated):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            if model is sharded:
                handles = [layer.unshard(async_op=True) for layer in model]
                handles[0].wait()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
