"""torchebm#244: WGAN-GP under FSDP2, a loss on gradients (``create_graph=True``), in place.

A unit that keeps no full weights after backward is refused. Done as the refusal says, gradients of
all parameters are those of the unsharded model, and the next step computes with the new weights.
The argument: ``score``, ``same`` (and a loss of the same forward), ``another`` (of another one).
"""

import sys

import torch
import unsharded
from torch import nn
from torch.distributed.fsdp import FSDPModule

from overlap_recipes.fsdp2 import use_peer_copies

STEPS = 2


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(unsharded.WIDTH, unsharded.WIDTH), nn.Tanh())]
    return nn.Sequential(*blocks, *[nn.Linear(unsharded.WIDTH, unsharded.WIDTH) for _ in range(2)])


def loss_of(model: nn.Module) -> torch.Tensor:
    x = unsharded.batch_of(0).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    loss = slope.square().mean()
    if "same" in sys.argv:
        loss = loss + out.mean()
    if "another" in sys.argv:
        loss = loss + model(torch.zeros_like(x)).mean()
    return loss


def main() -> None:
    with unsharded.job():
        whole = build()
        model = build()
        unsharded.in_units(model, [*model])
        use_peer_copies(model, slots=8)
        told = ""
        try:
            loss_of(model)
        except RuntimeError as error:
            told = str(error)
        for words in ("set_reshard_after_backward(False)", "reshard()"):
            assert words in told, told
        model = build()
        unsharded.in_units(model, [*model])
        use_peer_copies(model, slots=8)
        model.set_reshard_after_backward(False)
        trained = {whole: torch.optim.SGD(whole.parameters(), lr=0.1)}
        trained[model] = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            for each, optimizer in trained.items():
                optimizer.zero_grad()
                loss_of(each).backward()
            for each in model.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()
            for found, due in zip(model.parameters(), whole.parameters(), strict=True):
                assert found.grad is not None, "no gradient"
                torch.testing.assert_close(found.grad.full_tensor(), due.grad)
            for optimizer in trained.values():
                optimizer.step()


if __name__ == "__main__":
    main()
