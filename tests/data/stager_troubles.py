"""What can go wrong around `Saves`; the arguments name it."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path[:0] = [str(RECIPES), str(Path(__file__).parent)]

import _toys as basic  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from facing import face  # noqa: E402
from raising import raised  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from overlap_recipes.checkpoint import saves as saves_module  # noqa: E402
from overlap_recipes.checkpoint import staging as staging_module  # noqa: E402
from overlap_recipes.checkpoint.copies import PinnedArena  # noqa: E402
from overlap_recipes.checkpoint.saves import Saves  # noqa: E402
from overlap_recipes.checkpoint.talk import Talk  # noqa: E402
from overlap_recipes.checkpoint.writer import FileWriter  # noqa: E402
from overlap_recipes.checkpoint.writing import Target  # noqa: E402

basic.WIDTH, basic.HIDDEN = 16, 64


class Gated(FileWriter):
    """Writes wait for `gates[directory name]`, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, threading.Event] = {}
        self.began: list[str] = []
        self.at_gate = threading.Event()
        self.under_way = self.most_under_way = 0

    def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
        name = Path(target.name).name
        self.began.append(name)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if name in self.gates:
            self.at_gate.set()
            assert self.gates[name].wait(30)
        try:
            super().write(state, target, talk, threads)
        finally:
            self.under_way -= 1


def right(root: Path, device: torch.device, expected: dict[str, dict]) -> None:
    for name, bits in expected.items():
        basic.assert_same_bits(basic.load_app(root / name, device), bits)


class Run:
    """A small training whose steps are saved and kept to compare with."""

    def __init__(self, root: Path, device: torch.device, seed: int = 0) -> None:
        self.root, self.device = root, device
        self.app, self.expected = basic.build_app(device, seed), {}

    def step_and_save(self, saves: Saves) -> Future | None:
        basic.train_step(self.app, self.device)
        name = f"step{self.app.step}"
        self.expected[name] = basic.snapshot(self.app)
        return saves.save({"app": self.app}, self.root / name)

    def right(self) -> None:
        right(self.root, self.device, self.expected)


# -- any number of ranks ------------------------------------------------------------------------


def an_older_checkpoint_of_the_name_is_replaced_whole(root: Path, device: torch.device) -> None:
    for seed in (0, 1, 2):
        run = Run(root, device, seed)
        with Saves(device, run.app.model.buffers()) as saves:
            run.step_and_save(saves)
        run.right()
        dist.barrier()
        if seed == 0 and dist.get_rank() == 0:
            (root / "step1").rename(root / "first")
            (root / "step1").symlink_to(root / "first")  # the link is replaced, not what it names
    assert sorted(path.name for path in root.iterdir()) == ["first", "step1"]


def a_rank_that_cannot_stage_is_told_to_all(root: Path, device: torch.device) -> None:
    run = Run(root, device)
    with Saves(device, run.app.model.buffers()) as saves:
        run.step_and_save(saves)
        plan, saves.staging.plan = saves.staging.plan, None
        saves.staging.arena = None
        arena, staging_module.PinnedArena = staging_module.PinnedArena, refuse_on_the_last_rank
        failed = run.step_and_save(saves)
        assert "cannot lock" in str(failed.exception(30)), failed
        staging_module.PinnedArena = arena
        assert "cannot lock" in str(raised(saves.wait))
        run.step_and_save(saves)
        assert plan is not saves.staging.plan
    del run.expected["step2"]
    run.right()


def refuse_on_the_last_rank(nbytes: int, device: torch.device):
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("cannot lock memory")
    return PinnedArena(nbytes, device)


def a_block_left_by_one_rank_does_not_hang_and_leaves_nothing_wrong(
    root: Path, device: torch.device
) -> None:
    run, gate, gated = Run(root, device), threading.Event(), Gated()
    saves_module.EXIT_S = 0.5
    try:
        with Saves(device, run.app.model.buffers(), writer=gated) as saves:
            run.step_and_save(saves).result(30)
            gated.gates["step2"] = gate
            written = run.step_and_save(saves)
            assert gated.at_gate.wait(30)
            if dist.get_rank() == 0:
                raise KeyError("one rank ends")
            gate.set()
            saves.wait()
    except KeyError:
        gate.set()
    finally:
        saves_module.EXIT_S = 30.0
    written.result(30)
    close(saves)
    run.right()
    dist.barrier()
    assert sorted(path.name for path in root.iterdir()) == ["step1", "step2"]


