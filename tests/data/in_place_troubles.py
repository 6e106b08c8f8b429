"""Users' troubles in place: calls that are refused, weights that change, and exceptions."""

import os
import sys
import traceback
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
    SLOTS,
    WIDTH,
    Block,
    Model,
    evaluate,
    in_place,
    loss_of,
    shard,
    step,
)
from raising import assert_refused  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402

from overlap_recipes.fsdp2 import (  # noqa: E402
    faster_way,
    in_place_gather,
    in_place_reduce,
    peer_memory,
    use_peer_copies,
)
from overlap_recipes.fsdp2.peer_copies import PeerCopies  # noqa: E402
from overlap_recipes.fsdp2.peer_memory import param_groups  # noqa: E402


def expect(words: str, what: Callable[[], object]) -> None:
    assert_refused(what, RuntimeError, words)


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
        same_gradients(model, stock)


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
    """Losses and shards of 16 steps; the last rank alone sees a difference.

    A step has two micro-batches. Before them, one unit is trained while a graph of others waits.
    """
    model = shard(FP32)
    # Under deterministic algorithms nothing is compared; two ranks have these bits without.
    with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: False):
        copies = use_peer_copies(model, SLOTS) if faster else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    of_one_unit = torch.optim.SGD(model.blocks[-1].parameters(), lr=1e-2)
    clock = [0.0]

    def now(way: faster_way.FasterWay) -> float:
        present = "peer copies" if way.gathers.in_use else "FSDP2"
        last = dist.get_rank() == dist.get_world_size() - 1
        clock[0] += 2.0 if last and present != faster else 1.0
        return clock[0]

    found = []
    with mock.patch.object(faster_way.FasterWay, "now", now):
        for turn in range(16):
            model.depth = BLOCKS - 1
            waiting = loss_of(model, turn)
            model.depth = None
            loss_of(model, turn).backward()
            of_one_unit.step()
            model.zero_grad()
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = loss_of(model, 2 * turn + micro)
                if micro == 0:
                    loss = loss + waiting
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


def called_again() -> None:
    """The error leaves a model as it was."""
    model, stock = in_place(shard(PLAIN)), shard(PLAIN)
    for call in (in_place_gather.gather_in_place, in_place_reduce.reduce_in_place):
        expect("call it once", partial(call, model))
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


def all_ranks_of_the_mesh_choose() -> None:
    """With tensor parallelism more than those that gather: else half of a weight goes each way."""
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "parts"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    parallelize_module(model, mesh["parts"], {"1": ColwiseParallel()})
    copies = use_peer_copies(fully_shard(model, mesh=mesh["data"]))
    way = faster_way.FasterWay(model, copies.gathers, copies.pushed)
    assert way.of_all_ranks(dist.get_rank() * 2) == {0: 0, 1: 2, 2: 4, 3: 6}


TROUBLES = (
    full_weights_returned,
    one_call_refuses_and_changes_nothing,
    called_again,
    full_inside_another,
    called_before_backward,
    changed_behind_the_gather,
    full_weights_changed_in_forward,
    a_step_that_was_skipped,
    a_hook_that_raises_on_one_rank,
    penalties_on_gradients,
    the_faster_way_is_kept,
    all_ranks_of_the_mesh_choose,
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
