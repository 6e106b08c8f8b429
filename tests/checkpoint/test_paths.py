"""Paths as users give them: strings, relative ones, and a device that is a string."""

from pathlib import Path

import pytest
import torch
from kept_saves import KeptSaves, newest_step, resume, steps_in

from overlap_recipes.checkpoint import Saves, TrainingState

pytestmark = pytest.mark.usefixtures("one_rank")


def build(step: int) -> TrainingState:
    model = torch.nn.Linear(3, 3)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1))
    state.step = step
    return state


def test_a_root_that_is_a_string_is_saved_to_and_resumed_from(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    state = build(step=7)
    with KeptSaves(root, "cpu", state.model.buffers) as saves:
        saves.save({"app": state}, 7)
    assert steps_in(root) == [7]
    assert newest_step(root) == 7
    other = build(step=0)
    assert resume({"app": other}, root) == 7
    assert torch.equal(other.model.weight, state.model.weight)


@pytest.mark.parametrize("kept", [False, True], ids=["saves", "kept"])
def test_a_job_that_goes_to_another_directory_saves_where_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    block = KeptSaves("root") if kept else Saves("cpu")
    with block as saves:
        saves.save({"x": torch.ones(3)}, 1 if kept else "root/step1").result()
        monkeypatch.chdir("elsewhere")
        saves.save({"x": torch.ones(3)}, 2 if kept else "root/step2").result()
    assert steps_in(tmp_path / "root") == [2, 1]
    assert not list((tmp_path / "elsewhere").iterdir())
