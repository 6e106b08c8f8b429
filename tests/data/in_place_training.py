"""Train many programs under stock FSDP2 and in place, and compare every bit.

One process a rank runs them all; see ``tests/fsdp2/test_sharding_in_place.py``.
"""

import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes_source" / "sharding"))

import peer_memory  # noqa: E402

from overlap_recipes.fsdp2 import in_place_gather, in_place_reduce, shared_slots  # noqa: E402
from overlap_recipes.fsdp2.peer_memory import param_groups  # noqa: E402

WIDTH, BLOCKS, STEPS = 10, 4, 3
SLOTS = 3  # so that units of a model of four blocks take turns
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
NONE = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
PLAIN = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(torch.float16, torch.float16, torch.bfloat16)
POLICIES = {"fp32": FP32, "bf16": BF16, "None": NONE, "plain": PLAIN}


class Block(nn.Module):
    """Uneven rows over two ranks, and a vector."""

    def __init__(self, adapter: torch.dtype | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.adapter = None
        if adapter:
            for p in self.parameters():
                p.requires_grad_(False)
            self.adapter = nn.Linear(WIDTH, WIDTH, bias=False, dtype=adapter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y if self.adapter is None else y + self.adapter(x.to(self.adapter.weight.dtype))


class Model(nn.Module):
    def __init__(self, tied: bool = False, adapter: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block(adapter) for _ in range(BLOCKS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13, bias=False)
        self.recompute = self.depth = self.order = None
        if tied:
            self.output.weight = self.embed.weight

    def chosen(self) -> list[nn.Module]:
        order = range(BLOCKS) if self.order is None else self.order
        return [self.blocks[n] for n in order][: self.depth]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.chosen():
            x = checkpoint(block, x, **self.recompute) if self.recompute else block(x)
        return self.output(self.norm(x)).float()


@dataclass
class Program:
    """How a user builds and trains; ``loop`` yields what must be equal."""

    build: Callable[[MixedPrecisionPolicy], nn.Module]
    loop: Callable[[nn.Module, torch.optim.Optimizer], Iterator]
    optimizer: Callable = field(default=partial(torch.optim.AdamW, lr=1e-2, foreach=False))
    policies: tuple[str, ...] = ("fp32",)
    compiled_sums: bool = False  # as on a GPU


def batch(turn: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * turn + dist.get_rank())
    return torch.randint(13, (3, 5), generator=draw).to(DEVICE)


def loss_of(model: nn.Module, turn: int) -> torch.Tensor:
    ids = batch(turn)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def shard(policy, *, model=None, grouped=False, mesh=None, root=True, sharded=BLOCKS, **options):
    model = model or Model()
    options |= {"mp_policy": policy} | ({"mesh": mesh} if mesh else {})
    for block in model.blocks[:sharded]:
        fully_shard(block, **options)
    if grouped:
        fully_shard(model.embed, **options)
        fully_shard([model.norm, model.output], **options)
    return fully_shard(model, **options) if root else model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        k: v.to_local().clone() if isinstance(v, DTensor) else v.clone()
        for k, v in model.state_dict().items()
    }


def train(model, optimizer, steps=STEPS, start=0, clip=True, set_to_none=True):
    for turn in range(start, start + steps):
        loss = loss_of(model, turn)
        yield loss.detach()
        loss.backward()
        if clip:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def accumulate(model, optimizer, sync: bool):
    for turn in range(STEPS):
        for micro in range(3):
            if not sync:
                model.set_requires_gradient_sync(micro == 2)
            loss = loss_of(model, 3 * turn + micro)
            yield loss.detach()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model, how, turn):
    """Stock FSDP2 cannot train after an inference_mode before its first step: it shall, here."""
    with how() if hasattr(model, "copies") else torch.no_grad():
        return loss_of(model, turn).clone()


def evaluating(model, optimizer, how, before=True):
    if before:
        yield evaluate(model, how, 90)
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        yield evaluate(model, how, 91 + turn)
        yield evaluate(model, how, 95 + turn)


def swap(model, weights):
    with torch.no_grad():
        for p, w in zip(model.shards, weights, strict=True):
            kept = p.to_local().clone()
            p.to_local().copy_(w)
            w.copy_(kept)


def averaging(model, optimizer):
    """An EMA swapped in for an evaluation, and out again."""
    ema = [p.to_local().detach().clone() for p in model.parameters()]
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        with torch.no_grad():
            for e, p in zip(ema, model.shards, strict=True):
                e.lerp_(p.to_local(), 0.5)
        swap(model, ema)
        yield evaluate(model, torch.no_grad, turn)
        swap(model, ema)
        yield evaluate(model, torch.no_grad, turn)


def changing(model, optimizer, change):
    yield from train(model, optimizer, 2)
    change(model)
    yield from train(model, optimizer, 2, 2)


def by_state_dict(model, assign=False):
    model.load_state_dict({k: v + 0.125 for k, v in model.state_dict().items()}, assign=assign)


def by_set_state_dict(model):
    set_model_state_dict(model, {k: v * 1.25 for k, v in get_model_state_dict(model).items()})


def by_data_copy(model):
    for p in model.parameters():
        p.data.copy_(p.data * 0.5)


def by_local_fill(model):
    for p in model.shards:
        p.to_local().detach().mul_(-1.5)


def by_broadcast(model):
    for p in model.parameters():
        if (local := p.to_local().detach()).numel():
            if DEVICE.type == "cpu":
                local.numpy()[:] = 0.01  # no version counter moves
            else:
                local.data.fill_(0.01)


def by_apply(model):
    model._apply(lambda t: t * 0.75)


def no_backward(model, optimizer):
    yield from train(model, optimizer, 1)
    yield loss_of(model, 50).detach()
    model.reshard()
    by_local_fill(model)
    yield loss_of(model, 51).detach()
    model.reshard()
    by_local_fill(model)
    yield from train(model, optimizer, 1, 1)


def by_hand(model, optimizer):
    """Full weights looked at between steps."""
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        for block in model.blocks:
            block.unshard()
            yield block.up.weight.detach().clone()
            block.reshard()
        model.blocks[0].unshard(async_op=True)


def encoder_alone(model, optimizer):
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        for _ in range(2):
            with torch.no_grad():
                yield model.blocks[1](torch.ones(2, WIDTH, device=DEVICE))
            by_local_fill(model)


def early_exit(model, optimizer):
    yield from train(model, optimizer, 1)
    for turn in range(1, STEPS):
        model.depth = 2
        yield evaluate(model, torch.no_grad, 60 + turn)
        model.reshard()
        model.depth = None
        yield from train(model, optimizer, 1, turn)
    model.depth = 2
    yield from train(model, optimizer, 1, 7)


def never_all_at_once(model, optimizer):
    """No root, and the last blocks come into the third step alone."""
    for turn in range(STEPS):
        model.depth = None if turn == STEPS - 1 else 2
        yield from train(model, optimizer, 1, turn, clip=False)


def small_gradients(model, optimizer):
    """Of a size at which float16 rounds coarsely."""
    for turn in range(STEPS):
        (loss_of(model, turn) / 4096).backward()
        yield from [p.grad.to_local().clone() for p in model.shards]
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers(model, optimizer):
    second = torch.optim.SGD(model.blocks[1].parameters(), lr=1e-2, momentum=0.9)
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        loss = loss_of(model, 20 + turn)
        yield loss.detach()
        loss.backward()
        second.step()
        optimizer.zero_grad()


def in_backward(model, optimizer):
    """An optimizer a parameter, stepped as its gradient is there."""
    for p in model.parameters():
        own = torch.optim.SGD([p], lr=1e-2)
        p.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), own.zero_grad()))
    for turn in range(STEPS):
        loss = loss_of(model, turn)
        yield loss.detach()
        loss.backward()


