"""What the cases of checkpoints share: a group, a toy model, a round trip, and comparing bits."""

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint.loading import load
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

HOST = torch.device("cpu")
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
STEPS_BEFORE = 2  # the save
STEPS_AFTER = 2


@contextmanager
def job() -> Iterator[Path]:
    """Join the group that torchrun describes, or a group of one; a directory of all ranks."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            agreed = [temporary]
            dist.broadcast_object_list(agreed)
            yield Path(agreed[0])
            dist.barrier()  # before any rank removes it
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    """The model, sharded over all ranks in the memory of the host."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def two_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A step on numbers that the step alone decides."""
    torch.manual_seed(step)
    features = next(model.parameters()).shape[-1]
    loss = model(torch.randn(8, features)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def add_leaves(value: object, path: str, leaves: dict[str, object]) -> None:
    """Put copies of what is in ``value`` into ``leaves``, by path; of a shard its local part."""
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, dict):
        for key, inner in value.items():
            add_leaves(inner, f"{path}.{key}", leaves)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            add_leaves(inner, f"{path}.{index}", leaves)
    elif not torch.is_tensor(value):
        leaves[path] = copy.deepcopy(value)
    elif type(value) in PLAIN_TENSORS:
        leaves[path] = value.detach().clone()
    else:  # a tensor that is made of others
        names, _ = value.__tensor_flatten__()
        for name in names:
            add_leaves(getattr(value, name), f"{path}.{name}", leaves)


def all_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """This rank's part of model and optimizer, by name, without asking DCP."""
    leaves: dict[str, object] = {}
    add_leaves(dict(model.state_dict()), "model", leaves)
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            add_leaves(optimizer.state[parameter], f"state.{name}", leaves)
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        add_leaves(settings, f"group{index}", leaves)
    return leaves


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found: object, wanted: object) -> bool:
    """Whether two leaves have the same type, shape and bits."""
    if not torch.is_tensor(found) or not torch.is_tensor(wanted):
        return type(found) is type(wanted) and repr(found) == repr(wanted)
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    return torch.equal(bytes_of(found), bytes_of(wanted))


def shown(leaf: object) -> str:
    """A leaf in a few words."""
    if not torch.is_tensor(leaf):
        return repr(leaf)[:60]
    first = [round(number, 4) for number in leaf.flatten()[:2].tolist()]
    return f"{leaf.dtype} {first}"


def differences(found: dict[str, object], wanted: dict[str, object]) -> list[str]:
    """What this rank has otherwise than it should, in a line each."""
    rank = dist.get_rank()
    wrong = []
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            wrong.append(f"rank {rank}: {name} is missing")
        elif name not in wanted:
            wrong.append(f"rank {rank}: {name} is new")
        elif not same(found[name], wanted[name]):
            line = f"rank {rank}: {name} is {shown(found[name])}, saved {shown(wanted[name])}"
            wrong.append(line)
    return wrong


def none_of_any_rank(wrong: list[str]) -> None:
    """Assert on all ranks alike that no rank has found anything wrong."""
    by_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, wrong)
    found = []
    for lines in by_rank:
        found.extend(lines)
    assert not found, f"{found[0]} ({len(found)} differ)"


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[nn.Module, torch.optim.Optimizer, int], None],
    steps: range,
) -> None:
    for number in steps:
        step(model, optimizer, number)


def round_trip(
    build: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]],
    step: Callable[[nn.Module, torch.optim.Optimizer, int], None] = train_step,
) -> None:
    """One job trains, saves beside training and goes on; a fresh one loads and goes on.

    Both must have the same bits, after the load and at the end. ``build`` gets a seed.
    """
    before = range(STEPS_BEFORE)
    after = range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    with job() as root:
        model, optimizer = build(0)
        app = TrainingState(model, optimizer)
        with Saves(HOST, model.buffers) as saves:
            train(model, optimizer, step, before)
            saved = all_state(model, optimizer)
            saves.save({"app": app}, root / "step1")
            saves.before_update()
            train(model, optimizer, step, after)
            final = all_state(model, optimizer)
        again, its_optimizer = build(1)
        its_app = TrainingState(again, its_optimizer)
        load({"app": its_app}, root / "step1")
        none_of_any_rank(differences(all_state(again, its_optimizer), saved))
        train(again, its_optimizer, step, after)
        none_of_any_rank(differences(all_state(again, its_optimizer), final))
