"""Blocks that Adam in pieces refuses, and what Adam loses whose state is not in fp32."""

import pytest
import torch
from torch import nn

from overlap_recipes.offload import adam_in_pieces as pieces

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_without_fp32_state_forgets_small_changes(dtype):
    """What pages say of rows with bf16 moments; rates and betas as in the benchmark."""
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0, fused=True)
    for step in range(2000):
        weight.grad = torch.full_like(weight, 1.0 if step < 100 else 0.1)
        optimizer.step()
        if step == 99:
            large = optimizer.state[weight]["exp_avg_sq"][0].item()
    small = optimizer.state[weight]["exp_avg_sq"][0].item()
    assert small < large / 4 if dtype == torch.float32 else small == large
    assert (weight < 0.92).all() if dtype == torch.float32 else (weight == 1).all()


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