def begin_next(model):
    if getattr(model, "copies", None):
        model.copies.begin_next_forward()


def begun_early(model, optimizer):
    """The next forward's gathers begin behind the update; what comes between is counted."""
    for turn in range(2 * STEPS):
        yield from train(model, optimizer, 1, turn)
        begin_next(model)
        if turn == 1:
            yield evaluate(model, torch.no_grad, 91)
        elif turn == 2:
            by_state_dict(model)
        elif turn == 3:
            model.blocks[0].unshard()
            yield model.blocks[0].up.weight.detach().clone()
            model.blocks[0].reshard()
        elif turn == 4:
            with torch.no_grad():
                yield model.blocks[1](torch.ones(2, WIDTH, device=DEVICE))
            begin_next(model)


def begun_then_assigned(model, optimizer):
    """Shards that no step has changed are exchanged behind the begun gathers."""
    yield from train(model, optimizer, 1)
    for turn in range(STEPS):
        by_state_dict(model, assign=True)
        yield evaluate(model, torch.no_grad, turn)
        begin_next(model)
        by_state_dict(model, assign=True)
        yield evaluate(model, torch.no_grad, turn)
        model._apply(lambda t: t * 0.75)
        yield evaluate(model, torch.no_grad, turn)
        begin_next(model)
        model._apply(lambda t: t * 0.75)
        yield evaluate(model, torch.no_grad, turn)


def begun_too_early(model, optimizer):
    """Begun before the update, whose changes are counted; and inside a step of two forwards."""
    for turn in range(STEPS):
        loss = loss_of(model, turn)
        yield loss.detach()
        begin_next(model)
        other = loss_of(model, 40 + turn)
        loss.backward()
        begin_next(model)
        other.backward()
        begin_next(model)
        optimizer.step()
        optimizer.zero_grad()


def checkpointed_whole(model, optimizer):
    """Recomputed in one piece, all units are full at the same time."""
    for turn in range(STEPS):
        ids = batch(turn)
        logits = checkpoint(model, ids, use_reentrant=False)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        yield loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def kept_gradients(model, optimizer):
    yield from train(model, optimizer, set_to_none=False)


def twice(model, optimizer):
    """Two forwards, one backward; then a graph that is kept for a second backward."""
    for turn in range(STEPS):
        loss = loss_of(model, turn) + loss_of(model, 30 + turn)
        yield loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def divided(model, optimizer, factor):
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(factor)
        if factor != dist.get_world_size():
            module.set_force_sum_reduction_for_comms(True)
    yield from train(model, optimizer, clip=False)


def raising(model, optimizer):
    yield from train(model, optimizer, 1)

    def fail(*_):
        raise MemoryError("of this test")

    hook = model.blocks[2].norm.register_forward_pre_hook(fail)
    try:
        loss_of(model, 1)
    except MemoryError:
        hook.remove()
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        yield from train(model, optimizer, 2, 1)


