"""Other people's scripts, good and bad: the verdict, the exit status, the cause that is named.

Not judged, with its cause, counts as right for what the harness cannot know; passed without being
judged does not.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankproof.run import Report, run

REPO = Path(__file__).resolve().parents[2]
DATA = REPO / "tests" / "data"
EXIT = {"passed": 0, "failed": 1, "not judged": 2}


@dataclass(frozen=True)
class Case:
    """What must come of a script; ``cause`` is a pattern of the report's first lines."""

    verdict: str
    cause: str = ""
    kind: str = ""
    launcher: str = ""  # the only one that it is for
    gate: str | None = None
    order: bool = False
    args: tuple[str, ...] = ()
    deadline_s: float = 120.0


def good(cause: str = "passed|ran; nothing to judge", **settings) -> Case:
    return Case("passed", cause, **settings)


def bad(kind: str, cause: str, **settings) -> Case:
    return Case("failed", cause, kind, **settings)


def unknown(cause: str, **settings) -> Case:
    return Case("not judged", cause, **settings)


GOOD = {
    "fsdp1": good("judged: 1 save, 2 leaves"),
    "ddp": good("ran; nothing to judge"),
    "spawns": good("note: whether the ranks that it starts .* is not seen", launcher="python"),
    "starts_processes": good(launcher="auto"),
    "spawned_ranks_save": unknown("what the processes that it starts save", launcher="auto"),
    "launcher_starts_ranks": good(launcher="auto"),
    "ends_at_once_at_its_end": good(),
    "saves_by_position": good("judged: 1 save, 1 leaf"),
    "overwrites_a_large_checkpoint": unknown("larger than 256 MiB: not compared"),
    "port_is_taken": unknown("a port was taken, by this run or another program"),
    "one_rank_goes_on": good(),
    "one_rank_ends_at_once": good(),
    "sets_its_port": unknown("sets its ranks' rendezvous itself .MASTER_PORT, line", deadline_s=5),
    "exits_like_click": good(),
    "exits_in_main": good(),
    "atexit_destroys_the_group": good(),
    "persistent_workers": good(),
    "rank_0_awaits_alone": good("held by the gate", gate="hold_write"),
    "temporary_directory_is_gone": good("1 save, 1 leaf|2 saves, 2 leaves"),
    "reads_home": good(args=(str(Path.home()),)),
    "writes_to_a_cache": good("note: written to caches: .*rankproof-test/downloaded"),
    "cleans_up_in_tmp": good(),
    "fsspec_writer": unknown("step1: written by FsspecWriter, not loaded back"),
    "writer_without_a_path": unknown("written by Memory, not loaded back"),
    "saves_own_class": unknown("holds objects of the script's own classes"),
    "keeps_a_dict_whole": unknown("its planner stores a nested dict as one object"),
    "saves_from_a_thread": good("judged: 1 save, 1 leaf"),
    "forked_process_saves_too": good("judged: 4 saves, 4 leaves"),
    "writes_its_plan_itself": good("judged: 2 saves, 2 leaves"),
    "renames_when_complete": good("judged: 1 save, 1 leaf"),
    "overwrites_its_last_checkpoint": good("judged: 3 saves, 3 leaves"),
    "saves_again_after_a_failure": good("judged: 1 save, 1 leaf"),
    "waits_in_short_turns": good("judged: 2 saves, 2 leaves"),
    "waits_in_short_turns.held": good("judged: 2 saves, 2 leaves", gate="hold_write"),
    "looks_how_its_children_ended": good(),
    "torch_stream_in_order": good("1 stream", order=True),
    "async_gradients_in_order": good("18 asynchronous collectives", order=True),
    "exits_in_main.order": good("no stream was made, so there was no order to judge", order=True),
}
BAD = {
    "stores_its_rank": bad("raised", "ValueError: the loss is not finite"),
    "saves_elsewhere": bad("wrote_elsewhere", r"(?s)\A(?!.*checkpoint_missing)"),
    "launcher_starts_what_fails": bad(
        "raised", "ChildFailedError, rank 1: .*the loss is not finite", launcher="auto"
    ),
    "closes_its_output": bad("raised", "ValueError: the loss is not finite"),
    "raises": bad("raised", "ValueError: the loss is not finite"),
    "hangs": bad("hung", "still running at the deadline, in recv", deadline_s=3),
    "killed": bad("killed", "ended by SIGKILL"),
    "exits_early": bad("exited_early", r"sys.exit.0. before the script's last line"),
    "leaves_a_process": bad("left_process", "Event"),
    "leaves_a_thread": bad("left_thread", "uploader", deadline_s=4),
    "leaves_a_process_group": bad("left_process_group", "still initialised"),
    "writes_elsewhere": bad("wrote_elsewhere", "writes_elsewhere.log(.|\n)*--allow DIR"),
    "deprecated": bad("deprecation_warning", "old_name is deprecated; use new_name"),
    "two_saves_in_flight": bad("overlapping_saves", "began while that of step1 was in flight"),
    "one_rank_saves_its_shards": bad(
        "checkpoint_incomplete", "weight: 32 of 64 elements are in the checkpoint"
    ),
    "never_awaits": bad("never_awaited", "step1: the script ended without having waited for it"),
    "atexit_hangs": bad("hung", "after the script's last line", deadline_s=4),
    "atexit_raises": bad("raised", "OSError: the last log was not written .in a callback of atexi"),
    "crashes_behind_the_interpreter": bad("killed", "SIGABRT, after the script's last line"),
    "writes_home": bad("wrote_elsewhere", "rankproof-left.txt"),
    "subprocess_writes": bad("wrote_elsewhere", "/var/tmp/rankproof-left"),
    "live_stager": bad("checkpoint_wrong", "1 of 1 leaves are not what was passed to async_save"),
    "live_stager_fsspec": unknown("step1: written by FsspecWriter, not loaded back"),
    "writes_nothing_to_no_path": unknown("written by Memory, not loaded back"),
    "changes_what_it_planned": bad(
        "checkpoint_wrong", "not what was passed to a writer of its own"
    ),
    "left_unfinished": bad("checkpoint_incomplete", "still has the name of an unfinished save"),
    "metadata_removed": bad("checkpoint_incomplete", "No such file|metadata"),
    "differs_between_ranks": bad(
        "checkpoint_wrong", "x .rank 1.; the ranks passed different values of x"
    ),
    "thread_raises": bad("raised", "OSError: No space left on device .in thread"),
    "exits_with_an_error": bad("exited_early", "sys.exit.1. before"),
    "exits_at_once": bad("missing_record", "ended with exit code 0|no record of ranks"),
    "exits_on_one_rank": bad("exited_early", r"rank 1.: sys.exit.0. before"),
    "spawned_rank_raises": bad("raised", "the loss is not finite", launcher="python"),
    "raises_while_handling": bad("raised", "raised .rank .*: ValueError: the batch is empty"),
    "barrier_on_one_rank": bad("hung", "still running at the deadline", deadline_s=3),
    "timed_wait": bad("never_awaited", "step1: the script ended without having waited for it"),
    "timed_wait.held": bad("never_awaited|checkpoint_missing", "step1", gate="hold_write"),
    "swallows_a_failed_save": bad("save_failed", "OSError: No space left on device, and the scri"),
    "one_ranks_save_fails": bad("save_failed", "checkpoint_wrong: step1.* part1 .rank 1: not in"),
    "second_save_replaces_the_first": bad("checkpoint_wrong", "a later save into it replaced mod"),
    "overwritten_save_was_wrong": bad("checkpoint_wrong", "last.*not what was passed to async_s"),
    "child_dies": bad("child_died", "prepares ended with exit code 1, started at child_dies.py:12"),
    "torch_streams_unordered": bad("unordered_access", ":11 writes(.|\n)*:12 writes", order=True),
    "async_used_before_wait": bad(
        "used_before_wait", ":10 reads .div.(.|\n)*all_reduce, issued at .*:9", order=True
    ),
    "freed_without_record_stream": bad("unordered_access", "memory freed since", order=True),
}
CASES = [("good", name, case) for name, case in GOOD.items()]
CASES += [("bad", name, case) for name, case in BAD.items()]


