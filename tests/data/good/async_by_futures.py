"""A mean by a future's callback, a ring of isend and irecv, and a broadcast that the root reads."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = torch.ones(4) * rank
    future = dist.all_reduce(loss, async_op=True).get_future()
    mean = future.then(lambda done: done.value()[0].div_(ranks))
    sent, received = torch.ones(4), torch.empty(4)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    settings = torch.ones(4)
    work = dist.broadcast(settings, src=0, async_op=True)
    if rank == 0:
        print(settings.sum().item())
    work.wait()
    print(mean.wait(), received, settings, loss)
    dist.destroy_process_group()
