# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/eight_bit_kernel.py
"""The update of ``eight_bit`` as one kernel in Triton: each element is read and written once.

PyTorch's operators pass over the memory of the device many times for the same.
"""

import math

import torch
import triton
import triton.language as tl

_ROWS = 4  # blocks of 256 elements that a program of the kernel updates


@triton.jit
def _correction(steps, log_beta):
    """1 - beta ** steps, exact where it is small."""
    x = steps * log_beta
    series = 1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * series)))
    return tl.where(x > -0.5, -series, 1 - tl.exp(x))


@triton.jit
def _digest(bits, power):
    """Of the 16 bits of each weight, a block a row."""
    return tl.sum(bits.to(tl.int64) * power[None, :], axis=1)


@triton.jit
def _codes(values, scales, limits):
    """How many of the 255 limits are no larger than a value, divided by its block's scale."""
    scaled = tl.div_rn(values, tl.broadcast_to(scales[:, None], values.shape))
    codes = tl.zeros_like(values).to(tl.int32)
    step = 128
    for _ in tl.static_range(8):
        is_above = tl.load(limits + codes + step - 1) > scaled
        codes = tl.where(is_above, codes, codes + step)
        step = step // 2
    return codes.to(tl.uint8)


@triton.jit
def _update(
    weight, rest, digest, gradient,
    codes1, scales1, codes2, scales2,
    book1, limits1, book2, limits2, powers,
    count, scale, skip,
    blocks, lr, decay, eps, beta1, less1, log1, beta2, less2, log2,  # less: 1 - beta
    HAS_REST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    blocks = tl.where(tl.load(skip) == 0, blocks, 0)
    is_row = rows < blocks
    here = rows.to(tl.int64)[:, None] * BLOCK + columns[None, :]
    is_here = here < blocks.to(tl.int64) * BLOCK

    if HAS_REST:
        power = tl.load(powers + columns)
        bits = tl.load(weight + here, is_here, 0)
        is_same = _digest(bits, power) == tl.load(digest + rows, is_row, 0)
        low = tl.load(rest + here, is_here, 0).to(tl.int32)
        low = tl.where(is_same[:, None], low, 0)
        master = ((bits.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        master = tl.load(weight + here, is_here, 0.0)

    g = tl.load(gradient + here, is_here, 0.0).to(tl.float32) * tl.load(scale)
    old1 = tl.load(scales1 + rows, is_row, 0.0)
    old2 = tl.load(scales2 + rows, is_row, 0.0)
    m = tl.load(book1 + tl.load(codes1 + here, is_here, 0).to(tl.int32)) * old1[:, None]
    v = tl.load(book2 + tl.load(codes2 + here, is_here, 0).to(tl.int32)) * old2[:, None]

    steps = tl.load(count)
    master -= decay * master
    m = beta1 * m + less1 * g
    v = beta2 * v + less2 * g * g
    root = tl.sqrt_rn(tl.zeros_like(v) + _correction(steps, log2))
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    master -= (lr / _correction(steps, log1)) * tl.div_rn(m, denominator)

    new1 = tl.maximum(tl.max(tl.abs(m), axis=1), 1e-12)
    new2 = tl.maximum(tl.max(tl.abs(v), axis=1), 1e-12)
    tl.store(scales1 + rows, new1, is_row)
    tl.store(scales2 + rows, new2, is_row)
    tl.store(codes1 + here, _codes(m, new1, limits1), is_here)
    tl.store(codes2 + here, _codes(v, new2, limits2), is_here)
    if HAS_REST:
        whole = tl.where(master != master, 0x7FC00000, master.to(tl.int32, bitcast=True))
        upper = (whole + 0x8000) >> 16
        tl.store(weight + here, upper.to(tl.int16), is_here)
        tl.store(rest + here, (whole - (upper << 16)).to(tl.int16), is_here)
        tl.store(digest + rows, _digest(upper.to(tl.int16), power), is_row)
    else:
        tl.store(weight + here, master, is_here)


def _log(beta: float) -> float:
    """Of what may be 0."""
    return math.log(beta) if beta else -math.inf


def update_by_kernel(
    settings: dict, piece: dict, gradient, step, scale, skip, tables: dict
) -> None:
    """``eight_bit.update`` of a piece whose moments have 8 bits.

    Args:
        tables: code books and limits of both moments by name, and the powers of digests.
    """
    weight = piece["weight"]
    has_rest = "rest" in piece
    if has_rest:
        weight = weight.view(torch.int16)
    blocks = piece["exp_avg_scales"].numel()
    beta1, beta2 = settings["betas"]
    lr = float(settings["lr"])
    with torch.cuda.device_of(gradient):  # Triton launches on the present device
        _update[(triton.cdiv(blocks, _ROWS),)](
            weight,
            piece.get("rest", weight),
            piece.get("digest", weight),
            gradient,
            piece["exp_avg_codes"],
            piece["exp_avg_scales"],
            piece["exp_avg_sq_codes"],
            piece["exp_avg_sq_scales"],
            *tables["exp_avg"],
            *tables["exp_avg_sq"],
            tables["powers"],
            step,
            scale,
            skip,
            blocks,
            lr,
            lr * settings["weight_decay"],
            settings["eps"],
            beta1,
            1 - beta1,
            _log(beta1),
            beta2,
            1 - beta2,
            _log(beta2),
            HAS_REST=has_rest,
            ROWS=_ROWS,
            BLOCK=weight.numel() // blocks,
        )
