# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/adam_in_pieces.py
"""AdamW in pieces that fit a core's cache: one pass over the memory, without Python's lock."""

import os
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
from torch import nn

# Private by name: ``torch._fused_adamw_``.

_CHANGES = 2**24  # parameters: those that are compared with their masters at a time
PIECE = 2**16  # parameters: what is read twice of a piece stays in the cache of one core
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_Tensors = list[torch.Tensor]


def fused_adamw(settings: dict, gradient, step, master, exp_avg, exp_avg_sq, skip=None) -> None:
    """One step of AdamW in fp32, the one that ``step`` counts; none if ``skip`` is 1."""
    beta1, beta2 = settings["betas"]
    torch._fused_adamw_(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=float(settings["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


def adamw(p: _Tensors, g: _Tensors, m: _Tensors, v: _Tensors, step: _Tensors, numbers: list[float]):
    """The same, as TorchScript can have it; ``numbers`` by ``numbers_of``."""
    torch._fused_adamw_(
        p,
        g,
        m,
        v,
        [],
        step,
        lr=numbers[0],
        beta1=numbers[1],
        beta2=numbers[2],
        eps=numbers[3],
        weight_decay=numbers[4],
        amsgrad=False,
        maximize=False,
    )


def numbers_of(settings: dict, scale: float) -> list[float]:
    """What a step computes with: rate, betas, eps, decay; gradients are multiplied by ``scale``."""
    beta1, beta2 = settings["betas"]
    rate = float(settings["lr"])
    return [rate, beta1, beta2, settings["eps"], settings["weight_decay"], scale]


def copy_of_settings(group: dict) -> dict:
    """What a group of parameters has besides them; a later change of it does not reach the copy."""
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def update_pieces(block: _Tensors, parts: list[_Tensors], step: _Tensors, numbers: list[float]):
    """A step for a block: gradient, weight, master, two moments, and a scratch as long as a piece.

    ``parts``: four lists of one tensor each, to be overwritten, for a piece's master, moments and
    gradient. A weight in fp32 is its own master.
    """
    weight = block[1]
    scratch = block[5]
    length = scratch.numel()
    scale = scratch[0].clone().fill_(numbers[5])  # a tensor, in TorchScript without torch.tensor
    gradients = block[0].split(length)
    weights = weight.split(length)
    masters = block[2].split(length)
    exp_avgs = block[3].split(length)
    exp_avg_sqs = block[4].split(length)
    for i, gradient in enumerate(gradients):
        parts[0][0] = masters[i]
        parts[1][0] = exp_avgs[i]
        parts[2][0] = exp_avg_sqs[i]
        parts[3][0] = scratch[: gradient.numel()].copy_(gradient)
        if numbers[5] != 1.0:
            parts[3][0].mul_(scale)
        adamw(parts[0], parts[3], parts[1], parts[2], step, numbers)
        if weight.dtype != torch.float32:
            weights[i].copy_(parts[0][0])


def without_lock(function: Callable) -> Callable:
    """A function as TorchScript; as it is, right and slower, where that cannot be had."""
    script = getattr(torch.jit, "script", None)
    if script is None:  # in a later PyTorch
        return function
    try:
        return script(function)
    except OSError:
        warnings.warn(
            "updates on the host are slower where the library is there without its source, which "
            "TorchScript reads: install its .py files",
            stacklevel=2,
        )
        return function


def update_block(update: Callable, block: _Tensors, step: torch.Tensor, numbers: list) -> None:
    """Call ``update``, which is ``update_pieces``.

    Raises:
        ValueError: a block's tensors are not flat, without gaps and of one length; master, moments
            or scratch are not in fp32; or a weight in fp32 has another master than itself.
    """
    gradient, weight, master = block[:3]
    if not all(tensor.ndim == 1 and tensor.is_contiguous() for tensor in block):
        raise ValueError("a block is of flat tensors without gaps")
    if {tensor.numel() for tensor in block[:5]} != {gradient.numel()}:
        raise ValueError("a block is of flat tensors of one length")
    if {tensor.dtype for tensor in block[2:]} != {torch.float32}:
        raise ValueError("master, moments and scratch are in fp32")
    if weight.dtype == torch.float32 and weight.data_ptr() != master.data_ptr():
        raise ValueError("a weight in fp32 is its own master: pass it twice")
    update(block, [[tensor] for tensor in block[2:]], [step], numbers)


def host_threads() -> int:
    """This rank's part of the cores, less one for the thread that trains.

    The cores of the launcher, the process that started this one, are those of all LOCAL_WORLD_SIZE
    ranks, a container's with them. A rank that is bound to some of them has no more than these.
    Where the launcher is bound to other cores than the job, the number is wrong.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = os.sched_getaffinity(0)
    of_host = own | os.sched_getaffinity(os.getppid())
    return max(1, min(len(own), len(of_host) // ranks) - 1)


_MOMENTS = ("exp_avg", "exp_avg_sq")
FP32 = torch.float32  # whatever the default dtype is


def state_on_device(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Of a parameter that stays on the device: step, fp32 master and moments."""
    master = parameter.detach().float()
    state = {name: torch.zeros_like(master) for name in _MOMENTS}
    state["step"] = torch.zeros((), dtype=FP32, device=master.device)
    state["master"] = master
    return state


def load_states(state: dict, parameters: Iterable[nn.Parameter], saved: dict) -> None:
    """Load a state dict: what it lacks is zero, but masters, and weights are the rounded masters.

    ``saved`` may hold the very tensors of ``state``, with new values: DCP loads in place.
    """
    names = []  # or numbers
    for group in saved["param_groups"]:
        names += group["params"]
    for name, parameter in zip(names, parameters, strict=True):
        kept = state.get(parameter)
        if kept is None:
            continue
        found = saved["state"].get(name, {})
        for which, tensor in kept.items():
            if which in found:
                tensor.copy_(found[which])
            elif which != "master":
                tensor.zero_()
        parameter.copy_(kept["master"])


def refuse_other_adams(groups: list[dict], others: Iterable[str] = ()) -> None:
    """Raise where groups have settings that this AdamW has not: it would train in another way."""
    found = set(others)
    for group in groups:
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                found.add(name)
        if "betas" not in group:
            found.add("momentum")
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
            found.add("decoupled_weight_decay=False")
    if found:
        raise ValueError(f"this AdamW has no setting {', '.join(sorted(found))}")


def refuse_bad_numbers(groups: list[dict]) -> None:
    """Raise where groups have a rate, betas, eps or decay that torch's AdamW would not take."""
    for group in groups:
        numbers = {name: group[name] for name in ("eps", "weight_decay")}
        betas = tuple(float(beta) for beta in group["betas"])
        of_torch = [torch.zeros((), device="cpu")]
        torch.optim.AdamW(of_torch, lr=float(group["lr"]), betas=betas, **numbers)


def refuse_sparse(parameter: nn.Parameter) -> None:
    """Raise where a gradient is not dense, as torch's AdamW does."""
    if parameter.grad.layout is not torch.strided:
        raise RuntimeError(
            f"a parameter has a sparse gradient: make its module with sparse=False (its shape is "
            f"{tuple(parameter.shape)})"
        )


def refuse_wide(parameters: Iterable[nn.Parameter]) -> None:
    """Raise where masters and moments in float32 would not hold what is trained."""
    for dtype in {p.dtype for p in parameters if p.requires_grad}:
        if dtype.itemsize > torch.float32.itemsize:
            raise ValueError(f"this AdamW computes in float32, and a parameter is in {dtype}")


def take_changes(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Where a weight is not its rounded master, something else has changed it: it counts."""
    parts = [(master, weight)]
    if weight.ndim > 0:
        rows = max(1, _CHANGES // max(1, weight[:1].numel()))
        parts = zip(master.split(rows), weight.split(rows), strict=True)
    for own, found in parts:
        torch.where(own.to(found.dtype) == found, own, found, out=own)


def _follow_memory(parameter: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
    """Let a weight in fp32 be its own master, where it got other memory, too."""
    if parameter.dtype == torch.float32:
        if parameter.data_ptr() != state["master"].data_ptr():
            state["master"] = parameter.detach()
    elif parameter.data_ptr() == state["master"].data_ptr():
        state["master"] = parameter.detach().float()


def update_on_device(settings: dict, parameter: nn.Parameter, state, scale, skip) -> None:
    """The same step there; ``scale`` and ``skip`` are on the device as well, nothing waits."""
    _follow_memory(parameter, state)
    step = state["step"]
    step += 1 - skip
    master = state["master"]
    if parameter.dtype != torch.float32:
        take_changes(master, parameter.detach())
    gradient = parameter.grad.float().mul_(scale)
    fused_adamw(settings, gradient, step, master, state["exp_avg"], state["exp_avg_sq"], skip)
    if parameter.dtype != torch.float32:
        parameter.copy_(master)


def to_host(stream: torch.Stream, *numbers: torch.Tensor) -> tuple:
    """Queue the copy of numbers, after all that is queued; their event, copy and source."""
    source = torch.stack(numbers)
    on_gpu = source.is_cuda
    streams = torch.get_device_module(source.device)
    if on_gpu:
        arrived = streams.Event(blocking=True)  # a wait takes no core
    else:
        arrived = streams.Event()
    copy = torch.empty(len(numbers), dtype=FP32, device="cpu", pin_memory=on_gpu)
    stream.wait_stream(streams.current_stream())
    with streams.stream(stream):
        copy.copy_(source, non_blocking=True)
    arrived.record(stream)
    return arrived, copy, source


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dict]:
    """Matrices, and what is not decayed."""
    matrices = []
    others = []
    for parameter in parameters:
        if parameter.ndim > 1:
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
