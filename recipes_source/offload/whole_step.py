"""
A whole step: clipped, scheduled, averaged, and nothing waits
=============================================================

HEAD
"""

# %%
# Imports and sizes
# -----------------
# ``host_adam.py`` updates the layers; this page decides when, and by how much.

from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy

import host_adam as adam
import torch
import torch.distributed as dist
from host_adam import streaming
from torch import nn

DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
STEPS, BAD_STEP, MAX_NORM = 5, 2, 0.5
ON_DEVICE = 1e-2  # how far weights may differ where the device's Adam rounds in another way


def state_on_device(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Of a parameter that stays on the device: step, fp32 master and moments."""
    master = parameter.detach()
    master = master if master.dtype == torch.float32 else master.float()
    moments = {name: torch.zeros_like(master) for name in adam.MOMENTS}
    return {"step": torch.zeros((), device=master.device), "master": master, **moments}


def update_on_device(settings: dict, parameter: nn.Parameter, state: dict, scale, skip) -> None:
    """The same step there; ``scale`` and ``skip`` are on the device as well, nothing waits."""
    gradient = parameter.grad.float().mul_(scale)
    adam.adam_step(settings, state["master"], gradient, state, state["step"], skip)
    if parameter.dtype != torch.float32:
        parameter.copy_(state["master"])


class HostAdamW(torch.optim.Optimizer):
    """AdamW in fp32 for a streamed model: its layers on threads of the host, the rest on the device.

    Args:
        params: all trained parameters or groups of them, as for ``torch.optim.AdamW``.
        streamed: the model.
        max_norm: limit of the norm of all gradients, or None.
        in_backward: update each layer as its gradients arrive; no ``max_norm`` then.
        threads: of the host, for updates.
        settings: ``lr``, ``betas``, ``eps`` and ``weight_decay``, as for ``torch.optim.AdamW``.

    ``step`` takes the gradients: none is left to zero. A step whose gradients are not finite
    changes nothing and is counted in ``skipped``. Every rank of the default process group must
    build one.
    """

    def __init__(
        self, params, streamed, *, max_norm=None, in_backward=False, threads=None, **settings
    ):
        if in_backward and max_norm is not None:
            raise ValueError("in backward the norm of all gradients is not known: drop max_norm")
        super().__init__(params, DEFAULTS | settings)
        self.streamed, self.max_norm, self.in_backward = streamed, max_norm, in_backward
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self.host = adam.HostUpdates(streamed, self.group_of, threads)
        self.synchronises, self.skipped, self.steps = True, 0, torch.zeros(())
        for parameter, kept in self.host.state.items():
            self.state[parameter] = {"step": self.steps, **kept}
        self.residents = [p for p in self.group_of if p.requires_grad and p not in self.state]
        for p in self.residents:
            self.state[p] = state_on_device(p)
        self.norms: dict[nn.Parameter, torch.Tensor] = {}
        self.register_state_dict_pre_hook(lambda _: streamed.wait())
        for module in streamed.model.modules():
            hook = module.register_load_state_dict_post_hook(lambda loaded, _: self.reload(loaded))
            streamed.hooks.append(hook)
        streamed.optimizer = self
        streamed.after_gradients, streamed.after_store = self.reduce, self.stored

    # Backward

    def reduce(self, layer: int) -> None:
        """Average a layer's gradients over the ranks, and take their norms."""
        if self.synchronises:
            totals = self.streamed.totals[layer]
            for name, parameter in self.streamed.layers[layer].trained.items():
                self.average(totals[name])
                self.norms[parameter] = torch.linalg.vector_norm(totals[name], dtype=torch.float32)

    def average(self, gradient: torch.Tensor) -> None:
        if self.ranks > 1:
            fp32 = gradient.float()
            dist.all_reduce(fp32)
            gradient.copy_(fp32.div_(self.ranks))

    def stored(self, layer: int) -> None:
        """With ``in_backward``: have a layer updated when its gradients are on the host."""
        if self.in_backward and self.synchronises:
            mine = [self.norms[p] for p in self.streamed.layers[layer].trained.values()]
            norm = torch.linalg.vector_norm(torch.stack(mine))
            announced = self.host.announce([layer], self.settings())
            known = self.to_host(norm, torch.ones_like(norm))
            self.host.later(self.arrive, announced, False, *known)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of each microbatch but the last: gradients are only summed."""
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True

    # The step

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Queue the update of everything, with the settings of now; wait for nothing."""
        residents = [p for p in self.residents if p.grad is not None]
        for p in residents:
            self.average(p.grad)
            self.norms[p] = torch.linalg.vector_norm(p.grad, dtype=torch.float32)
        norms = [self.norms[p] for p in self.group_of if p in self.norms]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale, settings = torch.ones_like(norm), self.settings()
        if self.max_norm is not None:
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        skip = (~norm.isfinite()).float()
        for p in residents:
            update_on_device(settings[self.group_of[p]], p, self.state[p], scale, skip)
        layers = [] if self.in_backward else sorted(self.streamed.summed)
        announced, known = self.host.announce(layers, settings), self.to_host(norm, scale)
        self.host.later(self.arrive, announced, True, *known)
        self.zero_grad()

    def settings(self) -> list[dict]:
        """Of all groups, as they are now: a schedule may change them at once."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

    def to_host(self, norm: torch.Tensor, scale: torch.Tensor) -> tuple:
        """Queue the copy of two numbers behind the gradients; their event, copy and source."""
        streams, d2h = self.streamed.streams, self.streamed.d2h
        source, cuda = torch.stack([norm, scale]), norm.is_cuda
        copy = torch.empty(2, pin_memory=cuda)
        arrived = streams.Event(**({"blocking": True} if cuda else {}))
        d2h.wait_stream(streams.current_stream())
        with streams.stream(d2h):
            copy.copy_(source, non_blocking=True)
        arrived.record(d2h)
        return arrived, copy, source

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, sums on the host as well."""
        super().zero_grad()
        self.streamed.summed.clear()

    def arrive(self, announced: dict, ends: bool, arrived, copy, source) -> None:
        """The thread of arrivals: when gradients and their norm are here, have layers updated."""
        try:
            arrived.synchronize()
            norm, scale = copy.tolist()
            finite = copy[0].isfinite().item()
            if not finite and self.in_backward:
                raise FloatingPointError(f"norm {norm}: layers are half updated, load a checkpoint")
            if finite:
                self.host.start(announced, self.steps.item(), scale)
            else:
                self.host.drop(announced)
            self.steps += ends and finite
            self.skipped += ends and not finite
        except BaseException as error:
            self.host.drop(announced, error)
            raise

    # Weights and state that come from elsewhere

    def reload(self, module: nn.Module | None = None) -> None:
        """Make the masters the weights: something else has changed these after ``wait()``."""
        for p in self.group_of if module is None else module.parameters(recurse=False):
            if p in self.state:
                self.state[p]["master"].copy_(p.detach())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load what ``state_dict`` gave; weights become the rounded masters."""
        self.streamed.wait()
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            ours |= {name: value for name, value in theirs.items() if name != "params"}
        for number, p in enumerate(self.group_of):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[p][name].copy_(value)
            if p in self.state:
                p.copy_(self.state[p]["master"])

    def close(self) -> None:
        """End the threads and the streaming."""
        self.host.close()
        self.streamed.close()


# %%
# Run it, and prove it
# --------------------


def train(optimizer: HostAdamW, device: torch.device) -> None:
    """``STEPS`` steps with another rate in each; the loss of one is not a number."""
    schedule = streaming.schedule_of(optimizer)
    for step in range(STEPS):
        loss = streaming.loss_of(optimizer.streamed.model, 1000 * dist.get_rank() + step, device)
        (loss * (torch.nan if step == BAD_STEP else 1)).backward()
        optimizer.step()
        schedule.step()
    optimizer.streamed.wait()


def main() -> None:
    device = streaming.node.start_rank()
    try:
        torch.manual_seed(0)
        model = streaming.Model().bfloat16()
        ordinary = deepcopy(model).to(device)
        streamed = streaming.StreamedModel(model, model.encoder.layers, device)
        settings = streaming.SETTINGS | {"max_norm": MAX_NORM}
        with closing(
            HostAdamW(streaming.groups_of(model.parameters()), streamed, **settings)
        ) as optimizer:
            train(optimizer, device)
            assert optimizer.skipped == 1
        streaming.train_resident(ordinary, device, STEPS, max_norm=MAX_NORM, bad_step=BAD_STEP)
        for ours, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
            close = {"rtol": 0, "atol": 0 if device.type == "cpu" else ON_DEVICE}
            torch.testing.assert_close(ours.to(device), theirs, **close)
        print(f"{STEPS} steps, one of them skipped: the weights of the resident run")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
