"""Other people's scripts, good and bad: the verdict, the exit status, the cause that is named.

Not judged, with its cause, counts as right for what the harness cannot know; passed without being
judged does not.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankproof.run import Report, run

DATA = Path(__file__).resolve().parents[1] / "data"
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
    ok: bool = True  # of what is judged in part, as of what passes; False if nothing is known


def good(cause: str = "passed|ran; nothing to judge", **settings) -> Case:
    return Case("passed", cause, **settings)


def bad(kind: str, cause: str, **settings) -> Case:
    return Case("failed", cause, kind, ok=False, **settings)


def unknown(cause: str, **settings) -> Case:
    return Case("not judged", cause, **settings)


GOOD = {
    "fsdp1": good("judged: 1 save, 2 leaves"),
    "ddp": good("ran; nothing to judge"),
    "spawns": good("(?s)on its own ranks: .*ranks that .* is not seen", launcher="python"),
    "spawns.order": unknown("in which order the ranks that .* use", launcher="python", order=True),
    "spawns.warm": unknown(r"itself \(spawn, line \d+\): use --launcher python", ok=False),
    "port_is_taken": unknown("a port was taken, by this run or another program", ok=False),
    "sets_its_port": unknown("rendezvous itself .MASTER_PORT, line", deadline_s=5, ok=False),
    "exits_in_main": good(),
    "rank_0_awaits_alone": good("held by the gate", gate="hold_write"),
    "writes_to_a_cache": good("note: written to caches: .*rankproof-test/downloaded"),
    "fsspec_writer": unknown("step1: written by FsspecWriter, not loaded back"),
    "saves_again_after_a_failure": good("judged: 1 save, 1 leaf"),
    "torch_stream_in_order": good("1 stream", order=True),
    "async_gradients_in_order": good("18 asynchronous collectives", order=True),
    "exits_in_main.order": good("no stream was made, so there was no order to judge", order=True),
}
BAD = {
    "saves_elsewhere": bad("wrote_elsewhere", r"(?s)\A(?!.*checkpoint_missing)"),
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
    "one_rank_saves_its_shards": bad("checkpoint_incomplete", "weight: 32 of 64 elements are in"),
    "never_awaits": bad("never_awaited", "step1: the script ended without having waited for it"),
    "atexit_hangs": bad("hung", "after the script's last line", deadline_s=4),
    "crashes_behind_the_interpreter": bad("killed", "SIGABRT, after the script's last line"),
    "writes_home": bad("wrote_elsewhere", "rankproof-left.txt"),
    "subprocess_writes": bad("wrote_elsewhere", "/var/tmp/rankproof-left"),
    "live_stager": bad("checkpoint_wrong", "1 of 1 leaves are not what was passed to async_save"),
    "left_unfinished": bad("checkpoint_incomplete", "still has the name of an unfinished save"),
    "differs_between_ranks": bad("checkpoint_wrong", "x .rank 1.; the .* different values of x"),
    "thread_raises": bad("raised", "OSError: No space left on device .in thread"),
    "exits_on_one_rank": bad("exited_early", r"rank 1.: sys.exit.0. before"),
    "barrier_on_one_rank": bad("hung", "still running at the deadline", deadline_s=3),
    "swallows_a_failed_save": bad("save_failed", "OSError: No space left on device, and the scri"),
    "second_save_replaces_the_first": bad("checkpoint_wrong", "a later save into it replaced mod"),
    "child_dies": bad("child_died", "prepares ended with exit code 1, started at child_dies.py:12"),
    "torch_streams_unordered": bad("unordered_access", ":11 writes(.|\n)*:12 writes", order=True),
    "async_used_before_wait": bad("used_before_wait", "(?s):10 .*uce, issued at .*:9", order=True),
    "freed_without_record_stream": bad("unordered_access", "memory freed since", order=True),
}
CASES = [("good", name, case) for name, case in GOOD.items()]
CASES += [("bad", name, case) for name, case in BAD.items()]


def judge(folder: str, name: str, case: Case, launcher: str) -> Report:
    script = DATA / folder / f"{name.partition('.')[0]}.py"
    launcher = case.launcher or launcher
    settings = {"gate": case.gate, "order": case.order, "args": case.args}
    return run(script, 2, launcher=launcher, deadline_s=case.deadline_s, **settings)


def is_right(report: Report, case: Case) -> bool:
    """Whether verdict, exit status, kind and the cause in the first lines are as they must be."""
    said = report.describe().partition("--- rank")[0]
    return (
        report.verdict == case.verdict
        and (report.exit_code, report.ok) == (EXIT[case.verdict], case.ok)
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
