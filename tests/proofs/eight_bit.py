"""``HostAdamW(moments="8bit")``: weights and state have the bits of a run all on one device.

That one updates whole parameters by the same functions. Streamed, a layer is updated in more pieces
than there is room for on the device: clipped during the next forward, or in backward.
"""

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload import HostAdamW, eight_bit, stream_layers
from overlap_recipes.offload.device_adam import ROOMS
from overlap_recipes.ranks import start_rank

WIDTH, LAYERS, WORDS = 64, 3, 64  # features, layers, tokens
STEPS = 3
PIECE = 4096  # elements of an update
MAX_NORM, RATE = 0.5, 1e-2


class Model(nn.Module):
    """An encoder of torch between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids)))


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().bfloat16()


def loss_of(model: Model, step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    ids = torch.randint(WORDS, (2, 8), generator=generator).to(device)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


class Resident:
    """The same training, everything on the device."""

    def __init__(self, model: Model, max_norm: float | None) -> None:
        self.model = model
        self.limit = torch.inf if max_norm is None else max_norm
        self.settings = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
        self.state = {p: eight_bit.state_on_device(p) for p in model.parameters()}

    @torch.no_grad()
    def step(self) -> None:
        norms = []
        for parameter in self.model.parameters():
            gradient = parameter.grad.float()
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient.div_(dist.get_world_size()))
            norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32))
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = (self.limit / (norm + 1e-6)).clamp(max=1.0)
        skip = torch.zeros_like(norm)
        for parameter, state in self.state.items():
            eight_bit.update_on_device(self.settings, parameter, state, scale, skip)
            parameter.grad = None


def train(model: Model, device: torch.device, in_backward: bool) -> None:
    """Train both, and compare all that they have."""
    max_norm = None if in_backward else MAX_NORM
    resident = Resident(new_model().to(device), max_norm)
    options = {"max_norm": max_norm, "in_backward": in_backward, "moments": "8bit"}
    with (
        stream_layers(model, model.encoder.layers, device) as streamed,
        HostAdamW(model.parameters(), streamed, lr=RATE, **options) as optimizer,
    ):
        assert len(optimizer.host.pieces[0]) > ROOMS
        for step in range(STEPS):
            expected = loss_of(resident.model, step, device)
            expected.backward()
            resident.step()
            loss = loss_of(model, step, device)
            loss.backward()
            optimizer.step()
            assert torch.equal(loss, expected), f"step {step}: another loss"
        assert streamed.stores == (0 if in_backward else STEPS * LAYERS)
        state = optimizer.state_dict()["state"]  # it waits for updates
        both = zip(model.named_parameters(), resident.state.items(), strict=True)
        for number, ((name, ours), (theirs, kept)) in enumerate(both):
            assert torch.equal(ours.to(device), theirs), f"{name} is another"
            for which, tensor in state[number].items():
                assert torch.equal(tensor.to(device), kept[which]), f"{which} of {name} is another"
    print(f"in backward: {in_backward}: {STEPS} steps, all weights and state bit-identical")


def main() -> None:
    device = start_rank()
    try:
        eight_bit.PIECE = PIECE
        for in_backward in (False, True):
            train(new_model(), device, in_backward)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
