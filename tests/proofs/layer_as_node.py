"""``as_node``: layers that run again in backward have the gradients of ordinary ones, bit by bit.

With keyword arguments, dropout, a buffer that each forward changes and a result that is no tensor
alone. Every layer must have run twice, the second time last first, and given the same.
"""

from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from host_layers import BATCH, TOKENS, WIDTH, Block, loss_of
from torch import nn
from torch.func import functional_call

from overlap_recipes.offload.layer_as_node import Plain, as_node
from overlap_recipes.ranks import start_rank

LAYERS = 3


class Noted(nn.Module):
    """Takes keyword arguments, drops features, counts its calls, returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.dropout = Block(), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: dict) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        y = self.dropout(self.block(x * self.calls)) * scale["by"]
        return y, y.argmax(-1)


class Owner:
    """Weights that wait elsewhere: here in a list."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.plain, self.runs, self.gradients = [Plain(layer) for layer in layers], [], {}
        self.alike = set()
        self.views = [dict(plain.named_parameters()) for plain in self.plain]
        for index, layer in enumerate(layers):
            layer.forward = partial(self.call, index)

    def call(self, index: int, *args, **kwargs):
        return as_node(self, index, args, kwargs)

    def trained(self, index: int) -> list[nn.Parameter]:
        return list(self.views[index].values())

    def sources(self, index: int) -> list[torch.Tensor]:
        return list(self.views[index].values())

    def sample(self, index: int) -> torch.Tensor:
        return torch.cat([weight.detach().flatten()[:4] for weight in self.sources(index)])

    def is_differentiated(self, index: int) -> bool:
        return True

    def title(self, index: int) -> str:
        return f"layer {index}"

    def run(self, index: int, args: tuple, kwargs: dict):
        self.runs.append(index)
        return functional_call(self.plain[index], self.views[index], args, kwargs)

    def backward(self, index: int, begins: list, pairs: list, trains: bool) -> list:
        ends, grads = zip(*pairs, strict=True)
        weights = list(self.views[index].values()) if trains else []
        found = torch.autograd.grad(ends, weights + begins, grads)
        self.gradients[index] = found[: len(weights)]
        return list(found[len(weights) :])


def output_of(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # of dropout
    for layer in layers:
        x, _ = layer(x, scale={"by": torch.full((), 0.5, device=x.device)})
    return x


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        layers = nn.ModuleList(Noted() for _ in range(LAYERS)).to(device)
        x = torch.randn(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
        ordinary = deepcopy(layers)
        loss_of(output_of(ordinary, x)).backward()
        expected = [p.grad for p in ordinary.parameters()] + [x.grad]
        x.grad = None
        owner = Owner(layers)
        loss_of(output_of(layers, x)).backward()
        found = [gradient for index in range(LAYERS) for gradient in owner.gradients[index]]
        assert all(map(torch.equal, [*found, x.grad], expected))
        forward = list(range(LAYERS))
        assert owner.runs == forward + forward[::-1]
        assert all(map(torch.equal, layers.buffers(), ordinary.buffers()))
        print(f"layers ran in the order {owner.runs}: the same gradients, bit by bit")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
