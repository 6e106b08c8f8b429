"""Gradients are added up as backward makes them, and every one is waited for before the step."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    works = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
        )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
