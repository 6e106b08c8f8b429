"""What can go wrong on the disks of hosts; each rank is a host, the argument names the trouble."""

import os
import shutil
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path[:0] = [str(RECIPES), str(Path(__file__).parent)]

import _toys as basic  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from facing import face  # noqa: E402

from overlap_recipes.checkpoint import saves as saves_module  # noqa: E402
from overlap_recipes.checkpoint import two_hosts  # noqa: E402
from overlap_recipes.checkpoint.two_hosts import PartnerSaves, gather  # noqa: E402

basic.WIDTH, basic.HIDDEN = 16, 64
saves_module.DEADLINE_S = 20.0
WRITE_FILE = two_hosts.write_file


def saved(local: Path, device: torch.device, steps: int, seed: int = 0) -> basic.AppState:
    """Train ``steps`` steps from ``seed``, save each."""
    app = basic.build_app(device, seed)
    with PartnerSaves(device, app.model.buffers(), per_host=1) as saves:
        for _ in range(steps):
            basic.train_step(app, device)
            saves.save({"app": app}, local / f"step{app.step}")
    return app


def of_rank(root: Path, name: str) -> Path:
    return root / f"{name}{dist.get_rank()}"


def two_saves_of_one_step(root: Path, device: torch.device) -> None:
    """A host comes back with its part of step 2, which the others have saved anew meanwhile."""
    local, other = of_rank(root, "host"), of_rank(root, "disk")
    app, again = saved(local, device, 2, seed=0), saved(other, device, 2, seed=1)
    if dist.get_rank() == 1:
        shutil.rmtree(local / "step2")
        shutil.copytree(other / "step2", local / "step2")
    shutil.rmtree(other)
    dist.barrier()
    assert gather(local) == 2
    found = basic.snapshot(basic.load_app(local / "step2", device))
    expected = [basic.snapshot(each) for each in (app, again)]
    same = [all(basic.same_bits(found[path], x) for path, x in each.items()) for each in expected]
    same = torch.tensor(same).int()
    dist.all_reduce(same)
    assert dist.get_world_size() in same.tolist(), "bits of two saves in one checkpoint"
    shutil.rmtree(local / "step1")  # no host has all of it


def older_timelines(root: Path, device: torch.device) -> None:
    """One host went on alone and saved step 4 anew; the other comes back with its own step 4."""
    local, anew = of_rank(root, "host"), of_rank(root, "anew")
    saved(local, device, 4, seed=0)  # steps 3 and 4 stay
    saved(anew, device, 4, seed=1)
    if dist.get_rank() == 0:
        shutil.rmtree(local / "step3")
        shutil.copytree(anew / "step3", local / "step3")
    shutil.rmtree(anew)
    dist.barrier()
    assert gather(local) == 4
    left = two_hosts.held(local)
    of_ranks = [left] * dist.get_world_size()
    dist.all_gather_object(of_ranks, left)
    assert {step for host in of_ranks for step, _ in host} <= {3, 4}
    saves = {save for host in of_ranks for step, save in host if step == 3}
    assert len(saves) == 1, f"two saves have the name step3: {saves}"
    shutil.rmtree(local / "step3", ignore_errors=True)  # no host has all of it


def failed_saves(root: Path, device: torch.device) -> None:
    """A disk that cannot take the partner's copy costs that save alone, and no room on any host."""

    def full(file: Path, pieces) -> None:
        here = dist.get_rank() == 1 and "step1" in str(file) and file.suffix == ".distcp"
        WRITE_FILE(root / "not there" / "file" if here else file, pieces)

    two_hosts.write_file, two_hosts.PIECE = full, 1000
    local = of_rank(root, "host")
    app = basic.build_app(device)
    with PartnerSaves(device, app.model.buffers(), per_host=1) as saves:
        basic.train_step(app, device)
        failed = saves.save({"app": app}, local / "step1").exception()
        assert "FileNotFoundError" in str(failed), failed
        basic.train_step(app, device)
        assert saves.save({"app": app}, local / "step2").exception() is None
        saves.failures.clear()
    left = sorted(path.name for path in local.iterdir())
    assert left == ["step2"] and gather(local) == 2, left


def power_cut(root: Path, device: torch.device) -> None:
    """A host has its names and not its content: what was not flushed is empty."""
    local = of_rank(root, "host")
    app = saved(local, device, 2)
    if dist.get_rank() == 1:
        (local / "step2" / two_hosts.LISTING).write_text("")
    dist.barrier()
    assert gather(local) == 2
    basic.assert_same_bits(basic.load_app(local / "step2", device), basic.snapshot(app))
    shutil.rmtree(local / "step1")  # no host has all of it


def one_host(root: Path, device: torch.device) -> None:
    """Ranks that srun or ``mp.spawn`` has started on one host do not take each other for hosts."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    app = basic.build_app(device)
    with PartnerSaves(device, app.model.buffers()) as saves:
        for _ in range(2):
            basic.train_step(app, device)
            saves.save({"app": app}, root / f"step{app.step}").result()
        dist.barrier()
    assert saves.per_host == dist.get_world_size()
    assert gather(root) == 2
    basic.assert_same_bits(basic.load_app(root / "step2", device), basic.snapshot(app))


TROUBLES = two_saves_of_one_step, older_timelines, failed_saves, power_cut, one_host

if __name__ == "__main__":
    face(TROUBLES)
