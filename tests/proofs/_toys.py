# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/_toys.py
"""A model, its training step and a comparison of bits, for recipes that explain the library.

No page of its own: the page of ``state_to_save`` explains such a comparison, from scratch.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import TrainingState

WIDTH, HIDDEN = 512, 2048  # features
BATCH = 64  # samples per rank and step


def start_rank() -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()  # NCCL where there are GPUs, else gloo
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def directory_of_rank_0(directory: Path) -> Path:
    """The directory that rank 0 was given: a checkpoint is one directory for all ranks."""
    agreed = [directory]
    dist.broadcast_object_list(agreed)
    return agreed[0]


class AppState(TrainingState):
    """Of a model and its one optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.optimizer = optimizer


class SampleCounter(nn.Module):
    """Count the samples and the numbers that all ranks have seen, in a buffer of two int64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples[0] += x.shape[0] * dist.get_world_size()
        self.samples[1] += x.numel() * dist.get_world_size()
        return x


def build_app(device: torch.device, seed: int = 0) -> AppState:
    """An MLP over (batch, WIDTH) float32, sharded over all ranks, and its AdamW; no step taken."""
    torch.manual_seed(seed)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    model = fully_shard(nn.Sequential(SampleCounter(), up, nn.GELU(), down).to(device))
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def load_app(directory: Path, device: torch.device) -> AppState:
    """A new application state, initialised with another seed, then loaded from ``directory``."""
    app = build_app(device, seed=1)
    dcp.load({"app": app}, checkpoint_id=directory)
    return app


def next_batch(app: AppState, device: torch.device) -> torch.Tensor:
    """A batch that depends on the step and the rank alone."""
    torch.manual_seed(1000 * app.step + dist.get_rank())
    return torch.randn(BATCH, WIDTH, device=device)


def forward_backward(app: AppState, device: torch.device) -> None:
    app.model(next_batch(app, device)).square().mean().backward()


def train_step(app: AppState, device: torch.device) -> None:
    forward_backward(app, device)
    app.optimizer.step()
    app.optimizer.zero_grad()
    app.step += 1


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of a nested state dict by path; a DTensor counts as this rank's shard."""
    if isinstance(tree, dict):
        tree = tree.items()
    elif isinstance(tree, list):
        tree = enumerate(tree)
    else:
        return {path: tree.to_local() if isinstance(tree, DTensor) else tree}
    return {p: leaf for key, value in tree for p, leaf in leaves(value, f"{path}/{key}").items()}


def snapshot(app: AppState) -> dict[str, object]:
    """Copy every leaf, for :func:`assert_same_bits`; needs the memory of the state once more."""
    live = leaves(app.state_dict())
    return {p: leaf.detach().clone() if torch.is_tensor(leaf) else leaf for p, leaf in live.items()}


def staged_bytes(app: AppState) -> int:
    """Bytes that this rank's part of the state takes."""
    tensors = [leaf for leaf in leaves(app.state_dict()).values() if isinstance(leaf, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):  # as bytes: 0.0 and -0.0 are equal numbers
        return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
    return a == b


def assert_same_bits(app: AppState, expected: dict[str, object]) -> None:
    """Raise AssertionError naming the leaves of ``app`` that differ in any bit."""
    found = leaves(app.state_dict())
    assert found.keys() == expected.keys(), f"other keys: {found.keys() ^ expected.keys()}"
    differing = [path for path, leaf in expected.items() if not same_bits(found[path], leaf)]
    assert not differing, f"step {expected['/step']}: {differing[:3]} of {len(differing)} differ"


def train(app: AppState, last_step: int, device: torch.device) -> AppState:
    while app.step < last_step:
        train_step(app, device)
    return app
