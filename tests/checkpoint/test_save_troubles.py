"""What a save may not do to training, to other ranks and to other checkpoints."""

import re
from pathlib import Path

import pytest
from troubles import survives

from rankproof.run import run

SCRIPT = Path(__file__).parents[1] / "data" / "save_troubles.py"


@pytest.mark.parametrize(
    "trouble",
    [
        "group_gone",  # an upload that finds no process group
        "ranks_disagree",
        "one_rank_cannot_stage",
        "disk_full_once",
        "last_save_fails",
        "cut_off_before",
        "went_back",
        "replicated",
    ],
)
def test_nothing_wrong_gets_the_name_of_a_checkpoint(trouble: str) -> None:
    survives("save_troubles", trouble, ranks=2)


@pytest.mark.parametrize(
    "trouble",
    [
        "before_the_first_step",  # with every optimizer of torch
        "interrupted",
        "other_dtype",
        "other_settings",
        "buffers_by_any_name",
        "staging_fails",
        "leaves_apart",
        "a_stager_that_nobody_waits_for",
    ],
)
def test_a_save_leaves_the_training_as_it_is(trouble: str) -> None:
    survives("save_troubles", trouble)


def test_what_cannot_be_written_raises_and_gets_no_name() -> None:
    """Its own asserts judge it: a named tuple cannot be loaded where its class is not known."""
    report = run(SCRIPT, 1, launcher="warm", args=("kinds_of_leaves",), deadline_s=40)
    assert not {"raised", "hung", "killed"} & report.kinds, report.describe()


def test_a_rank_that_raises_does_not_hang_the_job() -> None:
    """It saves alone, and waits for the others for as long as PATIENCE says."""
    report = run(SCRIPT, 2, launcher="warm", args=("one_rank_raises",), deadline_s=40)
    assert "raised" in report.kinds and "hung" not in report.kinds, report.describe()
    assert re.search("[Tt]imed out|closed by peer", report.describe())
