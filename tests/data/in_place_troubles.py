"""Users' troubles in place: calls that are refused, counts, exceptions, and gradients held.

Arguments: names of troubles, or none for those of two ranks. See
``tests/fsdp2/test_sharding_in_place.py``.
"""

import gc
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from in_place_models import (  # noqa: E402
    BLOCKS,
    DEVICE,
    FP32,
    PLAIN,
    POLICIES,
    SLOTS,
    WIDTH,
    Block,
    Model,
    evaluate,
    hybrid,
    in_place,
    loss_of,
    shard,
    step,
)
from torch import nn  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard  # noqa: E402

from overlap_recipes.fsdp2 import (  # noqa: E402
    faster_way,
    in_place_gather,
    in_place_reduce,
    peer_memory,
    shared_slots,
    use_peer_copies,
)
from overlap_recipes.fsdp2.peer_copies import PeerCopies  # noqa: E402
from overlap_recipes.fsdp2.peer_memory import param_groups  # noqa: E402

MICRO_BATCHES = 3
UNUSED = "set_reduce_scatter_unused_params"


def expect(words: str, what: Callable[[], object]) -> None:
    try:
        what()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error of {words}")


def same_gradients(model: nn.Module, stock: nn.Module) -> None:
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(found.grad.to_local(), expected.grad.to_local())


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
    model = in_place(shard(FP32))
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
    model = in_place(shard(PLAIN, model=model, grouped=True))
    expect("Embedding changes its full weights", partial(step, model))


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


def collectives_of_their_own() -> None:
    """Those of before the call are called, and a warning says so; those of later are an error."""
    for setter in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        Counted.calls = 0
        model = shard(FP32)
        for unit in model.blocks:
            getattr(unit, setter)(Counted())
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            in_place(model)
        assert any(setter in str(w.message) for w in warned), warned
        step(model)
        assert Counted.calls, setter
        model = in_place(shard(FP32))
        expect("set it before", partial(getattr(model.blocks[0], setter), Counted()))


def begun_before_the_forward() -> None:
    """What was begun behind an update is there when forward begins, and comes once."""
    for grouped, begun in ((True, 3), (False, 2)):
        model = in_place(shard(FP32, grouped=grouped))
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


def a_step_that_was_skipped() -> None:
    """Behind an exception in backward the error names what to call."""
    model = in_place(shard(FP32))
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
    model = in_place(shard(PLAIN))
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
    model = in_place(shard(FP32))
    step(model)
    loss, other = loss_of(model, 1), loss_of(model, 2)
    loss.backward()
    for block in model.blocks:
        block.unshard()
    for block in model.blocks:
        block.reshard()
    expect("modified by an inplace operation", other.backward)


def penalty_of(model: nn.Module, kind: str) -> torch.Tensor:
    """A loss on gradients, as WGAN-GP's (torchebm#244)."""
    x = torch.linspace(-1, 1, 3 * WIDTH, device=DEVICE).view(3, WIDTH).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    loss = slope.square().mean()
    if kind == "and a loss":
        loss = loss + out.mean()
    if kind == "and a loss of another forward":
        loss = loss + model(torch.zeros_like(x)).mean()
    return loss


def penalties_on_gradients() -> None:
    """Refused where backward has released weights; done as the refusal says, they are right."""

    def sharded() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        whole = nn.Sequential(first, *(nn.Linear(WIDTH, WIDTH) for _ in range(2))).to(DEVICE)
        model = deepcopy(whole)
        for unit in (*model, model):
            fully_shard(unit)
        use_peer_copies(model, slots=8)
        return whole, model

    for kind in ("", "and a loss", "and a loss of another forward"):
        _, model = sharded()
        for words in ("set_reshard_after_backward(False)", "reshard()"):
            expect(words, partial(penalty_of, model, kind))
        whole, model = sharded()
        model.set_reshard_after_backward(False)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
        for _ in range(2):
            for each, optimizer in zip((whole, model), optimizers, strict=True):
                optimizer.zero_grad()
                penalty_of(each, kind).backward()
            for unit in (*model, model):
                unit.reshard()
            for found, due in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), due.grad)
            for optimizer in optimizers:
                optimizer.step()