def evaluation_between(model, optimizer):
    """An average is evaluated between a forward and its backward."""
    average = [p.to_local().detach() * 0.5 for p in model.parameters()]
    for turn in range(STEPS):
        loss = loss_of(model, turn)
        yield loss.detach()
        swap(model, average)
        yield evaluate(model, torch.no_grad, 40 + turn)
        model.reshard()
        swap(model, average)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def kept_over_microbatches(model, optimizer):
    """Full weights stay from one microbatch to the next."""
    for turn in range(STEPS):
        for micro in range(2):
            model.set_reshard_after_backward(micro == 1)
            loss = loss_of(model, 2 * turn + micro)
            yield loss.detach()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def dropping_layers(model, optimizer):
    """Other blocks in another order each step."""
    for turn in range(2 * STEPS):
        draw = torch.Generator().manual_seed(turn)
        model.order = torch.randperm(BLOCKS, generator=draw)[: 2 + turn % 3].tolist()
        yield from train(model, optimizer, 1, turn)


def freezing(model, optimizer):
    yield from train(model, optimizer, 1)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    yield from train(model, optimizer, 1, 1)
    for p in model.blocks[0].parameters():
        p.requires_grad_(True)
    yield from train(model, optimizer, 1, 2)


def frozen_when_first_run(model, optimizer):
    """A block that the first forward does not reach is frozen when it first runs."""
    model.depth = 2
    yield from train(model, optimizer, 1, clip=False)
    model.depth = None
    model.blocks[3].requires_grad_(False)
    yield from train(model, optimizer, 1, 1, clip=False)
    model.blocks[3].requires_grad_(True)
    yield from train(model, optimizer, 2, 2)


def all_by_hand(model, optimizer):
    """All full weights at a time, between steps."""
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        for block in model.blocks:
            block.unshard()
        for block in model.blocks:
            yield block.up.weight.detach().clone()
            block.reshard()


def full_before_a_graph(model, optimizer):
    """A unit that was unsharded by hand runs in one graph, then alone in another."""
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        model.blocks[0].unshard()
        loss = loss_of(model, 20 + turn)
        alone = model.blocks[0](torch.ones(2, WIDTH, device=DEVICE)).float().sum()
        loss.backward()
        alone.backward()
        yield from [p.grad.to_local().clone() for p in model.shards]
        optimizer.step()
        optimizer.zero_grad()


def backward_raises(model, optimizer):
    yield from train(model, optimizer, 1)

    def fail(_):
        raise MemoryError("of this test")

    loss = loss_of(model, 1)
    hook = model.blocks[1].register_full_backward_pre_hook(lambda *_: fail(_))
    loss = loss_of(model, 1)
    with suppress(MemoryError):
        loss.backward()
    hook.remove()
    optimizer.zero_grad()
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        yield from train(model, optimizer, 2, 1)


def raises_before_another(model, optimizer):
    """Of two forwards the first one's backward raises; the second one's is stepped with."""
    yield from train(model, optimizer, 1)

    def fail(_):
        raise MemoryError("of this test")

    other = loss_of(model, 1)

    def watch(block, inputs, output):
        output.register_hook(fail)

    hook = model.blocks[1].register_forward_hook(watch)
    loss = loss_of(model, 2)
    hook.remove()
    with suppress(MemoryError):
        loss.backward()
    optimizer.zero_grad()
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        other.backward()
        yield from [p.grad.to_local().clone() for p in model.shards]
        optimizer.step()
        optimizer.zero_grad()
        yield from train(model, optimizer, 1, 3)


def teaching(model, optimizer, local):
    """Weights follow an average of them, updated at the head of the model's forward."""
    average = [p.detach().clone() * 0.5 for p in model.shards]

    def follow(*_):
        with torch.no_grad():
            for p, a in zip(model.shards, average, strict=True):
                (p.to_local() if local else p).lerp_(a.to_local() if local else a, 0.25)

    yield from train(model, optimizer, 1)
    model.register_forward_pre_hook(follow)
    yield from train(model, optimizer, 3, 1)
    yield evaluate(model, torch.no_grad, 9)


def updated_in_forward(model, optimizer):
    """The optimizer steps when the next forward is half way."""
    yield from train(model, optimizer, 2)
    model.blocks[1].register_forward_pre_hook(lambda *_: (optimizer.step(), None)[1])
    for turn in range(2, 5):
        loss = loss_of(model, turn)
        yield loss.detach()
        optimizer.zero_grad()
        loss.backward()


def changed_before_backward(model, optimizer):
    for turn in range(STEPS):
        loss = loss_of(model, turn)
        yield loss.detach()
        with torch.no_grad():
            for p in model.shards:
                p.mul_(0.75)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class CalledTwice(Model):
    """Each block runs twice in a row, the first also at the end."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(block(x))
        return self.output(self.norm(x)).float()


class Complex(nn.Module):
    """Complex weights: FSDP2 reduces them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = partial(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.complex64)
        self.blocks = nn.ModuleList(linear() for _ in range(BLOCKS))
        self.embed = nn.Embedding(13, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).to(torch.complex64)
        for block in self.blocks:
            x = block(x)
        return nn.functional.pad(x.abs(), (0, 13 - WIDTH))


class ReadsEmbedding(Model):
    """The head reads the embedding's weights without sharing the parameter with a module."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(
            self.output(self.norm(x))[..., :WIDTH], self.embed.weight
        ).float()


def reads_embedding(policy):
    model = ReadsEmbedding()
    for unit in (*model.blocks, model.norm, model.output):
        fully_shard(unit, mp_policy=policy)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=True)


def recomputed(policy, **how):
    model = shard(policy)
    model.recompute = how
    return model


def wrapped(policy):
    """Checkpoint inside each unit."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    for n, block in enumerate(model.blocks):
        model.blocks[n] = checkpoint_wrapper(block)
    return shard(policy, model=model)


def compiled(policy, whole):
    model = Model()
    if not whole:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    model = shard(policy, model=model)
    if whole:
        model.compile(backend="aot_eager")
    return model


