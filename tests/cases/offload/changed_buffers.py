"""pytorch#96136, torchtitan#1593, Automodel#3247: layers whose forward changes a buffer.

A layer that backward runs again must change it once. The argument names the layer: ``batch_norm``,
``spectral_norm``, ``counts`` (a router that counts tokens) or ``steers`` (one that steers by them).
"""

import sys

import resident
import torch
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel

WIDTH = 16
LAYERS = 3
EXPERTS = 4
STEPS = 4
BATCH = 16
SPEED = 0.05


class Router(nn.Module):
    """As in DeepSeek's and torchtitan's load balancing: it counts the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("tokens", torch.zeros(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).argmax(-1, keepdim=True)
        if self.training:
            with torch.no_grad():
                self.tokens += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        for number, expert in enumerate(self.experts):
            part = expert(x) * scores[..., number : number + 1]
            x = x + torch.where(chosen == number, part, 0)
        return x


class SteeringRouter(Router):
    """Moves its bias in forward, so that the next batch goes to other experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            with torch.no_grad():
                self.bias += SPEED * (self.tokens.mean() - self.tokens).sign()
        return y


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for layer in self.layers:
            x = layer(x)
        return x


def make_layer(name: str) -> nn.Module:
    if name == "batch_norm":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    if name == "spectral_norm":
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    if name == "counts":
        return Router()
    return SteeringRouter()


def assert_same_buffers(model: nn.Module, twin: nn.Module) -> None:
    pairs = zip(model.named_buffers(), twin.buffers(), strict=True)
    for (name, buffer), wanted in pairs:
        if name.endswith("tokens"):
            found = int(buffer.sum())
            due = int(wanted.sum())
            assert found == due, f"buffer {name} counts {found} tokens, resident {due}"
        resident.assert_close(f"buffer {name}", buffer, wanted)


def main(name: str) -> None:
    torch.manual_seed(0)
    model = Model([make_layer(name) for _ in range(LAYERS)])
    twin = resident.twin_of(model)
    streamed = StreamedModel(model, model.layers, resident.HOST)
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(BATCH, WIDTH)
        for each in (model, twin):
            each.zero_grad()
            each(x).square().mean().backward()
        if name == "steers":  # its gradients show it, too
            resident.assert_same_gradients(model, twin)
    assert_same_buffers(model, twin)
    resident.assert_same_gradients(model, twin)
    x = torch.randn(BATCH, WIDTH)
    resident.assert_close("an output in evaluation", model.eval()(x), twin.eval()(x))
    streamed.close()


if __name__ == "__main__":
    main(sys.argv[1])
