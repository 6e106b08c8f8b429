"""A stock Llama whose matrices have moments in 8 bits, and the same training all on one device."""

import torch
from host_training import RATE, falling, groups_of, llama
from torch import nn

from overlap_recipes.offload import eight_bit

SIZES = {"hidden_size": 64, "intermediate_size": 128}  # matrices of 4,096 elements and more


def wide_llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return llama(dtype, **SIZES)


class Resident8bit:
    """Whole parameters, updated one after the other by the library's own numbers."""

    def __init__(self, model: nn.Module, max_norm: float | None) -> None:
        self.model = model
        self.max_norm = max_norm
        self.optimizer = torch.optim.SGD(groups_of(model), lr=RATE)  # has rates for a schedule
        self.schedule = falling(self.optimizer)
        self.state = {p: eight_bit.state_on_device(p) for p in model.parameters()}

    @torch.no_grad()
    def step(self) -> None:
        parameters = []
        for group in self.optimizer.param_groups:
            parameters += group["params"]
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.ones(())
        if self.max_norm is not None:
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        skip = (~norm.isfinite()).float()
        for number, group in enumerate(self.optimizer.param_groups):
            settings = {"betas": (0.9, 0.999), "eps": 1e-8, "lr": group["lr"]}
            settings["weight_decay"] = 0.0 if number == 1 else 1e-2
            for p in group["params"]:
                self.update(settings, p, scale, skip)
                p.grad = None
        self.schedule.step()

    def update(self, settings: dict, parameter: nn.Parameter, scale, skip) -> None:
        state = self.state[parameter]
        state["step"] += 1 - skip
        whole = {name: tensor.view(-1) for name, tensor in state.items() if name != "step"}
        whole["weight"] = parameter.detach().view(-1)
        gradient = parameter.grad.view(-1)
        eight_bit.update(settings, whole, gradient, state["step"], scale, skip)
