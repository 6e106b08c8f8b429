"""What a save may not do to training, to other ranks and to other checkpoints."""

from pathlib import Path

from troubles import survives

from rankproof.run import run

SCRIPT = Path(__file__).parents[1] / "data" / "save_troubles.py"


def test_nothing_wrong_gets_the_name_of_a_checkpoint() -> None:
    """A full disk, files of before, a rank that cannot stage, a group that is gone."""
    two = ("disk_full", "cut_off_before", "went_back", "group_gone", "one_rank_cannot_stage")
    survives("save_troubles", *two, ranks=2)


def test_a_save_leaves_the_training_as_it_is() -> None:
    """Before the first step with every optimizer of torch; another state than at the last save."""
    one = ("before_the_first_step", "another_state", "staging_fails", "leaves_apart")
    survives("save_troubles", *one, "a_stager_that_nobody_waits_for")


def test_what_cannot_be_written_raises_and_gets_no_name() -> None:
    """Its own asserts judge it: a named tuple cannot be loaded where its class is not known."""
    report = run(SCRIPT, 1, launcher="warm", args=("kinds_of_leaves",), deadline_s=40)
    assert not {"raised", "hung", "killed"} & report.kinds, report.describe()
