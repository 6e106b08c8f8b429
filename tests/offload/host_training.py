"""A stock Llama, its streamed twin, and an ordinary run in bf16 whose bits whole steps have."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from overlap_recipes.offload.streamed_model import StreamedModel
from overlap_recipes.offload.whole_step import HostAdamW

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
LAYERS, WORDS, WIDTH = 5, 96, 32
RATE, MAX_NORM = 1e-2, 0.5
PATIENCE_S = 60  # only a failing test waits this long


def llama(dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    config = transformers.LlamaConfig(**sizes | options)
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Tokens, labels, and a mask: the first sequence is padded on the left."""
    ids = torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def linear(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


def streamed_of(model: nn.Module, **options) -> StreamedModel:
    return StreamedModel(model, model.model.layers, CPU, **options)


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(map(torch.equal, ours.parameters(), theirs.parameters()))


def groups_of(model: nn.Module) -> list[dict]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def steps_of(optimizer: torch.optim.Optimizer) -> set[float]:
    return {kept["step"].item() for kept in optimizer.state_dict()["state"].values()}


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


class Resident:
    """Ordinary training in bf16: fp32 masters, one fused AdamW, one norm of all gradients."""

    def __init__(self, model: nn.Module, max_norm: float | None = MAX_NORM) -> None:
        self.model, self.max_norm, groups = model, max_norm, groups_of(model)
        self.parameters = [p for group in groups for p in group["params"]]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        taken = iter(self.masters)
        for group in groups:
            group["params"] = [next(taken) for _ in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
        self.schedule = falling(self.optimizer)

    def step(self, *losses: torch.Tensor, mean_in: torch.dtype | None = None) -> None:
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        for loss in losses:
            loss.backward()
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad += parameter.grad.float()
                parameter.grad = None
        for master in self.masters if mean_in else ():
            master.grad = (master.grad / len(losses)).to(mean_in).float()
        norm = torch.linalg.vector_norm(torch.stack([m.grad.norm() for m in self.masters]))
        if norm.isfinite():
            clip_grads_with_norm_(self.masters, self.max_norm or math.inf, norm)
            self.optimizer.step()
        self.schedule.step()
        self.set_weights()

    def set_weights(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.data.copy_(master)


def whole(model: nn.Module, streamed: StreamedModel, **options) -> HostAdamW:
    options = {"lr": RATE, "max_norm": MAX_NORM} | options
    return HostAdamW(groups_of(model), streamed, **options)


def train(model: nn.Module, optimizer: HostAdamW, seed: int) -> None:
    """A step on the batch of ``seed``."""
    model(**batch(seed)).loss.backward()
    optimizer.step()