def the_faster_way_is_kept() -> None:
    """Every bit of stock FSDP2 before, between and after the exchanges, on all ranks alike."""
    for faster in ("peer copies", "FSDP2"):
        with mock.patch.multiple(faster_way, WARM=1, TIMED=2):
            expected, *_ = steps_of_both_ways(faster=None)
            found, model, copies = steps_of_both_ways(faster)
        for number, (ours, stock) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, stock), (faster, number)
        assert copies.gathers.in_use == (faster == "peer copies"), faster
        for group in copies.gathers.groups:
            assert isinstance(group, in_place_gather.InPlaceGather) == copies.gathers.in_use
        assert bool(copies.gathers.slots) == bool(copies.pushed.slots) == copies.gathers.in_use
        first = model.blocks[0]._get_fsdp_state()
        assert bool(first._states_to_forward_prefetch) == copies.gathers.in_use, "not FSDP2's own"


def steps_of_both_ways(faster: str | None) -> tuple[list, nn.Module, PeerCopies | None]:
    """Losses and shards of 16 steps of two micro-batches; the last rank alone sees a difference."""
    model = shard(FP32)
    copies = use_peer_copies(model, SLOTS) if faster else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    clock = [0.0]

    def now(way: faster_way.FasterWay) -> float:
        present = "peer copies" if way.gathers.in_use else "FSDP2"
        last = dist.get_rank() == dist.get_world_size() - 1
        clock[0] += 2.0 if last and present != faster else 1.0
        return clock[0]

    found = []
    with mock.patch.object(faster_way.FasterWay, "now", now):
        for turn in range(16):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = loss_of(model, 2 * turn + micro)
                loss.backward()
                found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if copies and turn % 2:
                copies.begin_next_forward()
            if turn % 5 == 0:
                with torch.no_grad():
                    found.append(loss_of(model, turn))
                model.reshard()
    found += [p.to_local().clone() for p in model.parameters()]
    return found, model, copies


def steps_of_others() -> None:
    """The call leaves the counters of other models alone, and its own model can be let go."""
    gc.collect()  # what earlier programs left
    before = len(shared_slots.counted())
    model = in_place(shard(FP32))
    for weights, counts in ((model, True), (shard(FP32), False), (nn.Linear(2, 2), False)):
        optimizer = torch.optim.AdamW(weights.parameters(), fused=True)
        for p in weights.parameters():
            p.grad = torch.zeros_like(p)
        versions = [p._version for p in weights.parameters()]
        optimizer.step()
        changed = [p._version != v for p, v in zip(weights.parameters(), versions, strict=True)]
        assert all(changed) if counts else not any(changed), changed
        optimizer.zero_grad()
    del model, weights, optimizer, p
    gc.collect()
    assert len(shared_slots.counted()) == before


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
            model = in_place(shard(policy)) if ours else shard(policy)
            loss_of(model, 0).backward()
            found = [p.grad.full_tensor().double() for p in model.parameters()]
            off = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
            errors.append((off / sum(total.square().sum() for total in exact)).sqrt().item())
        if dist.get_rank() == 0:
            print(f"reduce in {name}: stock FSDP2 is off by {errors[0]:.1e}, ours {errors[1]:.1e}")
        assert errors[1] <= 2 * errors[0] + 1e-7, errors


def called_again() -> None:
    """An error leaves a model as it was; so it does if another model has one of its units."""
    model, stock = in_place(shard(PLAIN)), shard(PLAIN)
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
    same_gradients(model, stock)


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


def one_call_refuses_and_changes_nothing() -> None:
    host = SimpleNamespace(nodename=f"host-{dist.get_rank()}")
    several = mock.patch.object(peer_memory.os, "uname", lambda: host)
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
        model = shard(PLAIN)
        first(model)
        expect("another copy of this library", partial(second.use_peer_copies, model))
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
        model = in_place(shard(FP32, model=model))
        for grads in (True, False):
            with torch.set_grad_enabled(grads):
                expect("returns its full weights", partial(loss_of, model, 0))


