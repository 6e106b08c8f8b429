"""The recorder of stream order finds nothing where snapshots are ordered."""

from pathlib import Path

from rankproof.run import run

SNAPSHOTS = Path(__file__).parents[1] / "data" / "snapshots_in_a_row.py"


def test_snapshots_are_not_taken_anew_while_the_last_ones_are_copied() -> None:
    report = run(SNAPSHOTS, 1, launcher="warm", order=True, deadline_s=60)
    assert report.ok, report.describe()
