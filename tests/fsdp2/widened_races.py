"""Races that show: edits that drop an ordering, each with its window widened.

The edits are those of ``tests/controls/*.toml``. A pause on one stream of one rank or of all widens
the window; the recipe without the edit runs with the same pause and must be right.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from edited_recipes import load, of_library
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

PAUSE_MS = 5.0  # longer than any step of a toy without it
CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz


def pause(milliseconds: float = PAUSE_MS, *, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Hold the current stream on ``ranks``; the host goes on."""
    if dist.get_rank() in ranks and torch.cuda.is_available():
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def on_any_rank(value: bool, device: torch.device) -> bool:
    agreed = torch.tensor(float(value), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return bool(agreed.item())


def train_context(name: str, control: str | None, device: torch.device, widen: Callable) -> None:
    """Train under the context of ``name`` and compare with the unsharded model."""
    module = load(name, control)
    model, reference = module.build(device, seed=0), module.build(device, seed=0)
    with widen(module, model):
        gradients = module.train_sharded(model, device)
        expected = module.train_unsharded(reference, device)
    module.prove_equal(gradients, expected)
    module.prove_equal(list(model.parameters()), list(reference.parameters()))


@contextlib.contextmanager
def slow_units(module, model: nn.Module) -> Iterator[None]:
    """Pause in each unit, between the gather of its weights and their use."""
    hooks = [block.up.register_forward_pre_hook(lambda *_: pause(1)) for block in model[:-1]]
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def slow_optimizer(module, model: nn.Module) -> Iterator[None]:
    """Pause before each update, with samples on the device: to copy them there holds the host."""
    torch.manual_seed(0)  # equal on every rank
    turns = module.STEPS * module.MICRO_BATCHES
    shape = (turns, dist.get_world_size(), module.BATCH, module.WIDTH)
    samples = torch.randn(shape).to(next(model.parameters()).device)

    def loss_of(model: nn.Module, turn: int, rank: int, device: torch.device) -> torch.Tensor:
        mine = samples[turn, rank]
        return nn.functional.mse_loss(model(mine), mine.flip(1))

    hook = register_optimizer_step_pre_hook(lambda *_: pause())
    with mock.patch.object(module, "loss_of", loss_of):
        yield
    hook.remove()


def before(owner: type, method: str, ranks: tuple[int, ...] = (0, 1)):
    """Pause on ``ranks`` before each call of ``method``, on the stream that it uses."""
    original = getattr(owner, method)

    def late(self, *args, **kwargs):
        pause(ranks=ranks)
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, method, late)


def late_casts(module):
    """Rank 0 casts late: the others copy what was there."""
    return before(of_library("shared_slots").Slots, "fill", ranks=(0,))


def late_gathers(module):
    return before(of_library("shared_slots").Slots, "fill")


def late_pushes(module):
    return before(of_library("in_place_reduce").PushedGradients, "push", ranks=(0,))


def late_reductions(module):
    return before(of_library("in_place_reduce").PushedGradients, "push")


def late_sums(module):
    return before(of_library("in_place_reduce").PushedGradients, "finish", ranks=(1,))


def late_behind_barriers(module):
    """Rank 1 is late behind each barrier, which rank 0 has passed as well."""
    memory = of_library("peer_memory").PeerMemory
    original = memory.barrier

    def late(self):
        original(self)
        pause(ranks=(1,))

    return mock.patch.object(memory, "barrier", late)


def late_compute(module):
    """Pause in each layer, forward and backward: other streams are ahead of the compute."""
    memory = sys.modules["peer_memory"]
    original = memory.build

    def build(*args, **kwargs):
        model = original(*args, **kwargs)
        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            layer.register_forward_pre_hook(lambda *_: pause(1))
            layer.register_full_backward_pre_hook(lambda *_: pause(1))
        return model

    return mock.patch.object(memory, "build", build)


def prove_in_place(
    name: str, control: str | None, device: torch.device, widen: Callable, proof: str = "prove"
) -> None:
    """Run the recipe's own proof in the widened window, to its end on every rank."""
    module, original, found = load(name, control), torch.equal, []

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        found.append(original(a, b))
        return True  # who stops here leaves the others waiting

    # The library raises where it sees old weights, on the ranks that see them.
    seen = mock.patch.object(of_library("in_place_gather").Changes, "refuse", lambda _: None)
    judged_by_bits = mock.patch.object(torch.testing, "assert_close", lambda *_, **__: None)
    with widen(module), mock.patch.object(torch, "equal", equal), judged_by_bits, seen:
        getattr(module, proof)(device)
    assert found and all(found), f"{found.count(False)} of {len(found)} tensors differ"


@dataclass(frozen=True)
class Race:
    recipe: str
    control: str
    run: Callable
    widen: Callable

    @property
    def name(self) -> str:
        return f"{self.recipe}: {self.control}"


RACES = (
    Race("stream_context", "released_without_waiting_for_the_consumer", train_context, slow_units),
    Race("stream_context", "gather_before_the_optimizer_step", train_context, slow_optimizer),
)
IN_PLACE = (
    Race("shared_slots", "no_barrier_before_copies", prove_in_place, late_casts),
    Race("shared_slots", "filled_again_at_once", prove_in_place, late_behind_barriers),
    Race("in_place_gather", "not_behind_the_compute", prove_in_place, late_compute),
    Race("in_place_gather", "not_awaited", prove_in_place, late_gathers),
    Race("in_place_reduce", "no_barrier", prove_in_place, late_pushes),
    Race("in_place_reduce", "one_slot", prove_in_place, late_behind_barriers),
    Race("in_place_reduce", "pushed_at_once", prove_in_place, late_compute),
    Race("in_place_reduce", "not_awaited", prove_in_place, late_reductions),
    Race("in_place_reduce", "sums_too_late", prove_in_place, late_sums),
)


def is_wrong(race: Race, control: str | None, device: torch.device) -> bool:
    try:
        race.run(race.recipe, control, device, race.widen)
        wrong = False
    except AssertionError:
        wrong = True
    return on_any_rank(wrong, device)