def weights_that_are_no_numbers() -> None:
    """A cast may make another NaN of one: that was taken for a change behind the gather."""
    model = in_place(shard(FP32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(4):
        loss = loss_of(model, turn) * (torch.nan if turn == 1 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of(model, 4).isnan()


def nbytes_of(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    return getattr(tensor, "_local_tensor", tensor).nbytes


def gradients_held(model: nn.Module) -> int:
    """Bytes of gradients on this rank: of full weights, of shards, and between two reductions."""
    total = 0
    for group in param_groups(model):
        total += nbytes_of(getattr(group, "_partial_reduce_output", None))
        for p in group.fsdp_params:
            full = getattr(p, "_unsharded_param", None)
            total += nbytes_of(getattr(p, "unsharded_accumulated_grad", None))
            total += nbytes_of(None if full is None else full.grad)
            total += nbytes_of(p.sharded_param.grad)
    return total


def held_between_microbatches(build: object, setting: str | None, ours: bool) -> list[int]:
    model = build(FP32)
    if ours:
        in_place(model)
    held = []
    for micro in range(MICRO_BATCHES):
        if setting is not None:
            getattr(model, setting)(micro == MICRO_BATCHES - 1)
        loss_of(model, micro).backward()
        held.append(gradients_held(model))
    return held


def as_many_bytes_of_gradients_as_stock() -> None:
    """Without reductions a rank holds all gradients, in the dtype of reductions; else its part."""
    full = sum(p.numel() for p in Model().parameters()) * 4
    for build, setting in (
        (shard, None),
        (shard, "set_requires_gradient_sync"),
        (hybrid, "set_requires_all_reduce"),
    ):
        stock = held_between_microbatches(build, setting, ours=False)
        found = held_between_microbatches(build, setting, ours=True)
        assert found == stock, (build.__name__, setting, found, stock)
        late = setting == "set_requires_gradient_sync"
        assert (found[0] == full) == late and found[-1] < 0.7 * full, (setting, found, full)


class Late(Block):
    """A block with a weight that some forwards do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH, bias=False)
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + self.late(x) if self.uses_late else y


def with_late_weights() -> Model:
    model = Model()
    for number in range(len(model.blocks)):
        model.blocks[number] = Late()
    return model


def right_gradients(used_by_rank: tuple[tuple[int, ...], ...], unused: bool) -> None:
    """Means over the ranks of sums over micro-batches, which are added up in float32."""
    used_in = used_by_rank[dist.get_rank()]
    model = in_place(shard(FP32, model=with_late_weights()))
    if unused:
        getattr(model, UNUSED)(True)
    whole = with_late_weights().to(device=DEVICE, dtype=torch.bfloat16)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in whole.parameters()]
    for micro in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
        for block in (*model.blocks, *whole.blocks):
            block.uses_late = micro in used_in
        loss_of(model, micro).backward()
        loss_of(whole, micro).backward()
        for total, p in zip(sums, whole.parameters(), strict=True):
            if p.grad is not None:
                total += p.grad
        whole.zero_grad()
    for (name, p), total in zip(model.named_parameters(), sums, strict=True):
        dist.all_reduce(total)
        assert p.grad is not None, f"{name} has no gradient, {used_by_rank}"
        found = p.grad.full_tensor()
        assert torch.equal(found, total / dist.get_world_size()), f"{name}, {used_by_rank}"


def gradients_of_several_dtypes() -> None:
    """A weight whose first gradient comes with the last micro-batch, or never (as zeros).

    Stock FSDP2 raises there: what was added up is float32, what is new bfloat16. On two ranks one
    weight's gradients may be of both.
    """
    for used_by_rank in (((2,), (2,)), ((2,), (0, 2))):
        right_gradients(used_by_rank, unused=False)
    if hasattr(FSDPModule, UNUSED):
        for used_by_rank in (((), ()), ((), (0, 2))):
            right_gradients(used_by_rank, unused=True)


TROUBLES = (
    full_weights_returned,
    weights_that_are_no_numbers,
    one_call_refuses_and_changes_nothing,
    two_copies_of_the_library,
    called_again,
    full_inside_another,
    called_before_backward,
    collectives_of_their_own,
    changed_behind_the_gather,
    full_weights_changed_in_forward,
    begun_before_the_forward,
    slots_as_many_as_asked,
    a_step_that_was_skipped,
    a_hook_that_raises_on_one_rank,
    moved_behind_a_graph,
    penalties_on_gradients,
    the_faster_way_is_kept,
    steps_of_others,
    sums_of_more_ranks,
    as_many_bytes_of_gradients_as_stock,
    gradients_of_several_dtypes,
)


def main(wanted: list[str]) -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True)
    dist.init_process_group()
    failed = []
    for trouble in TROUBLES:
        if not wanted or trouble.__name__ in wanted:
            try:
                trouble()
            except Exception:
                failed.append(trouble.__name__)
                print(trouble.__name__, traceback.format_exc(limit=-8), flush=True)
            dist.barrier()
    dist.destroy_process_group()
    assert not failed, f"these fail: {failed}"


if __name__ == "__main__":
    main(sys.argv[1:])
