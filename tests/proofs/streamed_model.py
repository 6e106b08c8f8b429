"""``stream_layers``: gradients of two microbatches have the bits of a resident copy, each step.

The model is one of torch's own, between an embedding and a head that share their weight. Its layers
have dropout and take a mask. One of them stays on the device, by a budget.
"""

import torch
import torch.distributed as dist
from _training import LAYERS, Model, loss_of
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes
from overlap_recipes.offload.streaming import stream_layers
from overlap_recipes.offload.weight_streaming import SLOTS
from overlap_recipes.ranks import start_rank

STEPS, MICROBATCHES = 3, 2


def train(streamed: StreamedModel, resident: Model) -> None:
    model, device = streamed.model, streamed.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        resident.load_state_dict(model.state_dict())  # the same keys
        for seed in range(MICROBATCHES * step, MICROBATCHES * (step + 1)):
            expected, loss = loss_of(resident, seed, device), loss_of(model, seed, device)
            assert torch.equal(loss, expected)
            expected.backward()
            loss.backward()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad.to(device), theirs.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        resident.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, all gradients bit-identical")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model, resident = Model(), Model().to(device)
        layers, budget = model.encoder.layers, resident_bytes(model.encoder.layers[0])
        with stream_layers(model, layers, device, budget=budget) as streamed:
            train(streamed, resident)
            assert streamed.loads == STEPS * MICROBATCHES * (2 * (LAYERS - 1) - SLOTS)
        print(f"{streamed.loads} loads, {streamed.stores} stores")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
