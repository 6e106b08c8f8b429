"""Of two gradients in flight, only the last one is waited for."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    torch.nn.Sequential(*layers)(torch.ones(2, 4)).sum().backward()
    for layer in layers:
        work = dist.all_reduce(layer.weight.grad, async_op=True)
    work.wait()
    torch.optim.SGD(layers[0].parameters(), lr=0.1).step()
    dist.barrier()
    dist.destroy_process_group()