def adapted(policy, dtype):
    model = Model(adapter=dtype)
    for p in (*model.embed.parameters(), *model.norm.parameters(), *model.output.parameters()):
        p.requires_grad_(False)
    if dtype != torch.float32:
        for block in model.blocks:
            block.norm.to(torch.float64)
            block.norm.to(torch.float32)
            block.up.to(torch.bfloat16), block.down.to(torch.bfloat16)
    return shard(policy, model=model)


def halved(policy):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mp_policy=HALF)
    return fully_shard(model, mp_policy=policy)


def ignoring(policy):
    model = Model()
    ignored = {model.blocks[0].norm.weight, model.norm.bias}
    for p in ignored:
        p.requires_grad_(False)
    return shard(policy, model=model, ignored_params=ignored)


def on_meta(policy):
    with torch.device("meta"):
        model = Model()
    model = shard(policy, model=model)

    def fill():
        model.to_empty(device=DEVICE)
        torch.manual_seed(3)
        for p in model.parameters():
            p.to_local().detach().copy_(torch.randn(p.to_local().shape) / 5)

    model.fill = fill
    return model


def from_meta(model, optimizer):
    model.fill()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield from train(model, optimizer)


def hybrid(policy):
    ranks = dist.get_world_size()
    mesh = init_device_mesh(DEVICE.type, (1, ranks), mesh_dim_names=("replicate", "shard"))
    return shard(policy, mesh=mesh)


def replicated(policy):
    ranks = dist.get_world_size()
    mesh = init_device_mesh(DEVICE.type, (ranks, 1), mesh_dim_names=("replicate", "shard"))
    return shard(policy, mesh=mesh)


def one_kept(policy):
    """The last block is full until its backward; the first one comes again behind it."""
    model = shard(policy)
    model.order = [*range(BLOCKS), 0]
    model.blocks[-1].set_reshard_after_forward(False)
    return model


def tied(policy):
    return shard(policy, model=Model(tied=True))


def tied_in_a_group(policy):
    model = Model(tied=True)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard([model.embed, model.output], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


EVERY = tuple(POLICIES)
NO_GRAD, INFERENCE = torch.no_grad, torch.inference_mode
PROGRAMS = {
    "plain": Program(shard, train, policies=EVERY),
    "compiled_sums": Program(shard, train, policies=("bf16",), compiled_sums=True),
    "fused": Program(shard, train, partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "kept_gradients": Program(shard, kept_gradients),
    "begun_early": Program(shard, begun_early),
    "begun_early_grouped": Program(partial(shard, grouped=True), begun_early),
    "begun_then_assigned": Program(shard, begun_then_assigned),
    "begun_too_early": Program(partial(shard, grouped=True), begun_too_early),
    "tied": Program(tied, train, policies=EVERY),
    "tied_in_a_group": Program(tied_in_a_group, train),
    "torchtitans_grouping": Program(partial(shard, grouped=True), train, policies=EVERY),
    "no_root": Program(partial(shard, root=False), partial(train, clip=False), policies=("plain",)),
    "never_all_at_once": Program(
        partial(shard, root=False),
        never_all_at_once,
        partial(torch.optim.SGD, lr=0.1),
        policies=("plain",),
    ),
    "complex": Program(
        lambda policy: shard(policy, model=Complex()),
        partial(train, clip=False),
        policies=("plain",),
    ),
    "float16": Program(halved, small_gradients),
    "full_before_a_graph": Program(shard, full_before_a_graph),
    "lora": Program(partial(adapted, dtype=torch.float32), train, policies=EVERY),
    "lora_mixed": Program(partial(adapted, dtype=torch.bfloat16), train),
    "ignored": Program(ignoring, partial(train, clip=False), policies=("plain",)),
    "accumulation": Program(shard, partial(accumulate, sync=True), policies=EVERY),
    "accumulation_without_sync": Program(shard, partial(accumulate, sync=False), policies=EVERY),
    "kept": Program(partial(shard, reshard_after_forward=False), train),
    "one_kept": Program(one_kept, train),
    "one_kept_evaluated_first": Program(one_kept, partial(evaluating, how=NO_GRAD)),
    "reshard_to_int": Program(partial(shard, reshard_after_forward=2), train),
    "reshard_to_int_one": Program(partial(shard, reshard_after_forward=1), train),
    "checkpoint": Program(partial(recomputed, use_reentrant=False), train),
    "checkpoint_reentrant": Program(partial(recomputed, use_reentrant=True), train),
    "checkpoint_whole": Program(partial(shard, grouped=True), checkpointed_whole),
    "checkpoint_wrapper": Program(wrapped, train),
    "hsdp": Program(hybrid, train, policies=EVERY),
    "replicated": Program(replicated, train),
    "compiled_blocks": Program(partial(compiled, whole=False), train),
    "compiled_whole": Program(partial(compiled, whole=True), train),
    "evaluation": Program(shard, partial(evaluating, how=NO_GRAD)),
    "inference_mode": Program(shard, partial(evaluating, how=INFERENCE)),
    "inference_grouped": Program(partial(shard, grouped=True), partial(evaluating, how=INFERENCE)),
    "ema": Program(partial(shard, grouped=True), averaging),
    "load_state_dict": Program(shard, partial(changing, change=by_state_dict)),
    "load_assign": Program(shard, partial(changing, change=partial(by_state_dict, assign=True))),
    "set_state_dict": Program(shard, partial(changing, change=by_set_state_dict)),
    "data_copy": Program(shard, partial(changing, change=by_data_copy)),
    "local_in_place": Program(shard, partial(changing, change=by_local_fill)),
    "behind_torchs_back": Program(shard, partial(changing, change=by_broadcast)),
    "apply": Program(shard, partial(changing, change=by_apply)),
    "from_meta": Program(on_meta, from_meta),
    "no_backward": Program(partial(shard, grouped=True), no_backward),
    "unshard_by_hand": Program(shard, by_hand),
    "encoder_alone": Program(partial(shard, grouped=True), encoder_alone),
    "early_exit": Program(shard, early_exit),
    "two_optimizers": Program(shard, two_optimizers),
    "optimizer_in_backward": Program(shard, in_backward, policies=EVERY),
    "two_forwards": Program(shard, twice, policies=EVERY),
    "sum_not_mean": Program(shard, partial(divided, factor=1.0), policies=EVERY),
    "raising": Program(shard, raising),
    "evaluation_between": Program(shard, evaluation_between),
    "kept_over_microbatches": Program(
        partial(shard, reshard_after_forward=False), kept_over_microbatches
    ),
    "dropping_layers": Program(shard, dropping_layers),
    "freezing": Program(shard, freezing),
    "frozen_when_first_run": Program(shard, frozen_when_first_run),
    "all_by_hand": Program(shard, all_by_hand),
    "backward_raises": Program(shard, backward_raises),
    "raises_before_another": Program(shard, raises_before_another),
    "teaching": Program(shard, partial(teaching, local=False)),
    "teaching_shards": Program(shard, partial(teaching, local=True)),
    "updated_in_forward": Program(shard, updated_in_forward),
    "updated_in_forward_fused": Program(
        shard, updated_in_forward, partial(torch.optim.AdamW, lr=1e-2, fused=True)
    ),
    "changed_before_backward": Program(shard, changed_before_backward),
    "called_twice": Program(lambda policy: shard(policy, model=CalledTwice()), train),
    "reads_embedding": Program(reads_embedding, train),
    "reads_embedding_between": Program(reads_embedding, evaluation_between),
}


class Counted:
    """A collective of the user's own."""

    calls = 0

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False) -> None:
        type(self).calls += 1
        if output_tensor.numel() > input_tensor.numel():
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        else:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)


