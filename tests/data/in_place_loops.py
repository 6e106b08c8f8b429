"""The loops of ``in_place_training.py``: each trains a model and yields what must be equal."""

from contextlib import suppress

import torch
import torch.distributed as dist
from in_place_models import BLOCKS, DEVICE, STEPS, WIDTH, batch, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint


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
        yield [type(p).__name__ for p in model.parameters()]  # shards again
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


def from_meta(model, optimizer):
    model.fill()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield from train(model, optimizer)
