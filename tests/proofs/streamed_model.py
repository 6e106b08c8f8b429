"""``stream_layers``: gradients of two micro-batches have the bits of a resident copy, each step."""

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes
from overlap_recipes.offload.streaming import stream_layers
from overlap_recipes.offload.weight_streaming import SLOTS
from overlap_recipes.ranks import start_rank

WIDTH, LAYERS, WORDS = 32, 4, 50  # features, layers, tokens
STEPS, MICROBATCHES = 3, 2


class Model(nn.Module):
    """An encoder of torch between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        options = {"batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.embedding(ids), mask=causal, is_causal=True))


def loss_of(model: Model, seed: int, device: torch.device) -> torch.Tensor:
    torch.manual_seed(seed)  # of dropout, too
    ids = torch.randint(WORDS, (3, 8)).to(device)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


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