def in_place(model: nn.Module, collectives: str = "") -> tuple[nn.Module, list[str]]:
    """``model`` in place, and what was warned of."""
    for unit in model.blocks if collectives else ():
        getattr(unit, collectives)(Counted())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        in_place_gather.gather_in_place(model, slots=SLOTS)
        in_place_reduce.reduce_in_place(model)
    return model, [str(w.message) for w in warned]


def step(model: nn.Module, turn: int = 0) -> None:
    loss_of(model, turn).backward()
    model.zero_grad()


def expect(words: str, what: Callable[[], object]) -> None:
    try:
        what()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error of {words}")


def called_before_backward() -> None:
    model = shard(FP32)
    loss = loss_of(model, 0)
    in_place(model)
    expect("call it between steps", loss.backward)


def collectives_of_their_own() -> None:
    """Those of before the call are called, those of later an error."""
    for setter in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        Counted.calls = 0
        model, warned = in_place(shard(FP32), setter)
        assert any(setter in words for words in warned), warned
        step(model)
        assert Counted.calls, setter
        model, warned = in_place(shard(FP32))
        assert not warned
        expect("set it before", partial(getattr(model.blocks[0], setter), Counted()))


def lists_of_their_own() -> None:
    model = shard(FP32)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[3]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])
    in_place(model)
    step(model)
    states = [block._get_fsdp_state() for block in model.blocks]
    assert states[0]._states_to_forward_prefetch == [states[3]]
    assert states[1]._states_to_forward_prefetch == states[2:]
    assert states[2]._states_to_backward_prefetch == [states[0]]
    assert states[3]._states_to_backward_prefetch == [states[2]]
    step(model, 1)


def begun_with_the_forward() -> None:
    """Since the second step the first units are on their way when forward begins; none comes twice.

    An embedding alone comes first, and behind its kernels the next two.
    """
    for grouped, begun in ((True, [1, 3]), (False, [2, 3])):
        model, _ = in_place(shard(FP32, grouped=grouped))
        units = param_groups(model)
        gathers, seen = units[0].all, []
        for module in (model, model.blocks[0]):
            module.register_forward_pre_hook(lambda *_, g=gathers, s=seen: s.append(g.gathers))
        step(model)
        before = gathers.gathers
        with torch.no_grad():
            loss_of(model, 1)
        assert [count - before for count in seen[2:]] == begun, (grouped, before, seen)
        assert gathers.gathers - before == len(units), (grouped, gathers.gathers - before)


def begun_before_the_forward() -> None:
    """What was begun behind an update is there when forward begins, and comes once."""
    for grouped, begun in ((True, 3), (False, 2)):
        model, _ = in_place(shard(FP32, grouped=grouped))
        units = param_groups(model)
        gathers = units[0].all
        step(model)
        before = gathers.gathers
        gathers.begin_next_forward()
        assert gathers.gathers - before == begun
        with torch.no_grad():
            loss_of(model, 1)
        assert gathers.gathers - before == len(units), gathers.gathers - before


def slots_as_many_as_asked() -> None:
    """Equal units take turns in so many slots; the last ones of a forward are kept."""
    for slots in (1, 4, 5):
        model = shard(FP32)
        gathers = in_place_gather.gather_in_place(model, slots=slots)
        step(model)
        blocks = [block._get_fsdp_state()._fsdp_param_group.slot for block in model.blocks]
        assert len(set(blocks)) == min(BLOCKS, max(slots, 3)), (slots, len(set(blocks)))
        before = gathers.gathers
        step(model, 1)
        gathered = {1: 5 + 1, 4: 5 + 0, 5: 5 + 0}[slots]
        assert gathers.gathers - before == gathered, (slots, gathers.gathers - before)