def an_upload_that_outlives_its_group_has_no_name(root: Path, device: torch.device) -> None:
    run, gate, gated = Run(root, device), threading.Event(), Gated()
    saves_module.EXIT_S = 0.1
    try:
        with Saves(device, run.app.model.buffers(), writer=gated) as saves:
            gated.gates["step1"] = gate
            upload = run.step_and_save(saves)
            assert gated.at_gate.wait(30)
            raise KeyError("all ranks end")
    except KeyError:
        for talk in (saves.calling, saves.writing.talk):
            dist.destroy_process_group(talk.group)
    finally:
        saves_module.EXIT_S = 30.0
    gate.set()
    failed = upload.exception(60) is not None
    dist.barrier()
    if failed:
        assert not (root / "step1").exists()
    else:
        run.right()


# -- one rank ---------------------------------------------------------------------------------


def a_buffer_is_not_filled_while_it_is_written(root: Path, device: torch.device) -> None:
    run, gated = Run(root, device), Gated()
    with Saves(device, run.app.model.buffers(), writer=gated) as saves:
        gated.gates["step1"] = threading.Event()
        run.step_and_save(saves)
        assert gated.at_gate.wait(30)
        with opened_by_a_wait(gated.gates["step1"]):
            run.step_and_save(saves)
        assert gated.gates["step1"].is_set(), "it has not waited"
        run.step_and_save(saves)
    assert gated.most_under_way == 1 and gated.began == ["step1", "step2", "step3"]
    run.right()


@contextmanager
def opened_by_a_wait(gate: threading.Event) -> Iterator[None]:
    """Open ``gate`` when a save waits for what has not ended."""
    wait = saves_module.wait

    def open_and_wait(uploads: list) -> object:
        if not all(upload.done() for upload in uploads):
            gate.set()
        return wait(uploads)

    saves_module.wait = open_and_wait
    try:
        yield
    finally:
        saves_module.wait = wait


class Refuses:
    """A part of the state that cannot be read once, on the last rank."""

    refuses = False

    def state_dict(self) -> dict:
        if self.refuses and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no state now")
        return {"x": 1}

    def load_state_dict(self, state: dict) -> None: ...


def a_rank_whose_state_cannot_be_read_mixes_no_two_saves(root: Path, device: torch.device) -> None:
    run, part = Run(root, device), Refuses()
    with Saves(device, run.app.model.buffers()) as saves:
        for step in (1, 2, 3):
            basic.train_step(run.app, device)
            part.refuses = step == 2
            bits = basic.snapshot(run.app)
            saves.save({"app": run.app, "part": part}, root / "latest")
        assert "no state now" in str(raised(saves.wait))
    right(root, device, {"latest": bits})


def a_save_in_inference_mode_is_a_save(root: Path, device: torch.device) -> None:
    run = Run(root, device)
    with Saves(device, run.app.model.buffers()) as saves:
        basic.train_step(run.app, device)
        run.expected["step1"] = basic.snapshot(run.app)
        with torch.inference_mode():
            saves.save({"app": run.app}, root / "step1")
        run.step_and_save(saves)
    run.right()


def a_directory_that_is_no_checkpoint_is_not_replaced(root: Path, device: torch.device) -> None:
    run = Run(root, device)
    (root / "step1").mkdir()
    (root / "step1" / "precious").write_text("mine")
    (root / "step2.replaced" / "old").mkdir(parents=True)
    with Saves(device, run.app.model.buffers()) as saves:
        run.step_and_save(saves)
        assert raised(saves.wait) is not None
        run.step_and_save(saves)
        saves.wait()
        saves.save({"app": run.app}, root / "step2")  # in place of a checkpoint
        saves.wait()
        assert (root / "step1" / "precious").read_text() == "mine"
        (root / "step1" / "precious").unlink()
        run.expected["step1"] = basic.snapshot(run.app)
        saves.save({"app": run.app}, root / "step1")  # an empty directory is no loss
    run.right()


def other_strides_over_the_same_memory_are_noticed(root: Path, device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.arange(16.0, device=device).view(4, 4))
    with Saves(device) as saves:
        saves.save({"x": weight}, root / "straight")
        weight.data = weight.data.t()
        saves.save({"x": weight}, root / "turned")
    for name, bits in (("straight", weight.data.t()), ("turned", weight.data)):
        loaded = {"x": torch.zeros(4, 4, device=device)}
        dcp.load(loaded, checkpoint_id=root / name, no_dist=True)
        assert torch.equal(loaded["x"], bits), name


