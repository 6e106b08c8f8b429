"""Gradients are summed over ranks while others are computed. ``--cured`` waits for each sum."""

import sys

import torch
import torch.distributed as dist
from torch import nn

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
CURED = "--cured" in sys.argv


def main() -> None:
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    works = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
        )
    model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
    for work in works if CURED else works[:-1]:  # the last one begun is the first layer's bias
        work.wait()
    for parameter in model.parameters():
        parameter.grad.div_(dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
