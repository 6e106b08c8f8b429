"""The recorder of stream order names the edge that PyTorch's ``DefaultStager`` lacks, and ours."""

from pathlib import Path

from rankproof.run import run

SCRIPT = Path(__file__).parents[1] / "data" / "stager_order.py"
SNAPSHOTS = SCRIPT.with_name("snapshots_in_a_row.py")


def test_the_recorder_names_the_step_that_default_stager_does_not_wait_for() -> None:
    report = run(SCRIPT, 1, launcher="warm", order=True, deadline_s=60)
    assert report.kinds == {"unordered_access"}, report.describe()
    assert "optimizer.step()" in report.describe() or "stager_order.py" in report.describe()


def test_snapshots_are_not_taken_anew_while_the_last_ones_are_copied() -> None:
    report = run(SNAPSHOTS, 1, launcher="warm", order=True, deadline_s=60)
    assert report.ok, report.describe()
