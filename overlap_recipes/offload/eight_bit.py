# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/eight_bit.py
"""AdamW whose moments have 8 bits an element, and whose fp32 masters are a bf16 weight and a rest.

Moments: each block of ``BLOCK`` elements of a parameter has one scale, its largest magnitude. An
element is the number of the value of a code book that is nearest to it, divided by the scale. The
code books are those of torchao's ``AdamW8bit`` and of bitsandbytes (arXiv:2110.02861). Other than
there, a second moment above 0 never becomes 0 (arXiv:2309.01507 names that problem): an element
whose gradient stops would be updated by its first moment divided by eps, thousands of rates at a
time. A parameter of fewer than ``_SMALLEST`` elements, or not of whole blocks, keeps its moments in
fp32.

Master: the bf16 weight is the fp32 master, rounded with halves up; the rest is the difference of
their bits, which fits 16 bits. So both together are the master, exactly. A weight in fp32 is its
own master. Something else may change weights: then a rest belongs to a weight that is gone. So each
block of weights has a digest from when they were written. Where the weights of now have another
one, their rest counts as 0. That costs 8 bytes a block, and a pass over the weights in an update.

State of a parameter of n elements, plain tensors, ``ceil(n / BLOCK)`` blocks:

* ``step``: fp32, no dimension
* ``rest``: int16, the parameter's shape; ``digest``: int64, one a block; both for bf16 weights
* ``exp_avg_codes``, ``exp_avg_sq_codes``: uint8, the parameter's shape;
  ``exp_avg_scales``, ``exp_avg_sq_scales``: fp32, one a block
* in place of these ``exp_avg``, ``exp_avg_sq``: fp32, the parameter's shape, where it keeps them so
"""

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache, partial

import torch
from torch import nn

from . import adam_in_pieces as pieces
from .adam_in_pieces import FP32

LOG = logging.getLogger(__name__)
BLOCK = 256  # elements that share a scale
_SMALLEST = 4096  # elements of a parameter whose moments have 8 bits
PIECE = 2**23  # elements that are updated at a time: bounds what an update takes of the device
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_DECADES = 7  # powers of ten that a code book covers, each by twice the values of the one below
_BASE = 0x9E3779B97F4A7C15  # of digests: odd, so that its powers are odd, modulo 2**64


# Moments