def judge(folder: str, name: str, case: Case, launcher: str) -> Report:
    script = DATA / folder / f"{name.partition('.')[0]}.py"
    return run(
        script,
        2,
        launcher=case.launcher or launcher,
        gate=case.gate,
        order=case.order,
        args=case.args,
        deadline_s=case.deadline_s,
    )


def is_right(report: Report, case: Case) -> bool:
    """Whether verdict, exit status, kind and the cause in the first lines are as they must be."""
    said = report.describe().partition("--- rank")[0]
    return (
        report.verdict == case.verdict
        and report.exit_code == EXIT[case.verdict]
        and (not case.kind or re.fullmatch(case.kind, report.failures[0].kind))
        and re.search(case.cause, said) is not None
    )


@pytest.mark.parametrize(("folder", "name", "case"), CASES, ids=[name for _, name, _ in CASES])
def test_a_script_gets_its_verdict_and_its_cause(folder: str, name: str, case: Case) -> None:
    report = judge(folder, name, case, "warm")
    if case.kind == "wrote_elsewhere" and "private mounts" in "".join(report.notes):
        pytest.skip("no private mounts on this system")
    assert is_right(report, case), report.describe()


def test_every_script_is_in_the_table() -> None:
    for folder, cases in (("good", GOOD), ("bad", BAD)):
        stems = {path.stem for path in (DATA / folder).glob("*.py")}
        assert stems == {name.partition(".")[0] for name in cases}


def test_a_script_that_starts_its_ranks_itself_is_not_judged_by_another_launcher() -> None:
    report = run(DATA / "good" / "spawns.py", 2, launcher="warm")
    assert (report.verdict, report.exit_code) == ("not judged", 2)
    assert re.search(
        r"starts its ranks itself \(spawn, line \d+\): use --launcher python", report.describe()
    )


@pytest.mark.parametrize("name", ["port_is_taken", "sets_its_port"])
def test_a_run_that_tells_nothing_of_its_script_is_not_ok(name: str) -> None:
    """Of what ran to its end and is judged in part, the rest is known."""
    report = judge("good", name, GOOD[name], "warm")
    assert (report.verdict, report.ok) == ("not judged", False), report.describe()


def test_a_run_that_is_judged_in_part_is_ok() -> None:
    report = judge("good", "fsspec_writer", GOOD["fsspec_writer"], "warm")
    assert (report.verdict, report.ok) == ("not judged", True), report.describe()
