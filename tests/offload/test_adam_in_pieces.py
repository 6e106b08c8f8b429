"""Adam in pieces: bits, blocks that it refuses, and what Adam loses whose state is not in fp32."""

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


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ([torch.ones(50), *(torch.ones(100) for _ in range(4))], "flat tensors of one length"),
        ([torch.ones(100), *(torch.ones(50) for _ in range(4))], "flat tensors of one length"),
        ([torch.ones(10, 10) for _ in range(5)], "flat tensors without gaps"),
        (
            [*torch.ones(2, 100).bfloat16(), *torch.ones(2, 100), torch.ones(200)[::2]],
            "without gaps",
        ),
        ([torch.ones(100).bfloat16() for _ in range(5)], "moments and scratch are in fp32"),
        ([torch.ones(100) for _ in range(5)], "its own master"),
    ],
)
def test_a_block_that_would_be_updated_in_part_or_beyond_its_end_is_refused(block, says):
    numbers = pieces.numbers_of(pieces.SETTINGS, 1.0)
    with pytest.raises(ValueError, match=says):
        pieces.update_block(
            pieces.update_pieces, [*block, torch.empty(200)], torch.tensor(1.0), numbers
        )