@lru_cache
def code_book(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values that a code stands for, in order, in fp32."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=FP32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - _DECADES + 1)
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return torch.tensor(sorted(values), dtype=FP32, device=device)


@lru_cache
def _limits(signed: bool, device: torch.device) -> torch.Tensor:
    """The middle between each value of a code book and the next: from there on, that one counts."""
    book = code_book(signed, device)
    limits = book[:-1] + (book[1:] - book[:-1]) * 0.5
    if not signed:
        limits[0] = torch.finfo(FP32).tiny  # what is above 0 stays above 0
    return limits


@lru_cache
def _powers(device: torch.device) -> torch.Tensor:
    """Of ``_BASE``, modulo 2**64, one for each place in a block."""
    powers = []
    for place in range(BLOCK):
        power = pow(_BASE, place + 1, 2**64)
        if power >= 2**63:  # the same bits, with a sign
            power -= 2**64
        powers.append(power)
    return torch.tensor(powers, dtype=torch.int64, device=device)


def make_tables(device: torch.device) -> None:
    """Make what is made once for a device, now: streams that wait for this one may read it."""
    for signed in SIGNED.values():
        _limits(signed, device)
    _powers(device)
    _one_kernel(device)


def quantize(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of fp32 values, flat and of whole blocks, and the scales of their blocks."""
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp_min(1e-12)
    scaled = blocks / scales.unsqueeze(1)
    codes = torch.bucketize(scaled, _limits(signed, values.device), out_int32=True, right=True)
    return codes.to(torch.uint8).view(-1), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 values that flat codes and scales stand for."""
    values = code_book(signed, codes.device)[codes.int()]
    return (values.view(-1, BLOCK) * scales.unsqueeze(1)).view(-1)


# Masters


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 weight and a rest that are an fp32 master; what is no number becomes NaN."""
    # Some NaN have bits that would be rounded to those of another number.
    bits = master.masked_fill(master.isnan(), torch.nan).view(torch.int32)
    upper = (bits + 0x8000) >> 16
    rest = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The master of which ``split`` made them."""
    upper = weight.view(torch.int16).to(torch.int32)
    return ((upper << 16) + rest.to(torch.int32)).view(FP32)


def _in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """One block a row; the last is filled up with zeros."""
    missing = -flat.numel() % BLOCK
    if missing:
        flat = nn.functional.pad(flat, (0, missing))
    return flat.view(-1, BLOCK)


def digest_of(weight: torch.Tensor) -> torch.Tensor:
    """A number for each block of flat bf16 weights: another one if they are others."""
    bits = _in_blocks(weight.view(torch.int16)).to(torch.int64)
    return (bits * _powers(weight.device)).sum(1)


def master_of(weight: torch.Tensor, rest: torch.Tensor, digest: torch.Tensor) -> torch.Tensor:
    """The master of flat weights; where something else has changed a block, the weights alone."""
    is_same = digest_of(weight) == digest
    valid = _in_blocks(rest) * is_same.unsqueeze(1)
    return join(weight, valid.view(-1)[: rest.numel()])


# State


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether its moments have 8 bits."""
    return parameter.numel() >= _SMALLEST and parameter.numel() % BLOCK == 0


def kinds_of_state(parameter: torch.Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of a parameter's state by name, but ``step``."""
    blocks = torch.Size([-(-parameter.numel() // BLOCK)])
    kinds = {}
    if parameter.dtype == torch.bfloat16:
        kinds["rest"] = (parameter.shape, torch.int16)
        kinds["digest"] = (blocks, torch.int64)
    for moment in SIGNED:
        if is_quantized(parameter):
            kinds[f"{moment}_codes"] = (parameter.shape, torch.uint8)
            kinds[f"{moment}_scales"] = (blocks, FP32)
        else:
            kinds[moment] = (parameter.shape, FP32)
    return kinds


def is_by_block(name: str) -> bool:
    """Whether this state has one number a block."""
    return name == "digest" or name.endswith("_scales")


def state_on_device(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Of a parameter that stays on the device: zeros, which are its start."""
    refuse_dtypes([parameter])  # it may have been frozen until now
    make_tables(parameter.device)
    state = {"step": torch.zeros((), dtype=FP32, device=parameter.device)}
    return state | _zeros(parameter)


def _zeros(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    zeros = {}
    for name, (shape, dtype) in kinds_of_state(parameter).items():
        zeros[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)
    return zeros


def refuse_dtypes(parameters: Iterable[nn.Parameter]) -> None:
    """Raise where weights that are trained are neither bf16 nor fp32."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype not in (torch.bfloat16, FP32):
            raise ValueError(
                f'moments="8bit" trains bfloat16 and float32, and a parameter is in '
                f"{parameter.dtype}"
            )


# Updates


@lru_cache
def _one_kernel(device: torch.device) -> Callable | None:
    """``update`` of a piece with codes as one kernel; None where Triton cannot make it.

    It is tried once, beside the operators: without a C compiler Triton fails at its first call.
    """
    if device.type != "cuda":
        return None
    try:
        from . import eight_bit_kernel
    except ImportError:
        return None
    tables = {"powers": _powers(device)}
    for name, signed in SIGNED.items():
        tables[name] = (code_book(signed, device), _limits(signed, device))
    kernel = partial(eight_bit_kernel.update_by_kernel, tables=tables)
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    one = torch.ones((), device=device)
    gradient = torch.linspace(-1, 1, _SMALLEST, device=device)
    for dtype in (torch.bfloat16, FP32):
        weight = gradient.to(dtype)
        found = []
        for way in (_by_operators, kernel):
            piece = {"weight": weight.clone(), **_zeros(weight)}
            try:
                way(settings, piece, gradient, one, one, torch.zeros_like(one))
            except Exception as error:
                LOG.warning("8-bit updates by operators, a kernel is faster: %s", error)
                return None
            found.append((piece["weight"].float(), piece["exp_avg_codes"].int()))
        (expected, codes), (weight, own_codes) = found
        has_weights = torch.allclose(weight, expected, rtol=1e-2, atol=1e-3)  # a bit of bfloat16
        has_codes = (own_codes - codes).abs().max() <= 1  # where a value lies between two
        if not (has_weights and has_codes):
            LOG.warning("8-bit updates by operators: Triton's kernel has given other numbers")
            return None
    return kernel


def update(settings: dict, piece: dict, gradient, step, scale, skip) -> None:
    """One step of AdamW for some whole blocks, or for a parameter's last ones.

    Args:
        piece: ``weight`` and state by name, flat, of these elements; all is written in place.
        gradient: as flat, of any dtype; multiplied by ``scale``.
        step: which one this is, counted already.
        skip: 1 if nothing is to change, else 0.
    """
    way = _one_kernel(gradient.device)
    if way is None or "exp_avg_codes" not in piece:
        way = _by_operators
    way(settings, piece, gradient, step, scale, skip)


def _by_operators(settings: dict, piece: dict, gradient, step, scale, skip) -> None:
    weight = piece["weight"]
    master = weight
    if "rest" in piece:
        master = master_of(weight, piece["rest"], piece["digest"])
    moments = [_moment(piece, moment) for moment in SIGNED]
    pieces.fused_adamw(settings, gradient.float() * scale, step, master, *moments, skip)
    for name, moment in zip(SIGNED, moments, strict=True):
        if f"{name}_codes" in piece:
            codes, scales = quantize(moment, SIGNED[name])
            _write(piece[f"{name}_codes"], codes, skip)
            _write(piece[f"{name}_scales"], scales, skip)
    if "rest" in piece:
        upper, rest = split(master)
        weight.copy_(upper)
        piece["rest"].copy_(rest)
        piece["digest"].copy_(digest_of(upper))


def _moment(piece: dict, name: str) -> torch.Tensor:
    if name in piece:
        return piece[name]
    return dequantize(piece[f"{name}_codes"], piece[f"{name}_scales"], SIGNED[name])


def _write(target: torch.Tensor, values: torch.Tensor, skip: torch.Tensor) -> None:
    """Write values, or what is there: codes of what codes stand for are not always the same."""
    target.copy_(torch.where(skip.bool(), target, values))


def part_of(flat: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """Of flat tensors by name, those of a parameter, what belongs to some of its elements."""
    found = {}
    for name, tensor in flat.items():
        if is_by_block(name):
            found[name] = tensor[begin // BLOCK : -(-end // BLOCK)]
        else:
            found[name] = tensor[begin:end]
    return found


def update_on_device(settings: dict, parameter: nn.Parameter, state, scale, skip) -> None:
    """A step of a parameter that stays there, piece by piece; nothing waits."""
    state["step"] += 1 - skip
    weight = parameter.detach().reshape(-1)  # a copy of one with gaps
    gradient = parameter.grad.reshape(-1)
    flat = {"weight": weight}
    for name, tensor in state.items():
        if name != "step":
            flat[name] = tensor.view(-1)
    for begin in range(0, weight.numel(), PIECE):
        end = min(begin + PIECE, weight.numel())
        piece = part_of(flat, begin, end)
        update(settings, piece, gradient[begin:end], state["step"], scale, skip)
    if weight.data_ptr() != parameter.data_ptr():
        parameter.copy_(weight.view_as(parameter))


# Loads


def refuse_other_states(states: Iterable[dict]) -> None:
    """Raise where the state of a parameter is not of an AdamW of torch, or of either kind of ours.

    Raises:
        ValueError: what it has.
    """
    known = {"step", "master", "rest", "digest"}
    for moment in SIGNED:
        known |= {moment, f"{moment}_codes", f"{moment}_scales"}
    for found in states:
        is_whole = True
        for moment in SIGNED:
            is_whole = is_whole and (moment in found or f"{moment}_codes" in found)
        if found and not (is_whole and found.keys() <= known):
            raise ValueError(f"the state is of another optimizer: a parameter has {sorted(found)}")


def load_states(state: dict, parameters: Iterable[nn.Parameter], saved: dict) -> None:
    """Load a state dict of this format, or one with moments in fp32; what it lacks is zero.

    Weights come with the model, before or after this; of fp32 masters they are the upper bits.
    ``saved`` may hold the very tensors of ``state``, with new values: DCP loads in place.
    """
    names = []  # or numbers
    for group in saved["param_groups"]:
        names += group["params"]
    for name, parameter in zip(names, parameters, strict=True):
        if parameter not in state:
            continue
        kept = state[parameter]
        found = saved["state"].get(name, {})
        found = {**found, **_converted(found, kept, parameter)}
        for which, tensor in kept.items():
            if which in found:
                tensor.copy_(found[which].reshape(tensor.shape))
            else:
                tensor.zero_()


def _converted(found: dict, kept: dict, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What ``kept`` wants of a state of another kind; its master goes into the parameter."""
    made = {}
    for moment, signed in SIGNED.items():
        if moment in found and f"{moment}_codes" in kept:
            values = found[moment].to(parameter.device, FP32).reshape(-1)
            made[f"{moment}_codes"], made[f"{moment}_scales"] = quantize(values, signed)
    if "rest" in found and "rest" in kept:  # it is taken as it is
        return made
    master = _master_in(found, parameter)
    if master is None:
        return made
    if "rest" in kept:
        master, made["rest"] = split(master)
        made["digest"] = digest_of(master)
    parameter.copy_(master.view_as(parameter))
    return made


def _master_in(found: dict, parameter: nn.Parameter) -> torch.Tensor | None:
    """The master, flat, in a state of either kind; None where weights are their own."""
    if "master" in found:
        return found["master"].to(parameter.device).reshape(-1)
    if "rest" not in found:
        return None
    flat = parameter.detach().reshape(-1)
    weight = flat.bfloat16()  # a model in fp32 has loaded these
    rest = found["rest"].to(flat.device).reshape(-1)
    master = master_of(weight, rest, found["digest"].to(flat.device))
    return torch.where(weight == flat, master, flat)


def in_fp32(saved: dict, parameters: Iterable[nn.Parameter]) -> dict:
    """A state dict of this format as one with moments in fp32; the weights are there already."""
    names = []
    for group in saved["param_groups"]:
        names += group["params"]
    state = dict(saved["state"])
    for name, parameter in zip(names, parameters, strict=True):
        if name in state:
            state[name] = _in_fp32(state[name], parameter)
    return {**saved, "state": state}


def _in_fp32(found: dict, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    made = dict(found)
    for moment, signed in SIGNED.items():
        if f"{moment}_codes" in found:
            codes = found[f"{moment}_codes"].reshape(-1)
            values = dequantize(codes, found[f"{moment}_scales"], signed)
            made[moment] = values.view(parameter.shape)
    master = _master_in(found, parameter)
    if master is not None:
        made["master"] = master.view(parameter.shape)
    return made