def close(saves: Saves) -> None:
    """End its process groups, whatever has ended them already."""
    for talk in (saves.calling, saves.writing.talk):
        raised(talk.close)


def every_optimizer_is_ordered_and_none_afterwards(root: Path, device: torch.device) -> None:
    weights = [nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    asked = []

    with Saves(device) as saves:
        before_update = saves.staging.before_update

        def noted() -> None:
            asked.append(True)
            before_update()

        saves.staging.before_update = noted
        saves.save({"w": weights}, root / "w")
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    optimizers[0].step()
    assert len(asked) == len(optimizers) + 1  # and once at the end of the block
    loaded = {"w": [torch.ones(3), torch.ones(3)]}
    dcp.load(loaded, checkpoint_id=root / "w")
    assert all(torch.equal(weight, torch.zeros(3)) for weight in loaded["w"])


def weights_that_moved_are_saved_where_they_are(root: Path, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept = None

    def state() -> dict:
        return {
            "model": dict(model.named_parameters()),
            "moments": [dict(optimizer.state[p]) for p in model.parameters()],
        }

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()

    def load_a_copy() -> None:
        optimizer.load_state_dict(torch.load(kept))

    def new_memory() -> None:
        model[0].weight.data = torch.full((4, 4), 2.0, device=device)

    def assigned() -> None:
        full = {name: torch.full_like(p, 3.0) for name, p in model.state_dict().items()}
        model.load_state_dict(full, assign=True)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.state.clear()
        step()

    def swapped() -> None:
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.full((4, 4), 5.0)))

    step()
    kept = root / "kept"
    torch.save(optimizer.state_dict(), kept)
    with Saves(device) as saves:
        for move in (step, load_a_copy, step, new_memory, assigned, swapped):
            move()
            expected = torch.utils._pytree.tree_map(lambda t: t.detach().clone(), state())
            saves.save(state(), root / move.__name__).result(30)
            zeros = torch.utils._pytree.tree_map(torch.zeros_like, expected)
            dcp.load(zeros, checkpoint_id=root / move.__name__)
            pairs = zip(*map(torch.utils._pytree.tree_leaves, (zeros, expected)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), move.__name__


def numbers_on_the_device_are_read_at_the_save(root: Path, device: torch.device) -> None:
    rate, counter = torch.tensor(0.5, device=device), torch.tensor(7, device=device)
    rates = torch.tensor([0.5], device=device)
    with Saves(device) as saves:
        saves.save({"rate": rate, "rates": rates, "counter": counter}, root / "numbers")
        rate.mul_(0.5)  # as a schedule does
        rates.mul_(0.5)
        counter.add_(1)
    loaded = {"rate": torch.zeros(()), "rates": torch.zeros(1), "counter": torch.tensor(0)}
    dcp.load(loaded, checkpoint_id=root / "numbers")
    assert [tensor.item() for tensor in loaded.values()] == [0.5, 0.5, 7], loaded


def a_tensor_of_other_ranks_is_left_to_them(root: Path, device: torch.device) -> None:
    first = DeviceMesh(device.type, [0])
    whole = torch.arange(6.0, device=device)

    def state(x: torch.Tensor) -> dict:
        return {"mine": distribute_tensor(x, first, [Shard(0)]), "all": x}

    with Saves(device) as saves:
        for step in (1, 2, 3):
            saves.save(state(whole * step), root / f"step{step}")
    for step in (1, 2, 3):
        found = state(torch.zeros_like(whole))
        dcp.load(found, checkpoint_id=root / f"step{step}")
        expected = whole * step if dist.get_rank() == 0 else whole[:0]
        assert torch.equal(found["mine"].to_local(), expected), step
        assert torch.equal(found["all"], whole * step), step


def ranks_that_answer_to_other_calls_are_told(root: Path, device: torch.device) -> None:
    call = (int, str)[dist.get_rank()]  # as where one has prepared, whose optimizer alone stepped
    one = Talk()
    for words in ("each rank answers to another call: int, str", "lost each other before"):
        assert words in str(raised(lambda: one.together(call)))


if __name__ == "__main__":
    face(globals())
