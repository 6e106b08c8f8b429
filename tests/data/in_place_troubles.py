"""The troubles of ``in_place_training.py``: calls that are refused, counts, exceptions, threads."""

import gc
import importlib.util
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import peer_memory
import torch
import torch.distributed as dist
from in_place_loops import evaluate, train
from in_place_models import (
    BLOCKS,
    DEVICE,
    FP32,
    PLAIN,
    POLICIES,
    SLOTS,
    WIDTH,
    Block,
    Counted,
    Model,
    in_place,
    loss_of,
    shard,
    step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim.optimizer import register_optimizer_step_post_hook

from overlap_recipes.fsdp2 import (
    in_place_gather,
    in_place_reduce,
    shared_slots,
    use_peer_copies,
)
from overlap_recipes.fsdp2 import peer_memory as in_place_peer_memory
from overlap_recipes.fsdp2.peer_memory import param_groups


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


def changed_by_data(model: nn.Module) -> None:
    for p in model.shards:
        p.data.copy_(p.data * 0.5)


def changed_behind_the_gather() -> None:
    """Where PyTorch counts no change, a sample of the shards tells: the error names units."""
    model, _ = in_place(shard(FP32))
    model.shards = list(model.parameters())
    for turn in range(2):
        step(model, turn)
    gathers = param_groups(model)[0].all

    def begun_then_changed() -> None:
        gathers.begin_next_forward()
        changed_by_data(model)
        evaluate(model, torch.no_grad, 2)

    def changed_in_forward() -> None:
        hook = model.blocks[0].register_forward_pre_hook(lambda *_: changed_by_data(model))
        try:
            step(model, 3)
        finally:
            hook.remove()
        step(model, 5)  # a device's notes are read a forward later

    def changed_before_backward() -> None:
        loss = loss_of(model, 4)
        changed_by_data(model)
        loss.backward()
        step(model, 5)

    for way in (begun_then_changed, changed_in_forward, changed_before_backward):
        expect("ran with other weights than its shards have", way)
        model.zero_grad()
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state()
        step(model, 6)


def full_weights_changed_in_forward() -> None:
    """An embedding's ``max_norm`` changes what peers copy."""
    model = Model()
    model.embed.max_norm = 0.5
    model, _ = in_place(shard(PLAIN, model=model, grouped=True))
    expect("Embedding changes its full weights", partial(step, model))


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


def by_one_call() -> None:
    """Gathers and reductions by ``use_peer_copies`` have the bits of stock FSDP2."""
    model, stock = shard(PLAIN), shard(PLAIN)
    copies = use_peer_copies(model, slots=SLOTS)
    for each in (model, stock):
        step(each)
        loss_of(each, 1).backward()
    copies.begin_next_forward()
    assert copies.gathers.gathers and copies.pushed.calls
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(found.grad.to_local(), expected.grad.to_local())
    expect(
        "by use_peer_copies, gather_in_place or reduce_in_place: call it once",
        partial(use_peer_copies, model),
    )


def one_call_refuses_and_changes_nothing() -> None:
    host = SimpleNamespace(nodename=f"host-{dist.get_rank()}")
    several = mock.patch.object(in_place_peer_memory.os, "uname", lambda: host)
    untried = mock.patch.object(torch, "__version__", "2.99.0")
    offloaded = shard(PLAIN, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for model, words, under in (
        (shard(PLAIN), "the ranks are on several hosts", several),
        (shard(PLAIN), "HSDP", several),
        (shard(PLAIN), "nobody has tried peer copies with torch 2.99.0", untried),
        (shard(PLAIN), "set_separate_reduce_scatter_group", untried),
        (offloaded, "offloaded", nullcontext()),
    ):
        before = [type(group) for group in param_groups(model)]
        with under:
            expect(words, partial(use_peer_copies, model))
        assert [type(group) for group in param_groups(model)] == before
    for name in ("reduce_grads", "unshard_in_backward"):  # of reductions, of gathers
        model = shard(PLAIN)
        groups = param_groups(model)
        before = [type(group) for group in groups]
        for group in groups:
            delattr(group, name)
        expect(f"has no ['{name}']", partial(use_peer_copies, model))
        assert [type(group) for group in groups] == before


def two_copies_of_the_library() -> None:
    """As where a job has one of its own, and a package of another brings one."""
    library = Path(in_place_gather.__file__).parents[1]
    spec = importlib.util.spec_from_file_location(
        "second_copy", library / "__init__.py", submodule_search_locations=[str(library)]
    )
    sys.modules["second_copy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["second_copy"])
    second = importlib.import_module("second_copy.fsdp2")
    for first in (in_place_gather.gather_in_place, in_place_reduce.reduce_in_place):
        for then in (second.gather_in_place, second.reduce_in_place, second.use_peer_copies):
            model = shard(PLAIN)
            first(model)
            expect("another copy of this library", partial(then, model))
            step(model)


class ReturnsWeights(Block):
    """Returns a weight of its own beside what it has computed, or a view of it."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.up.weight
        return super().forward(x), weight if self.whole else weight.t()[1:]


class WithWeightsOfBlocks(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        weights = []
        for block in self.blocks:
            x, weight = block(x)
            weights.append(weight)
        return self.output(self.norm(x)).float() + sum(weight.mean() for weight in weights)


def full_weights_returned() -> None:
    """They were another unit's by the time they were used; stock FSDP2 has freed them, an error."""
    for whole in (True, False):
        model = WithWeightsOfBlocks()
        for number in range(len(model.blocks)):
            model.blocks[number] = ReturnsWeights(whole)
        model, _ = in_place(shard(FP32, model=model))
        for grads in (True, False):
            with torch.set_grad_enabled(grads):
                expect("returns its full weights", partial(loss_of, model, 0))


def weights_that_are_no_numbers() -> None:
    """A cast may make another NaN of one: that was taken for a change behind the gather."""
    model, _ = in_place(shard(FP32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(4):
        loss = loss_of(model, turn) * (torch.nan if turn == 1 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of(model, 4).isnan()


TROUBLES = (
    full_weights_returned,
    weights_that_are_no_numbers,
    by_one_call,
    one_call_refuses_and_changes_nothing,
    two_copies_of_the_library,
    trained_by_two_threads,
    called_again,
    evaluated_before_the_call,
    full_inside_another,
    called_while_gathers_are_under_way,
    sums_of_more_ranks,
    called_before_backward,
    collectives_of_their_own,
    lists_of_their_own,
    changed_behind_the_gather,
    full_weights_changed_in_forward,
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
