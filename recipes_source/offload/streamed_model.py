"""
Stream a stock model: weights on the host, the model's own forward
==================================================================

HEAD
"""

# %%
# Imports and sizes
# -----------------
# ``weight_streaming.py`` has the slots, the lanes and their events.

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from weight_streaming import GRADIENT_SLOTS, SLOTS, StreamedLayers, node

OPTIMIZER_BYTES = 12  # a trained parameter: fp32 master and two moments of Adam
CACHES = ("past_key_values", "past_key_value", "layer_past")  # what layers call their cache
LAYERS, WORDS, STEPS, MICROBATCHES = 4, 50, 3, 2
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

# %%
# The streamed model
# ------------------


def resident_bytes(layer: nn.Module) -> int:
    """What a layer takes on the device, with its gradients and the state of Adam in fp32."""
    trained = [p for p in layer.parameters() if p.requires_grad]
    weights = sum(p.nbytes for p in layer.parameters())
    return weights + sum(p.nbytes + OPTIMIZER_BYTES * p.numel() for p in trained)


class StreamedModel(StreamedLayers):
    """A model whose layers live in host memory; everything else of it moves to the device.

    Args:
        model: any module; its forward is not changed.
        layers: those of its submodules that run one after the other, in order.
        device: where it runs.
        budget: bytes of device memory for layers that stay there, the lowest ones, each with its
            gradients and the state of Adam.
        settings: of ``StreamedLayers``.
    """

    def __init__(self, model: nn.Module, layers: Iterable, device, *, budget=0, **settings) -> None:
        self.model, self.optimizer, self.hooks, self.resident = model, None, [], []
        self.summed: set[int] = set()  # layers of whose gradients the host has a sum
        streamed = list(layers)
        while streamed and resident_bytes(streamed[0]) <= budget:
            budget -= resident_bytes(streamed[0])
            self.resident.append(streamed.pop(0))
        super().__init__(streamed, device, **settings)
        on_host = {p for layer in streamed for p in layer.parameters()}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter not in on_host:
                    parameter.data = parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        for layer in streamed:
            self.hooks.append(layer.register_state_dict_pre_hook(lambda *_: self.wait()))
            self.hooks.append(layer.register_load_state_dict_pre_hook(lambda *_: self.wait()))
        for layer in self.resident:
            layer.forward = partial(self.recomputed, layer.forward)
        self.hooks.append(register_optimizer_step_pre_hook(self.before_step))

    def call(self, index: int, *args, **kwargs):
        """What ``layer.forward`` is now."""
        return super().call(
            index, *args, **(without_cache(kwargs) if torch.is_grad_enabled() else kwargs)
        )

    @staticmethod
    def recomputed(forward: Callable, *args, **kwargs):
        """What the forward of a layer is that stays on the device."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **without_cache(kwargs))

    # Sums of microbatches

    def load_sum(self, layer: int) -> bool:
        """Queue the copy of a sum of earlier microbatches into the gradient slot, if there is one."""
        slot, mine = layer % GRADIENT_SLOTS, self.layers[layer]
        handed_out = all(v.dtype == mine.trained[n].dtype for n, v in self.totals[layer].items())
        if handed_out and all(p.grad is None for p in mine.trained.values()):
            self.summed.discard(layer)  # zero_grad() has forgotten it
        if layer not in self.summed:
            return False
        self.h2d.wait_event(self.grad_free[slot])
        self.h2d.wait_event(self.host_done[layer])
        with self.streams.stream(self.h2d):
            for flat, host in zip(self.gradient_flats[layer], mine.gradients, strict=True):
                flat.copy_(host.flat, non_blocking=True)
        self.sum_ready[slot].record(self.h2d)
        return True

    def store(self, layer: int) -> None:
        super().store(layer)
        self.summed.add(layer)

    # The host's side

    def before_host(self) -> None:
        """Called before the host reads or writes weights; a later recipe ends its updates."""

    def wait(self) -> None:
        """Wait for updates and copies: then the host may read gradients, and change weights."""
        self.before_host()
        super().wait()

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Before any optimizer's step, but that of one which waits by itself, layer by layer."""
        if optimizer is not self.optimizer:
            self.wait()

    def close(self) -> None:
        """Give the layers their forward back, and unlock the host's memory."""
        for hook in self.hooks:
            hook.remove()
        for layer in self.resident:
            del layer.forward
        super().close()


def without_cache(kwargs: dict) -> dict:
    """Arguments of a layer that backward runs again: it would append to a cache a second time."""
    for name in CACHES:
        if kwargs.get(name) is not None and kwargs[name].get_seq_length():
            raise ValueError("a layer that is trained cannot go on with a cache: use torch.no_grad")
    changes = dict.fromkeys(CACHES, None) | {"use_cache": False}
    return kwargs | {name: value for name, value in changes.items() if name in kwargs}


# %%
# Run it, and prove it
# --------------------


class Model(nn.Module):
    """An encoder of torch between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            node.WIDTH, 4, 4 * node.WIDTH, batch_first=True, norm_first=True
        )
        self.embedding, self.encoder = (
            nn.Embedding(WORDS, node.WIDTH),
            nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
        )
        self.head = nn.Linear(node.WIDTH, WORDS, bias=False)
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
        for microbatch in range(MICROBATCHES):
            seed = MICROBATCHES * step + microbatch
            expected, loss = loss_of(resident, seed, device), loss_of(model, seed, device)
            assert torch.equal(loss, expected)
            expected.backward()
            loss.backward()
        streamed.wait()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad.to(device), theirs.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        resident.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, all gradients bit-identical")


# %%
# The next two recipes train this model too, and are measured by ordinary training:


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dict]:
    """Matrices, and what is not decayed."""
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else others).append(parameter)
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train_resident(model: nn.Module, device, steps: int, max_norm=torch.inf, bad_step=None) -> None:
    """Ordinary training, all on the device: fp32 masters, means over ranks, clipping, a schedule."""
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    groups = groups_of(masters.values())
    optimizer = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    schedule, in_order = schedule_of(optimizer), [p for group in groups for p in group["params"]]
    for step in range(steps):
        loss = loss_of(model, 1000 * dist.get_rank() + step, device)
        (loss * (torch.nan if step == bad_step else 1)).backward()
        for parameter, master in masters.items():
            master.grad = parameter.grad.float()
            dist.all_reduce(master.grad)
            master.grad = (master.grad / dist.get_world_size()).to(parameter.dtype).float()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in in_order]))
        if norm.isfinite():
            clip_grads_with_norm_(in_order, max_norm, norm)
            optimizer.step()
        schedule.step()
        model.zero_grad()
        for parameter, master in masters.items():
            parameter.data.copy_(master)


def main() -> None:
    device = node.start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model, resident = Model(), Model().to(device)
        one_layer = resident_bytes(model.encoder.layers[0])
        with closing(
            StreamedModel(model, model.encoder.layers, device, budget=one_layer)
        ) as streamed:
            train(streamed, resident)
            assert len(streamed.layers) == LAYERS - 1
            passes = STEPS * MICROBATCHES
            assert streamed.loads == passes * (2 * (LAYERS - 1) - SLOTS)
        print(f"{streamed.loads} loads, {streamed.stores} stores")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
