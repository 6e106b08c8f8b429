"""Paths as users give them: strings, relative ones, and a device that is a string."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap_recipes.checkpoint import (
    RetainedSaves,
    Run,
    Saves,
    committed_steps,
    newest_step,
    resume,
)


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(step: int) -> Run:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = Run(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    run.step = step
    return run


def test_a_root_that_is_a_string_is_saved_to_and_resumed_from(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run = build(step=7)
    with RetainedSaves(root, "cpu", run.model.buffers) as saves:
        saves.save({"run": run}, f"{root}/step7")
    assert committed_steps(root) == [7]
    assert newest_step(root) == 7
    other = build(step=0)
    assert resume(other, root) == 7
    assert torch.equal(other.model.weight, run.model.weight)


@pytest.mark.parametrize("retained", [False, True], ids=["saves", "retained"])
def test_a_job_that_goes_to_another_directory_saves_where_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retained: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    block = RetainedSaves("root", "cpu") if retained else Saves("cpu")
    with block as saves:
        saves.save({"x": torch.ones(3)}, "root/step1").result()
        monkeypatch.chdir("elsewhere")
        saves.save({"x": torch.ones(3)}, "root/step2").result()
    assert committed_steps(tmp_path / "root") == [2, 1]
    assert not list((tmp_path / "elsewhere").iterdir())
