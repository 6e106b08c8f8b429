"""What users have saved that files from scratch are not made for: each raises, on every rank."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path[:0] = [str(RECIPES), str(Path(__file__).parent)]

import _checks  # noqa: E402
import async_save  # noqa: E402
import default_stager  # noqa: E402
import pinned_staging  # noqa: E402
import schedulefree  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from facing import face  # noqa: E402
from raising import assert_refused, raised  # noqa: E402
from state_to_save import AppState, load  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import DefaultLoadPlanner  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402

WIDTH = 8


class OfParts(torch.Tensor):
    """Weights that are made of others, as torchao's are."""


class OfItsShard(torch.optim.SGD):
    """Keeps a plain moment for its part of each parameter."""

    def step(self, closure: Callable | None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            local = parameter.detach().to_local()
            self.state[parameter]["moment"] = local.clone() + dist.get_rank()


def saving_ways(root: Path, device: torch.device) -> Iterator[async_save.AsyncCheckpoints]:
    stagers = {
        "async_save": None,
        "pinned_staging": pinned_staging.PinnedStager(),
        "default_stager": default_stager.OverlappedStager(device, changing=list),
    }
    for name, stager in stagers.items():
        yield async_save.AsyncCheckpoints(
            root / name, stager, _checks.NamedWhenComplete, _checks.SameOnAllRanks()
        )
    stagers["default_stager"].close()


def model_of(device: torch.device, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> AppState:
    """A job behind its first step."""
    model(torch.ones(2, WIDTH, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return AppState(model, optimizer)


def state_dicts_that_ranks_do_not_share(root: Path, device: torch.device) -> None:
    """What DCP keeps one rank's copy of: a moment, statistics, a loader's position and order."""
    rank = dist.get_rank()
    states = {
        "moment": {"moment": torch.ones(4, device=device) + rank},
        "statistics": nn.BatchNorm1d(4).to(device).state_dict() | {"mean": torch.full((2,), rank)},
        "position": {"data": {"taken": rank}},
        "order": {"data": {"shuffled": torch.arange(300, device=device).roll(rank)}},
        "keys": {f"of_rank_{rank}": 1},
    }
    for name, state in states.items():
        for checkpoints in saving_ways(root / name, device):
            with closing(checkpoints):
                assert_refused(lambda c=checkpoints, s=state: c.save(1, s), ValueError, "rank 1")
            assert not list(checkpoints.root.glob("*"))


def state_dicts_of_other_things(root: Path, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    scale = DTensor.from_local(torch.tensor(1.0, device=device), mesh, [Replicate()])
    states = {
        "an OfParts": {"weight": torch.ones(4, device=device).as_subclass(OfParts)},
        "torch.sparse_coo": {"mask": torch.eye(3, device=device).to_sparse()},
        "without dimensions": {"scale": scale},
        "a dtype": {"dtype": torch.int8},
        "a Linear": {"model": nn.Linear(2, 2)},
    }
    for why, state in states.items():
        for checkpoints in saving_ways(root, device):
            with closing(checkpoints):
                name = why.removeprefix("an ")
                assert_refused(lambda c=checkpoints, s=state: c.save(1, s), ValueError, name)
    for checkpoints in saving_ways(root, device):
        with closing(checkpoints):
            for name in ("step-000001", 1.0, None):
                wrong = lambda c=checkpoints, n=name: c.save(n, {"one": 1})  # noqa: E731
                assert_refused(wrong, TypeError, "integer")
        assert not list(checkpoints.root.glob("*"))


def jobs_that_do_not_come_back(root: Path, device: torch.device) -> None:
    """``AppState`` refuses to be asked."""
    adamw = torch.optim.AdamW
    model = model_of(device)
    shards = stepped(model, OfItsShard(model.parameters(), lr=0.1), device)
    assert_refused(shards.state_dict, ValueError, "OfItsShard is no optimizer of torch.optim")

    model = model_of(device)
    free = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    free.train()
    assert_refused(stepped(model, free, device).state_dict, ValueError, "no optimizer of torch")

    for dtype in (torch.bfloat16, torch.int8):
        model = model_of(device)
        app = stepped(model, adamw(model.parameters()), device)
        moments = app.optimizer.state[model[0].weight]
        moments["exp_avg"] = moments["exp_avg"].to(dtype)
        assert_refused(app.state_dict, ValueError, "0.weight has optimizer state 'exp_avg'")

    model = model_of(device)
    app = stepped(model, adamw(model.parameters()), device)
    moments = app.optimizer.state[model[0].weight]
    moments["exp_avg"] = moments["exp_avg"].to_local().clone()
    assert_refused(app.state_dict, ValueError, "that is not sharded as it is")

    model = model_of(device)
    model[1].unused = nn.Parameter(torch.ones(2, device=device))
    app = stepped(model, adamw(model.parameters()), device)
    assert_refused(app.state_dict, ValueError, "1.unused has no optimizer state")

    model = model_of(device)
    app = stepped(model, adamw(model.parameters()), device)
    torch.optim.lr_scheduler.StepLR(app.optimizer, 10)
    assert_refused(app.state_dict, ValueError, "a schedule drives the optimizer")

    model = nn.Linear(WIDTH, WIDTH).to(device)
    app = stepped(model, adamw(model.parameters()), device)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(OfParts))
    assert_refused(app.state_dict, ValueError, "weight is a OfParts")

    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(WIDTH).to(device))
    batch = torch.randn(4, WIDTH, device=device) + dist.get_rank()
    model(batch).square().mean().backward()
    optimizer = adamw(model.parameters())
    optimizer.step()
    app = AppState(model, optimizer)
    assert_refused(app.state_dict, ValueError, "differs between ranks")
    app.buffers_compared = True  # they were equal when the state was loaded
    app.load_state_dict(app.state_dict())
    assert_refused(app.state_dict, ValueError, "differs between ranks")


class Renamed(nn.Module):
    """Two layers, of which one has the name that it is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first = nn.Linear(WIDTH, WIDTH)
        self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.name)(self.first(x))


def checkpoints_of_other_jobs(root: Path, device: torch.device) -> None:
    """A renamed layer, with the planner that skips what is missing, and another dtype."""
    model = fully_shard(Renamed("head").to(device))
    app = stepped(model, torch.optim.AdamW(model.parameters()), device)
    dcp.save({"app": app}, checkpoint_id=root)

    other = fully_shard(Renamed("classifier").to(device))
    job = stepped(other, torch.optim.AdamW(other.parameters()), device)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    error = raised(lambda: dcp.load({"app": job}, checkpoint_id=root, planner=planner))
    assert "classifier" in str(error), repr(error)

    low = fully_shard(Renamed("head").to(device, torch.bfloat16))
    job = AppState(low, torch.optim.AdamW(low.parameters()))
    assert_refused(lambda: load(job, root), ValueError, "torch.bfloat16")

    twin = fully_shard(Renamed("head").to(device))
    job = load(AppState(twin, torch.optim.AdamW(twin.parameters())), root)
    assert torch.equal(twin.head.weight.to_local(), model.head.weight.to_local())
    assert torch.equal(twin.first.weight.to_local(), model.first.weight.to_local())
    assert_refused(
        lambda: load(AppState(twin, torch.optim.SGD(twin.parameters(), momentum=0.9)), root),
        BaseException,
        "",
    )


if __name__ == "__main__":
    face(globals())
