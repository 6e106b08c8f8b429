"""Adam in pieces has the bits of torch's AdamW, in blocks of several pieces on threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from overlap_recipes.offload import adam_in_pieces as pieces

pytestmark = pytest.mark.usefixtures("one_thread")


def test_blocks_of_several_pieces_on_threads_have_the_bits_of_torchs_adamw():
    """With clipping: masters and moments in float32 of weights in bfloat16."""
    size, scale = 2 * pieces.PIECE + 1000, 0.3
    update = pieces.without_lock(pieces.update_pieces)
    weights = [torch.randn(size).bfloat16() for _ in range(2)]
    masters = [nn.Parameter(weight.float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, fused=True, **pieces.SETTINGS)
    blocks = []
    for weight in weights:
        scratch = torch.empty(pieces.PIECE)
        blocks.append([torch.empty_like(weight), weight, weight.float(), *torch.zeros(2, size)])
        blocks[-1].append(scratch)
    numbers = pieces.numbers_of(pieces.SETTINGS, scale)
    with ThreadPoolExecutor(2, "adam", torch.set_num_threads, (1,)) as workers:
        for step in range(1, 4):
            for block, master in zip(blocks, masters, strict=True):
                block[0].normal_()
                master.grad = block[0].float() * scale
            optimizer.step()
            count = torch.tensor(float(step))
            jobs = [workers.submit(pieces.update_block, update, b, count, numbers) for b in blocks]
            for job in jobs:
                job.result()
    for (_, weight, mine, exp_avg, exp_avg_sq, _), master in zip(blocks, masters, strict=True):
        state = optimizer.state[master]
        assert torch.equal(mine, master) and torch.equal(weight, master.bfloat16())
        assert torch.equal(exp_avg, state["exp_avg"])
        assert torch.equal(exp_avg_sq, state["exp_avg_sq"])
