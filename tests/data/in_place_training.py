"""Train many programs under stock FSDP2 and in place, and compare every bit."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from in_place_models import (  # noqa: E402
    BLOCKS,
    DEVICE,
    POLICIES,
    SLOTS,
    STEPS,
    WIDTH,
    CalledTwice,
    adapted,
    compiled,
    evaluate,
    hybrid,
    loss_of,
    on_meta,
    recomputed,
    shard,
    state,
    tied,
)
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402

from overlap_recipes.fsdp2 import in_place_gather, in_place_reduce  # noqa: E402

MICRO_BATCHES = 3


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, steps=STEPS, start=0, clip=True, set_to_none=True):
    for turn in range(start, start + steps):
        loss = loss_of(model, turn)
        yield loss.detach()
        loss.backward()
        if clip:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def accumulate(model, optimizer, before=lambda model, is_last: None):
    for turn in range(STEPS):
        for micro in range(MICRO_BATCHES):
            is_last = micro == MICRO_BATCHES - 1
            before(model, is_last)
            loss = loss_of(model, MICRO_BATCHES * turn + micro)
            yield loss.detach()
            if is_last:
                update(loss, optimizer)
            else:
                loss.backward()


def reduced_late(model, is_last):
    model.set_requires_gradient_sync(is_last)


def all_reduced_late(model, is_last):
    """As HSDP accumulates: gradients go over the hosts with the last micro-batch alone."""
    model.set_requires_all_reduce(is_last)


def kept_over_microbatches(model, is_last):
    """Full weights stay from one micro-batch to the next."""
    model.set_reshard_after_backward(is_last)


def evaluating(model, optimizer, how):
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


CHANGES = (
    by_state_dict,
    partial(by_state_dict, assign=True),
    by_set_state_dict,
    by_data_copy,
    by_local_fill,
    by_apply,
    by_broadcast,
)


def changing(model, optimizer):
    """Weights change by every road between two steps."""
    for turn, change in enumerate(CHANGES):
        yield from train(model, optimizer, 1, turn)
        change(model)
    yield from train(model, optimizer, 2, len(CHANGES))


def encoder_alone(model, optimizer):
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        for _ in range(2):
            with torch.no_grad():
                yield model.blocks[1](torch.ones(2, WIDTH, device=DEVICE))
            by_local_fill(model)


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


def twice(model, optimizer):
    """Two forwards, one backward; then a graph that is kept for a second backward."""
    for turn in range(STEPS):
        loss = loss_of(model, turn) + loss_of(model, 30 + turn)
        yield loss.detach()
        update(loss, optimizer)


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
        yield [type(p).__name__ for p in model.parameters()]  # shards again
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
        update(loss, optimizer)


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


def all_by_hand(model, optimizer):
    """All full weights at a time, looked at between steps."""
    for turn in range(STEPS):
        yield from train(model, optimizer, 1, turn)
        for block in model.blocks:
            block.unshard()
        for block in model.blocks:
            yield block.up.weight.detach().clone()
            block.reshard()
        model.blocks[0].unshard(async_op=True)


def from_meta(model, optimizer):
    model.fill()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield from train(model, optimizer)


@dataclass
class Program:
    """How a user builds and trains; ``loop`` yields what must be equal."""

    build: Callable[[MixedPrecisionPolicy], nn.Module]
    loop: Callable[[nn.Module, torch.optim.Optimizer], Iterator]
    optimizer: Callable = field(default=partial(torch.optim.AdamW, lr=1e-2, foreach=False))
    policies: tuple[str, ...] = ("fp32",)


EVERY = tuple(POLICIES)
PLAIN = ("plain",)
GROUPED = partial(shard, grouped=True)
ROOTLESS = partial(shard, root=False)
UNCLIPPED = partial(train, clip=False)
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)
PROGRAMS = {
    # models in a plain loop
    "plain": Program(shard, train, policies=EVERY),
    "fused": Program(shard, train, FUSED),
    "kept_gradients": Program(shard, partial(train, set_to_none=False)),
    "tied": Program(tied, train, policies=EVERY),
    "torchtitans_grouping": Program(GROUPED, train, policies=EVERY),
    "no_root": Program(ROOTLESS, UNCLIPPED, policies=PLAIN),
    "lora": Program(adapted, train, policies=EVERY),
    "kept": Program(partial(shard, reshard_after_forward=False), train),
    "reshard_to_int": Program(partial(shard, reshard_after_forward=2), train),
    "checkpoint": Program(partial(recomputed, use_reentrant=False), train),
    "checkpoint_reentrant": Program(partial(recomputed, use_reentrant=True), train),
    "hsdp": Program(hybrid, train, policies=EVERY),
    "compiled_blocks": Program(compiled, train),
    "called_twice": Program(lambda policy: shard(policy, model=CalledTwice()), train),
    "from_meta": Program(on_meta, from_meta),
    # gradients
    "accumulation": Program(shard, accumulate, policies=EVERY),
    "accumulation_without_sync": Program(shard, partial(accumulate, before=reduced_late)),
    "accumulation_hsdp": Program(hybrid, partial(accumulate, before=all_reduced_late)),
    "accumulation_of_kept_weights": Program(
        partial(shard, reshard_after_forward=False),
        partial(accumulate, before=kept_over_microbatches),
    ),
    "sum_not_mean": Program(shard, partial(divided, factor=1.0), policies=EVERY),
    "optimizer_in_backward": Program(shard, in_backward),
    "two_forwards": Program(shard, twice),
    "raising": Program(shard, raising),
    # weights that change, and gathers that were begun
    "changing": Program(shard, changing),
    "ema": Program(GROUPED, averaging),
    "evaluation_between": Program(shard, evaluation_between),
    "freezing": Program(shard, freezing),
    "begun_early": Program(GROUPED, begun_early),
    # units that run in another order, or alone
    "evaluation": Program(shard, partial(evaluating, how=torch.no_grad)),
    "inference_mode": Program(GROUPED, partial(evaluating, how=torch.inference_mode)),
    "encoder_alone": Program(GROUPED, encoder_alone),
    "dropping_layers": Program(shard, dropping_layers),
    "all_by_hand": Program(shard, all_by_hand),
}


FLOAT32 = "fp32"
IN_EVERY_POLICY = ("plain", "accumulation", "lora", "sum_not_mean")  # of every run


def run(program: Program, policy, ours: bool) -> list:
    model = program.build(policy)
    if ours:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            copies = in_place_gather.gather_in_place(model, slots=SLOTS)
            pushed = in_place_reduce.reduce_in_place(model)
        model.copies = copies
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


def main(wanted: list[str], few_policies: bool) -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True)
    dist.init_process_group()
    failures = []
    for name in wanted:
        for policy in PROGRAMS[name].policies:
            if few_policies and policy != FLOAT32 and FLOAT32 in PROGRAMS[name].policies:
                if name not in IN_EVERY_POLICY:
                    continue
            try:
                wrong = compare(name, policy)
            except Exception:
                wrong = traceback.format_exc(limit=-8)
            if wrong:
                failures.append(name)
            if dist.get_rank() == 0 or wrong:
                print(f"{name}, reduce in {policy}: {wrong or 'every bit'}", flush=True)
            dist.barrier()
    dist.destroy_process_group()
    assert not failures, f"these differ: {failures}"


if __name__ == "__main__":
    if sys.argv[1] == "half":
        main([*PROGRAMS][int(sys.argv[2]) :: 2], "few_policies" in sys.argv)
    else:
        main(sys.argv[1].split(","), few_policies=False)
