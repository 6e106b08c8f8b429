"""Races that show: edits that drop an ordering, each with its window widened, on two ranks.

    torchrun --standalone --nproc-per-node 2 tests/fsdp2/widened_races.py OUTPUT.json

The edits are those of ``tests/controls/*.toml``. A pause on one stream of one rank or of all widens
the window; the recipe without the edit runs with the same pause and must be right. Rank 0 writes to
the output which race was right, and wrong with its edit.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).parents[2]
CONTROLS = ROOT / "tests" / "controls"
FOLDERS = ROOT / "recipes_source" / "sharding", ROOT / "tests" / "proofs"
PAUSE_MS = 5.0  # longer than any step of a toy without it
CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz


def script(name: str) -> Path:
    """A recipe's file, or a proof's."""
    recipe, proof = (folder / f"{name}.py" for folder in FOLDERS)
    return recipe if recipe.is_file() else proof


def load(name: str, control: str | None = None):
    """A recipe as a module, with a control's edit of it or of the library if one is named.

    It is imported again with all that it imports of this project: the edit may be in any of it.
    """
    from rankproof.recipe import load_recipe

    recipe = load_recipe(script(name), CONTROLS)
    file = recipe.path
    first = []
    if control is not None:
        folder = Path(tempfile.mkdtemp()) / "edited"
        _, file = recipe.control(control).edited(recipe, folder)
        first = [str(folder)]
        if file.name != recipe.path.name or file.parent != folder:
            file = recipe.path  # the edit is in what it imports
    remove_hook_of_the_last_import()
    for module in list(sys.modules):
        if module.partition(".")[0] == "overlap_recipes":
            del sys.modules[module]
    sys.path[:0] = first
    try:
        spec = importlib.util.spec_from_file_location(f"{name}_{control}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        del sys.path[: len(first)]
    return module


def of_library(module: str):
    """A module of fsdp2, as the recipe that was loaded last has it."""
    return sys.modules[f"overlap_recipes.fsdp2.{module}"]


def remove_hook_of_the_last_import() -> None:
    """Optimizers would call one for each import of the library."""
    shared_slots = sys.modules.get("overlap_recipes.fsdp2.shared_slots")
    if shared_slots is not None and shared_slots.counted.cache_info().currsize > 0:
        shared_slots.counted().hook.remove()
        shared_slots.counted.cache_clear()


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


def late(place: str, owner: str, method: str, ranks: tuple[int, ...] = (0, 1)) -> Callable:
    """Pause before a method of the library that the recipe has loaded."""
    return lambda module: before(getattr(of_library(place), owner), method, ranks)


CASTS = late("shared_slots", "Slots", "fill", (0,))  # the others copy what was there
GATHERS = late("shared_slots", "Slots", "fill")
PUSHES = late("in_place_reduce", "PushedGradients", "push", (0,))
REDUCTIONS = late("in_place_reduce", "PushedGradients", "push")
SUMS = late("in_place_reduce", "PushedGradients", "finish", (1,))


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
    original = module.build

    def build(*args, **kwargs):
        model = original(*args, **kwargs)
        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            layer.register_forward_pre_hook(lambda *_: pause(1))
            layer.register_full_backward_pre_hook(lambda *_: pause(1))
        return model

    return mock.patch.object(module, "build", build)


def prove_in_place(name: str, control: str | None, device: torch.device, widen: Callable) -> None:
    """Run the recipe's own proof in the widened window, to its end on every rank."""
    module, original, found = load(name, control), torch.equal, []
    proof = "prove_same_bits" if name == "peer_copies" else "prove"

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
    Race("peer_copies", "no_barrier_before_copies", prove_in_place, CASTS),
    Race("in_place", "filled_again_at_once", prove_in_place, late_behind_barriers),
    Race("peer_copies", "not_behind_the_compute", prove_in_place, late_compute),
    Race("peer_copies", "not_awaited", prove_in_place, GATHERS),
    Race("peer_copies", "no_barrier", prove_in_place, PUSHES),
    Race("in_place", "one_slot", prove_in_place, late_behind_barriers),
    Race("peer_copies", "pushed_at_once", prove_in_place, late_compute),
    Race("in_place", "not_awaited", prove_in_place, REDUCTIONS),
    Race("peer_copies", "sums_too_late", prove_in_place, SUMS),
)


def is_wrong(race: Race, control: str | None, device: torch.device) -> bool:
    try:
        race.run(race.recipe, control, device, race.widen)
        wrong = False
    except AssertionError:
        wrong = True
    return on_any_rank(wrong, device)


def main(output: Path) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "harness")]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group()
    try:
        found: dict = {"right": {}, "wrong": {}}
        for race in RACES:
            found["right"][race.name] = not is_wrong(race, None, device)
            found["wrong"][race.name] = is_wrong(race, race.control, device)
            if dist.get_rank() == 0:
                right, wrong = found["right"][race.name], found["wrong"][race.name]
                print(f"{race.name}: right {right}, wrong with its edit {wrong}", flush=True)
                output.write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
