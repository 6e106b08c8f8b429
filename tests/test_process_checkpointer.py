"""Saves by another process survive what happens around that process."""

from pathlib import Path

from harness.run import run

TROUBLES = Path(__file__).parent / "data" / "daemon_troubles.py"


def test_a_port_that_another_program_took_stops_no_save() -> None:
    report = run(TROUBLES, 1, launcher="warm", args=("port_is_taken",), deadline_s=60)
    assert report.ok, report.describe()


def test_a_daemon_that_dies_while_it_starts_is_reported_on_every_rank_and_none_is_left() -> None:
    report = run(TROUBLES, 2, launcher="warm", args=("daemon_dies_while_it_starts",), deadline_s=60)
    assert report.ok, report.describe()
    for output in report.outputs:
        assert "1: 'RuntimeError: Checkpoint background process is dead" in output


def test_a_job_that_goes_on_from_a_checkpoint_keeps_it() -> None:
    report = run(TROUBLES, 2, launcher="warm", args=("resumed",), deadline_s=60)
    assert report.ok, report.describe()


def test_a_save_after_an_interrupted_wait_does_not_run_beside_the_one_awaited() -> None:
    report = run(TROUBLES, 1, launcher="warm", args=("interrupted",), deadline_s=60)
    assert report.ok, report.describe()
