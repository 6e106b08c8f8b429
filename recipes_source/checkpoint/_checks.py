# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/_checks.py
"""What the recipes that save from scratch share: a name for complete checkpoints, a comparison of
ranks, and the proof.

It needs torch alone. The first half is for a training job, next to :class:`AsyncCheckpoints` of
``async_save.py``; the second half is toys and the proof.
"""

import copy
import ctypes
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# For a training job

REFUSED = "cannot be saved"


class NamedWhenComplete(FileSystemWriter):
    """Write a checkpoint of all ranks; give it its name only when all have written it.

    Until then its directory ends in ``.incomplete``.
    """

    def __init__(self, directory: Path, **options) -> None:
        super().__init__(f"{directory}.incomplete", **options)
        self.ranks = dist.get_world_size()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before any rank writes."""
        if len(plans) != self.ranks:
            raise RuntimeError(f"{len(plans)} of {self.ranks} ranks write {self.path.name}")
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list) -> None:
        """On rank 0, when all have written."""
        super().finish(metadata, results)
        self.path.rename(self.path.with_suffix(""))  # fails if there is a checkpoint of that name


class SameOnAllRanks:
    """Compares what DCP keeps one rank's copy of; the bytes of tensors at the first save alone.

    Raises:
        ValueError: on every rank; the state cannot be saved as it is, ranks differ where they may
            not, or save different steps.
    """

    def __init__(self) -> None:
        self.has_compared = False

    def __call__(self, step: int, state: dict, group: dist.ProcessGroup) -> None:
        mine = {"step": repr(step)}
        for path, leaf in leaves(state).items():
            mine[path] = fact_of(leaf, with_digest=not self.has_compared)
        of_ranks = [mine] * group.size()
        dist.all_gather_object(of_ranks, mine, group=group)
        problems = []
        for rank, theirs in enumerate(of_ranks):
            for path in sorted(of_ranks[0].keys() | theirs.keys()):
                fact = theirs.get(path, "not there")
                if fact != of_ranks[0].get(path) or fact.startswith(REFUSED):
                    problems.append(f"rank {rank}, {path}: {fact}")
        if problems:
            raise ValueError(f"not saved, {len(problems)} problems: {problems[:3]}")
        self.has_compared = True


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of nested dicts and lists by path."""
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        return {path: tree}
    found = {}
    for key, child in children:
        found |= leaves(child, f"{path}/{key}")
    return found


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of its bytes in row-major order; waits for the device."""
    data = tensor.reshape(-1).view(torch.uint8).cpu()
    memory = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
    return hashlib.sha256(memory).hexdigest()


def fact_of(leaf: object, with_digest: bool) -> str:
    """What must be the same on all ranks; begins with REFUSED if DCP would not save it as it is."""
    if isinstance(leaf, int | float | str | None):
        return repr(leaf)
    if not isinstance(leaf, torch.Tensor):
        return f"{REFUSED}: a {type(leaf).__name__}"
    is_sharded = isinstance(leaf, DTensor)
    local = leaf.to_local() if is_sharded else leaf.detach()
    if type(local) is not torch.Tensor or local.layout != torch.strided:
        return f"{REFUSED}: a {type(local).__name__}, {local.layout}"
    if is_sharded and leaf.dim() == 0:
        return f"{REFUSED}: a DTensor without dimensions, which torch's stagers do not copy"
    fact = f"{leaf.dtype}, {tuple(leaf.shape)}"
    if with_digest and not is_sharded:
        fact += f", SHA-256 {digest_of(local)}"
    return fact


# Toys

WIDTH = 512  # features
STEPS, SAVE_EVERY = 6, 2


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
    """A checkpoint is one directory for all ranks."""
    agreed = [directory]
    dist.broadcast_object_list(agreed)
    return agreed[0]


class SampleCounter(nn.Module):
    """Count the samples that all ranks have seen, in a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples += x.shape[0] * dist.get_world_size()
        return x


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer over (batch, WIDTH) float32, sharded over all ranks, and its AdamW."""
    torch.manual_seed(0)
    layers = nn.Sequential(SampleCounter(), nn.Linear(WIDTH, WIDTH), nn.GELU())
    model = fully_shard(layers.to(device))
    return model, torch.optim.AdamW(model.parameters())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def watched_batches(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, expected: dict
) -> Iterator[torch.Tensor]:
    """STEPS batches; store in ``expected`` what each checkpoint must hold, by step.

    A loop that asks for its next batch has just saved: the checkpoint must hold the bits of that
    moment.
    """
    for step in range(STEPS):
        torch.manual_seed(1000 * step + dist.get_rank())
        yield torch.randn(64, WIDTH, device=device)
        if (step + 1) % SAVE_EVERY == 0:
            expected[step + 1] = copy.deepcopy(state_of(model, optimizer))


# The proof


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, DTensor):
        return same_bits(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):  # as bytes: 0.0 and -0.0 are equal numbers
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return a == b


def assert_right(directory: Path, expected: dict) -> None:
    """Raise AssertionError unless the checkpoint holds every bit of ``expected``."""
    loaded = copy.deepcopy(expected)
    for leaf in leaves(loaded).values():
        if isinstance(leaf, torch.Tensor):
            leaf.fill_(7)
    dcp.load(loaded, checkpoint_id=directory)
    found = leaves(loaded)
    differing = []
    for path, leaf in leaves(expected).items():
        if not same_bits(found[path], leaf):
            differing.append(path)
    assert not differing, f"{directory.name}: {differing[:3]} of {len(differing)} differ"


def assert_all_right(root: Path, expected: dict[int, dict]) -> None:
    """The checkpoints of the steps in ``expected``, loaded back."""
    for step, state in expected.items():
        assert_right(root / f"step{step}", state)
    print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")
