"""Saves by another process survive what happens around that process."""

from functools import partial

import troubles

survives = partial(troubles.survives, "daemon_troubles")


def test_a_port_that_another_program_took_stops_no_save() -> None:
    survives("port_is_taken", ranks=1)


def test_a_daemon_that_dies_while_it_starts_is_reported_on_every_rank_and_none_is_left() -> None:
    for output in survives("daemon_dies_while_it_starts", ranks=2).outputs:
        assert "1: 'RuntimeError: Checkpoint background process is dead" in output


def test_a_job_that_goes_on_from_a_checkpoint_keeps_it() -> None:
    survives("resumed", ranks=2)


def test_a_save_after_an_interrupted_wait_does_not_run_beside_the_one_awaited() -> None:
    survives("interrupted", ranks=1)


def test_a_state_of_more_tensors_than_open_files_is_written_by_the_daemon() -> None:
    survives("more_tensors_than_open_files")


def test_a_start_without_memory_for_the_buffers_leaves_no_daemon() -> None:
    survives("no_memory_for_the_buffers")