def slots_of_gradients_come_once() -> None:
    """The first gradients' slots are large enough for those of the largest unit."""
    model, _ = in_place(shard(FP32, grouped=True))
    step(model)
    pushed = model.blocks[0]._get_fsdp_state()._fsdp_param_group.pushed
    assert pushed.retired == [[]], "slots were made anew"


def a_step_that_was_skipped() -> None:
    """Behind an exception in backward the error names what to call."""
    model, _ = in_place(shard(FP32))
    step(model)

    def fail(*_: object) -> None:
        raise MemoryError("of this test")

    hook = model.blocks[1].register_full_backward_pre_hook(fail)
    with suppress(MemoryError):
        step(model, 1)
    hook.remove()
    expect("reset_iter_state", lambda: [block.unshard() for block in model.blocks])
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        step(model, 2)


def a_hook_that_raises_on_one_rank() -> None:
    """Behind a unit's pushes: the slots' turns stay those of the other ranks."""
    model, _ = in_place(shard(PLAIN))
    step(model)

    def fail(_: object) -> None:
        if dist.get_rank() == 0:
            raise MemoryError("of this test")

    hook = model.blocks[0].up.weight.register_post_accumulate_grad_hook(fail)
    with suppress(MemoryError):  # the root, whose pushes come last, has pushed
        step(model, 1)
    hook.remove()
    if hasattr(model, "reset_iter_state"):
        model.zero_grad()
        model.reset_iter_state()
        stock = shard(PLAIN)
        for each in (model, stock):
            loss_of(each, 2).backward()
        for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
            assert torch.equal(found.grad.to_local(), expected.grad.to_local())


def moved_behind_a_graph() -> None:
    """A unit that moves while another graph has views of it: autograd says so."""
    model, _ = in_place(shard(FP32))
    step(model)
    loss, other = loss_of(model, 1), loss_of(model, 2)
    loss.backward()
    for block in model.blocks:
        block.unshard()
    for block in model.blocks:
        block.reshard()
    expect("modified by an inplace operation", other.backward)


def a_graph_of_backward() -> None:
    """Weights that backward has released are another unit's: no penalty on gradients reads them."""
    model, _ = in_place(shard(PLAIN))
    step(model)
    expect("create_graph", lambda: loss_of(model, 1).backward(create_graph=True))
    model, _ = in_place(shard(PLAIN, reshard_after_forward=False))
    model.set_reshard_after_backward(False)
    loss_of(model, 1).backward(create_graph=True)


def steps_of_others() -> None:
    """The call leaves the counters of other models alone, and its own model can be let go."""
    gc.collect()  # what earlier programs left
    before = len(shared_slots.counted())
    model, _ = in_place(shard(FP32))
    alone, other = shard(FP32), nn.Linear(2, 2)
    for weights, counts in ((model, True), (alone, False), (other, False)):
        optimizer = torch.optim.AdamW(weights.parameters(), fused=True)
        for p in weights.parameters():
            p.grad = torch.zeros_like(p)
        versions = [p._version for p in weights.parameters()]
        optimizer.step()
        changed = [p._version != v for p, v in zip(weights.parameters(), versions, strict=True)]
        assert all(changed) if counts else not any(changed), changed
        optimizer.zero_grad()
    sparse = nn.Parameter(torch.eye(3).to_sparse())  # has no storage
    sparse.grad = torch.eye(3).to_sparse()
    torch.optim.SGD([sparse], lr=0.1).step()
    del model, weights, optimizer, p
    gc.collect()
    assert len(shared_slots.counted()) == before


def freed_in_a_step_of_another() -> None:
    """The garbage collector frees a model while an optimizer calls its hooks."""
    model, _ = in_place(shard(PLAIN))
    step(model)
    gc.collect()
    gc.disable()
    del model
    behind = (lambda *_: gc.collect() and None, lambda *_: None)
    hooks = [register_optimizer_step_post_hook(hook) for hook in behind]
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    try:
        optimizer.step()
    finally:
        gc.enable()
        for hook in hooks:
            hook.remove()


def sums_of_more_ranks() -> None:
    """Beyond two ranks sums have another order than stock's: as near to those in float64."""
    for name, policy in POLICIES.items():
        plain = Model().to(device=DEVICE, dtype=policy.param_dtype or torch.float32)
        loss_of(plain, 0).backward()
        exact = [p.grad.double() for p in plain.parameters()]
        for total in exact:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        errors = []
        for ours in (False, True):
            model = in_place(shard(policy))[0] if ours else shard(policy)
            loss_of(model, 0).backward()
            found = [p.grad.full_tensor().double() for p in model.parameters()]
            off = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
            errors.append((off / sum(total.square().sum() for total in exact)).sqrt().item())
        if dist.get_rank() == 0:
            print(f"reduce in {name}: stock FSDP2 is off by {errors[0]:.1e}, ours {errors[1]:.1e}")
        assert errors[1] <= 2 * errors[0] + 1e-7, errors


