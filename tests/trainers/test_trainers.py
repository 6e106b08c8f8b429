"""What a trainer's own asynchronous save does, found without a GPU."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
from selection import CONTROLS, REPO
from troubles import survives

from overlap_recipes.checkpoint.stores.directory import Folder
from rankproof.recipe import Control, load_recipe
from rankproof.run import run

PINNED = REPO / "tests" / "data" / "torchtitan_pinned.py"


def test_torchtitans_pinned_copy_does_not_wait_for_the_step() -> None:
    """Its staging thread reads what ``optimizers.step()`` wrote, and no event orders the two.

    On a GPU with work queued the checkpoint then holds the weights of the step before.
    """
    pytest.importorskip("torchtitan")
    report = run(PINNED, 1, launcher="warm", order=True)
    assert report.kinds == {"unordered_access"}, report.describe()
    conflict = report.failures[0].text
    step = PINNED.read_text().splitlines().index("        optimizers.step()") + 1
    assert "_state_dict_stager.py" in conflict
    assert f"torchtitan_pinned.py:{step} writes" in conflict


TRAINERS = REPO / "recipes_source" / "trainers"
RAISES = """if {step} == 5 and torch.distributed.get_rank() == 1:
{indent}    raise RuntimeError("rank 1 stops")
"""


class Loop(NamedTuple):
    """Where a recipe's training has made a step, and how it counts them."""

    line: str
    step: str
    file: Path | None = None  # of the library; None: the recipe's own


LOOPS = {
    "torchtitan_checkpointer": Loop(
        line="                losses[self.step] = loss.item()\n", step="self.step"
    ),
    "lightning_strategy": Loop(
        line="        self.losses[self.global_step + 1] = loss.item()\n",
        step="self.global_step + 1",
    ),
    "transformers_trainer": Loop(
        line="        super()._save_checkpoint(model, trial)\n",
        step="self.state.global_step + 1",
        file=REPO / "overlap_recipes" / "trainers" / "transformers.py",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_nobody_hangs_when_one_rank_stops(name: str) -> None:
    """One rank raises beside a save: every trainer leaves, and no clean-up waits for the others."""
    recipe = load_recipe(TRAINERS / f"{name}.py", CONTROLS)
    if recipe.missing:
        pytest.skip(f"needs {', '.join(recipe.missing)}")
    loop = LOOPS[name]
    indent = " " * (len(loop.line) - len(loop.line.lstrip()))
    control = Control(
        name="one_rank_stops",
        says="Raise on one rank",
        find=loop.line,
        replace=loop.line + indent + RAISES.format(step=loop.step, indent=indent),
        fails={"raised": ("RuntimeError: rank 1 stops",)},
        file=loop.file,
        deadline_s=recipe.deadline_s,
    )
    report = run(recipe.path, 2, launcher="warm", control=control, deadline_s=60)
    assert control.caught(report.failures), report.describe()
    assert any("rank 1 stops" in failure.text for failure in report.failures), report.describe()


@pytest.mark.parametrize("trainer", ["torchtitan", "lightning", "transformers"])
def test_saves_survive_what_users_do(trainer: str) -> None:
    """Old folders, a second run, LoRA, LBFGS, settings that this class cannot serve, and more."""
    pytest.importorskip(trainer)
    if trainer == "transformers":
        pytest.importorskip("accelerate")
        pytest.importorskip("peft")
    survives("trainer_troubles", trainer, ranks=2)


def test_what_would_fail_behind_the_last_step_is_refused_before_the_first() -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from overlap_recipes.trainers.transformers import OverlappedTrainer

    trainer = object.__new__(OverlappedTrainer)
    trainer.args = SimpleNamespace(load_best_model_at_end=True)
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        trainer.train()


def test_a_lightning_checkpoint_is_whole_until_its_successor_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``last.ckpt`` is replaced at every save; a crash in the middle leaves one of the two."""
    last, aside = tmp_path / "last.ckpt", tmp_path / "last.ckpt.incomplete"
    folder = Folder(last)
    folder.place = str(aside)
    for place, step in ((last, "1"), (aside, "2")):
        place.mkdir()
        for name in (".metadata", "__0_0.distcp", "meta.pt"):
            (place / name).write_text(step)

    rename = Path.rename

    def crash(*_) -> None:
        raise OSError("the machine is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda x, to: crash() if x == aside else rename(x, to))
        with pytest.raises(OSError, match="gone"):
            folder.commit({})
    kept = last if last.exists() else tmp_path / "last.ckpt.replaced"
    assert len(list(kept.iterdir())) == 3, "the old one is broken and the new one has no name"

    folder.commit({})
    assert {file.read_text() for file in last.iterdir()} == {"2"}
    (last / "tokenizer.json").write_text("mine")
    shutil.copytree(last, aside, ignore=lambda *_: ["tokenizer.json"])
    with pytest.raises(OSError, match="not empty"):
        folder.commit({})
    assert len(list(last.iterdir())) == 4, "files of others are left alone"
    shutil.rmtree(aside)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_transformers_next_save_raises_that_ranks_differed_in_the_one_before() -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from transformers import Trainer

    from overlap_recipes.checkpoint.saves import Saves
    from overlap_recipes.checkpoint.state import DifferingRanks
    from overlap_recipes.trainers.transformers import OverlappedTrainer

    differed = Future()
    differed.set_exception(DifferingRanks("a counter"))
    trainer = object.__new__(OverlappedTrainer)
    trainer.saves = object.__new__(Saves)
    trainer.saves.latest = differed
    trainer.saves.compared = differed
    trainer.saves.none_before = Future()
    trainer.args = SimpleNamespace(output_dir="none", save_total_limit=0, should_save=False)
    with (
        patch.object(Trainer, "_save_checkpoint"),
        pytest.raises(DifferingRanks, match="a counter"),
    ):
        trainer._save_checkpoint(None, None)


def test_lightning_refuses_positions_of_other_ranks() -> None:
    pytest.importorskip("lightning")
    from overlap_recipes.trainers.lightning import rest_of

    rests = [{"loops": {"taken": rank}, "of": rank} for rank in range(2)]
    path = Path("last.ckpt")
    assert rest_of(rests, 1, 2, path)["of"] == 1
    with pytest.raises(ValueError, match="saved on 2 ranks whose loaders were at other positions"):
        rest_of(rests, 0, 3, path)
    alike = [{"loops": {"taken": 4}, "of": rank} for rank in range(2)]
    assert rest_of(alike, 2, 3, path)["of"] == 0
