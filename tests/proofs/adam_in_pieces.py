"""``update_block``: masters and weights have the bits of ``torch.optim.AdamW``, on threads.

``train_resident`` is ordinary training, which other proofs are compared with.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from _training import schedule_of
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from overlap_recipes.offload.adam_in_pieces import (
    PIECE,
    SETTINGS,
    groups_of,
    numbers_of,
    update_block,
    update_pieces,
    without_lock,
)
from overlap_recipes.ranks import start_rank

THREADS, STEPS, PARAMETERS = 2, 3, 2 * PIECE + 1000


def train_resident(model: nn.Module, losses: Iterable, max_norm: float) -> None:
    """Training on the device: fp32 masters, means over ranks, clipping, a schedule."""
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    groups = groups_of(masters.values())
    optimizer = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    schedule, in_order = schedule_of(optimizer), [p for group in groups for p in group["params"]]
    for loss in losses:  # each is computed when the step before is done
        loss.backward()
        for parameter, master in masters.items():
            master.grad = parameter.grad.float()
            dist.all_reduce(master.grad)
            master.grad = (master.grad / dist.get_world_size()).to(parameter.dtype).float()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in in_order]))
        if norm.isfinite():
            clip_grads_with_norm_(in_order, max_norm, norm)
            optimizer.step()
        schedule.step()
        model.zero_grad()
        for parameter, master in masters.items():
            parameter.data.copy_(master)


def main() -> None:
    start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        update, scale = without_lock(update_pieces), 0.3
        weights = [torch.randn(PARAMETERS).bfloat16() for _ in range(THREADS)]
        masters = [nn.Parameter(weight.float()) for weight in weights]
        optimizer = torch.optim.AdamW(masters, fused=True, **SETTINGS)
        blocks = [
            [torch.empty_like(w), w, w.float(), *torch.zeros(2, PARAMETERS), torch.empty(PIECE)]
            for w in weights
        ]
        with ThreadPoolExecutor(THREADS, "adam", torch.set_num_threads, (1,)) as workers:
            for step in range(STEPS):
                for block, master in zip(blocks, masters, strict=True):
                    block[0].normal_()
                    master.grad = block[0].float() * scale
                optimizer.step()
                count, numbers = torch.tensor(step + 1.0), numbers_of(SETTINGS, scale)
                jobs = [workers.submit(update_block, update, b, count, numbers) for b in blocks]
                [job.result() for job in jobs]
        for (_, weight, mine, exp_avg, exp_avg_sq, _), master in zip(blocks, masters, strict=True):
            state = optimizer.state[master]
            assert torch.equal(mine, master) and torch.equal(weight, master.bfloat16())
            assert torch.equal(exp_avg, state["exp_avg"])
            assert torch.equal(exp_avg_sq, state["exp_avg_sq"])
        print(f"{STEPS} steps in pieces: the bits of torch.optim.AdamW")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