def barriers_of_backward() -> None:
    """Gloo gets no Python state of a backward: its threads would drop it as late as at exit."""
    model, _ = in_place(shard(FP32))
    seen: dict[str, set] = {"here": set(), "barrier": set()}

    def look(where: str, *_: object) -> None:
        seen[where].add(torch._C._is_key_in_tls("context"))

    model.blocks[0].register_full_backward_pre_hook(partial(look, "here"))
    barrier = dist.barrier

    def looking(*arguments: object) -> None:
        look("barrier")
        barrier(*arguments)

    step(model)
    with mock.patch.object(dist, "barrier", looking):
        loss = loss_of(model, 1)
        seen["barrier"].clear()  # forward has no such state
        loss.backward()
    assert DEVICE.type != "cpu" or seen == {"here": {True}, "barrier": {False}}, seen


def trained_by_two_threads() -> None:
    """Two models, each in a group of its own: one's barriers do not wait for the other's.

    On rank 0 the first model comes to its barrier first, on the other ranks the second one does.
    """
    turns = (0, 1) if dist.get_rank() == 0 else (1, 0)
    found = {}
    for ours in (False, True):
        groups = [dist.new_group(timeout=timedelta(seconds=15)) for _ in turns]
        meshes = [DeviceMesh.from_group(group, DEVICE.type) for group in groups]
        models = [shard(PLAIN, mesh=mesh) for mesh in meshes]
        models = [in_place(model)[0] if ours else model for model in models]
        for model in models:
            step(model)  # has its slots
        before = threading.active_count()
        first, barrier = threading.Event(), dist.barrier

        def watched(group, *, groups=groups, first=first, barrier=barrier) -> None:
            if group == groups[turns[0]]:
                first.set()
            barrier(group)

        def train_one(number: int, *, models=models, ours=ours, first=first) -> None:
            if ours and DEVICE.type == "cpu" and number == turns[1]:
                assert first.wait(60), "the other model came to no barrier"
            optimizer = torch.optim.SGD(models[number].parameters(), lr=0.1)
            found[ours, number] = [*train(models[number], optimizer, clip=False)]

        with mock.patch.object(dist, "barrier", watched), ThreadPoolExecutor(2) as threads:
            results = [threads.submit(train_one, number) for number in turns]
        errors = [error for result in results if (error := result.exception())]
        assert not errors, f"one model waited for the other's barrier: {errors}"
        assert threading.active_count() == before, threading.enumerate()
    for number in turns:
        assert peer_memory.same(found[True, number], found[False, number])


def called_again() -> None:
    """An error leaves a model as it was; so it does if another model has one of its units."""
    model, stock = in_place(shard(PLAIN))[0], shard(PLAIN)
    other = Model()
    other.blocks[3] = model.blocks[3]
    other = shard(PLAIN, model=other, sharded=3)
    for again in (model, other):
        before = [vars(group) | {"class": type(group)} for group in param_groups(again)]
        for call in (in_place_gather.gather_in_place, in_place_reduce.reduce_in_place):
            expect("call it once", partial(call, again))
        after = [vars(group) | {"class": type(group)} for group in param_groups(again)]
        assert before == after, "the error came behind a change"
    for each in (model, stock):
        step(each)
        loss_of(each, 1).backward()
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(found.grad.to_local(), expected.grad.to_local())


def evaluated_before_the_call() -> None:
    """Stock FSDP2 keeps the order of an evaluation, and prefetches by it units that never ran."""
    models = shard(PLAIN), shard(PLAIN)
    for model, ours in zip(models, (False, True), strict=True):
        evaluate(model, torch.no_grad, 90)
        model.reshard()
        if ours:
            in_place(model)
        model.blocks[0](torch.ones(2, WIDTH, device=DEVICE)).square().sum().backward()
    for found, expected in zip(*(model.blocks[0].parameters() for model in models), strict=True):
        assert torch.equal(found.grad.to_local(), expected.grad.to_local())


def full_inside_another() -> None:
    """A unit runs again inside the one that has taken its slot: the error names what to call."""
    for slots in (SLOTS, BLOCKS):
        model = Model()
        inner, outer = model.blocks[0], model.blocks[-1]
        shard(PLAIN, model=model)
        in_place_gather.gather_in_place(model, slots=slots)
        outer.norm.register_forward_pre_hook(lambda _, inputs, inner=inner: (inner(*inputs),))
        if slots == SLOTS:
            expect("with more `slots`", partial(step, model))
        else:
            step(model)


def called_while_gathers_are_under_way() -> None:
    """Stock gathers that nobody has waited for when the calls come."""
    for before in (False, True):
        model = shard(PLAIN, grouped=True)
        if before:
            step(model)
        for block in model.blocks:
            block.unshard(async_op=True)
        in_place(model)
        step(model)


class Switch(torch.autograd.Function):
    """Enters or leaves a stream; so does its backward, for on a CPU autograd knows no streams.

    Where a branch begins and ends, whoever goes on waits for what comes in.
    """

    @staticmethod
    def forward(ctx, x, stream, enters: bool, edge: bool):
        ctx.told = stream, enters, edge
        Switch.change(stream, enters, edge and enters)  # the model itself waits behind a branch
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        stream, enters, edge = ctx.told
        Switch.change(stream, not enters, edge)
        return gradient, None, None, None

    @staticmethod
    def change(stream, enters: bool, waits: bool) -> None:
        if enters:
            if waits:
                stream.wait_stream(torch.cpu.current_stream())
            stream.__enter__()
        else:
            stream.__exit__(None, None, None)
            if waits:
                torch.cpu.current_stream().wait_stream(stream)


class Towers(Model):
    """Branches of blocks, each on a stream of its own; the head waits for all of them."""

    def __init__(self, towers: Sequence[int]) -> None:
        super().__init__()
        self.towers, self.streams = towers, [torch.cpu.Stream() for _ in set(towers)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        xs = [self.embed(ids)] * len(self.streams)
        for number, (tower, block) in enumerate(zip(self.towers, self.blocks, strict=True)):
            begins, ends = (
                tower not in t for t in (self.towers[:number], self.towers[number + 1 :])
            )
            x = Switch.apply(xs[tower], self.streams[tower], True, begins)
            xs[tower] = Switch.apply(block(x), self.streams[tower], False, ends)
        for stream in self.streams:
            torch.cpu.current_stream().wait_stream(stream)
        return self.output(self.norm(sum(xs))).float()


def others_push(reduce: Callable) -> Callable:
    """Behind a barrier of gradients other ranks may write to the next slot: tell the recorder."""

    def reducing(pushed, *arguments: object) -> None:
        reduce(pushed, *arguments)
        slot = pushed.slots[pushed.calls % in_place_reduce.SLOTS][dist.get_rank()]
        recorder = pushed.stream.recorder
        pushed.stream.launch(recorder.this_thread())
        recorder.access("push", slot, True, pushed.stream, "another rank")

    return reducing


def branches(ours: bool) -> None:
    """Parts of a model compute on streams of their own, in any order of the host."""
    pushes = others_push(in_place_reduce.PushedGradients.reduce)
    for towers in ((0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0)):
        model = shard(PLAIN, model=Towers(towers), grouped=True)
        model = in_place(model)[0] if ours else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.object(in_place_reduce.PushedGradients, "reduce", pushes):
            for turn in range(4):
                loss_of(model, turn).backward()
                if turn % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        torch.cpu.synchronize()  # before the model goes


def evaluation_beside(ours: bool) -> None:
    """Another stream still evaluates while training goes on."""
    model = shard(PLAIN, grouped=True)
    for unit in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
        unit.set_modules_to_backward_prefetch([unit])  # stock's own prefetch fails on a CPU
    model = in_place(model)[0] if ours else model
    optimizer, side = torch.optim.SGD(model.parameters(), lr=0.1), torch.cpu.Stream()
    for turn in range(STEPS):
        step(model, turn)
        optimizer.step()
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side), torch.no_grad():
            loss_of(model, 90 + turn)


ON_STREAMS = {  # for the recorder of stream order
    f"{program.__name__} {'in place' if ours else 'under stock'}": partial(program, ours)
    for program in (branches, evaluation_beside)
    for ours in (False, True)
}
TROUBLES = (
    trained_by_two_threads,
    called_again,
    evaluated_before_the_call,
    full_inside_another,
    called_while_gathers_are_under_way,
    sums_of_more_ranks,
    called_before_backward,
    collectives_of_their_own,
    lists_of_their_own,
    begun_with_the_forward,
    begun_before_the_forward,
    slots_as_many_as_asked,
    slots_of_gradients_come_once,
    barriers_of_backward,
    a_step_that_was_skipped,
    a_hook_that_raises_on_one_rank,
    moved_behind_a_graph,
    a_graph_of_backward,
    steps_of_others,
    freed_in_a_step_of_another,
)


def run(program: Program, policy, ours: bool) -> list:
    model = program.build(policy)
    if ours:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            copies = in_place_gather.gather_in_place(model, slots=SLOTS)
            pushed = in_place_reduce.reduce_in_place(model)
        model.copies = copies
        if program.compiled_sums and pushed is not None:
            pushed.average = torch.compile(in_place_reduce.average, dynamic=True)
        reasons = [str(w.message) for w in warned if "communicates as before" in str(w.message)]
        assert (copies is None) == bool(reasons), "a fall back must say why"
    torch.manual_seed(1)
    model.shards = list(model.parameters())  # as an optimizer holds them
    optimizer = program.optimizer([p for p in model.parameters() if p.requires_grad])
    found = list(program.loop(model, optimizer))
    if ours and copies is not None:
        assert copies.gathers, "nothing was gathered by copies"
        if pushed is not None:
            assert pushed.calls, "nothing was pushed"
            # what a backward that raised has begun is ended by reset_iter_state, which 2.11 lacks
            assert not pushed.waiting or not hasattr(model, "reset_iter_state")
    return [*found, *state(model).values(), len(found)]


def compare(name: str, policy: str) -> str | None:
    expected, found = (run(PROGRAMS[name], POLICIES[policy], way) for way in (False, True))
    if len(expected) != len(found):
        return f"{len(found)} values instead of {len(expected)}"
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        same = torch.equal(a, b) if torch.is_tensor(a) else a == b
        if not same or (torch.is_tensor(a) and a.isnan().any()):
            return f"value {number} of {len(expected)} differs: {a} {b}"[:600]
    return None


def main() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True)
    dist.init_process_group()
    troubles = {trouble.__name__: trouble for trouble in TROUBLES}
    known = [*PROGRAMS, *troubles]
    troubles |= ON_STREAMS
    wanted = sys.argv[1].split(",") if len(sys.argv) > 1 else known
    if wanted == ["half"]:
        wanted = known[int(sys.argv[2]) :: 2]
    failures = 0
    runs = [(n, p) for n in wanted for p in (PROGRAMS[n].policies if n in PROGRAMS else ("fp32",))]
    for name, policy in runs:
        try:
            wrong = compare(name, policy) if name in PROGRAMS else troubles[name]()
        except Exception:
            wrong = traceback.format_exc(limit=-8)
        failures += wrong is not None
        if dist.get_rank() == 0 or wrong:
            print(f"{name}, reduce in {policy}: {wrong or 'every bit'}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    assert not failures, f"{failures} programs differ"


if __name__ == "__main__":
    main()
