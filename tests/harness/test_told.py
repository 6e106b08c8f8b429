"""What a run is asked, how what it left is judged and told: all without a run."""

from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from written_recipes import command, write

from rankproof import checkpoints, judge, outputs, recipe, run, verdict
from rankproof.errors import summary
from rankproof.judge import Failure
from rankproof.last_line import ends_there
from rankproof.plugin import ScriptItem
from rankproof.protocol import Outcome, Record
from rankproof.report import Report
from rankproof.saves import SavedState, last_of
from rankproof.starts import takes_dir


def report(path: str = "jobs/llm/train.py", ranks: int = 2, **found) -> Report:
    return Report("train", str(Path.cwd() / path), ranks, "warm", "run it", **found)


def test_what_the_command_and_the_settings_say_goes_to_the_run(tmp_path, monkeypatch) -> None:
    asked = {}
    monkeypatch.setattr("rankproof.__main__.run", lambda *_, **to: asked.update(to) or report())
    script = write(tmp_path, "train.py", "print()\n")
    write(tmp_path, "rankproof.toml", 'deadline_s = 7\n[args]\n"train.py" = "--steps 1"\n')
    assert command(monkeypatch, "run", script, "--order", "--allow", "a", "--allow", "b") == 0
    assert (asked["deadline_s"], asked["args"], asked["order"]) == (7, ("--steps", "1"), True)
    assert asked["through"] == (Path("a"), Path("b"))
    assert command(monkeypatch, "run", script, "--deadline", "5", "--", "--steps", "3") == 0
    assert (asked["deadline_s"], asked["args"], asked["order"]) == (5.0, ("--steps", "3"), False)


def test_junit_says_where_a_script_lies_and_what_its_ranks_printed() -> None:
    printed = ["loss \x1b[1m3\n", "loss 3\n"]
    ((case,),) = ElementTree.fromstring(outputs.junit([report(outputs=printed)]))
    assert case.get("classname") == "jobs.llm"
    assert case.findtext("system-out") == "loss ?[1m3\n\nloss 3\n"


def test_github_gets_each_failure_at_its_line_and_what_is_not_judged(monkeypatch) -> None:
    lines = [f'  File "{Path.cwd()}/a,b:c.py", line {number}, in loss\n' for number in (9, 4)]
    found = [Failure("raised", "ValueError: 100% wrong", 0, hint="--cwd DIR")]
    found = report("a,b:c.py", outputs=["".join(lines)], failures=found)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert outputs.annotations(found) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(Path.cwd().parent))
    (said,) = outputs.annotations(found)
    where = f"file={Path.cwd().name}/a%2Cb%3Ac.py,line=4,title=raised on 2 ranks"
    assert said == f"::error {where}::ValueError: 100%25 wrong%0A--cwd DIR"
    (said,) = outputs.annotations(found := report("train.py", unjudged=["a port was taken"]))
    where = f"file={Path.cwd().name}/train.py,line=1,title=not judged"
    assert said == f"::warning {where}::a port was taken"
    with pytest.raises(pytest.skip.Exception, match="a port was taken"):  # pytest says it, too
        ScriptItem.runtest(SimpleNamespace(judge=lambda: found))


def test_the_last_lines_are_told_and_the_first_cause() -> None:
    lines = "".join(f"step {number}\n" for number in range(100))
    told = report(outputs=[lines], failures=[Failure("raised", "ValueError: nan")]).describe()
    assert "step 99\n" in told and "step 0\n" not in told
    said = "terminate called\n  what():  CUDA error: misaligned address\n"
    (killed,) = judge.judge_ranks([judge.Rank(1, said, "", -6, None, False, [])], False)
    assert killed.text == "ended by SIGABRT: CUDA error: misaligned address"
    assert judge.read_notes('{"event": "save"}\n{"even') == [{"event": "save"}], "it was cut short"
    with pytest.raises(OSError) as caught:
        try:
            raise ValueError("the loss is nan")
        finally:
            raise OSError("No space left")
    assert summary(caught.value) == "ValueError: the loss is nan (then OSError while cleaning up)"


def test_what_a_run_says_of_files_and_of_a_rendezvous_of_its_own(tmp_path) -> None:
    error = Failure("raised", "FileNotFoundError: No such file or directory: 'data.txt'")
    (tmp_path / "made" / "0").mkdir(parents=True)
    run._keep_made(tmp_path / "made", (tmp_path / "wanted",))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["made", "wanted"]
    for there in (False, True):
        run._hint_at_files_beside(report(failures=[error]), tmp_path)
        assert ("run it with --cwd" in error.hint) is there
        write(tmp_path, "data.txt", "")
    found = report(failures=[Failure("hung", "in recv"), Failure("raised", "ValueError: nan")])
    run._do_not_judge_its_rendezvous(found, "MASTER_PORT, line 3")
    assert found.verdict == "failed"


def test_what_is_turned_off_excuses_no_lost_save(tmp_path) -> None:
    for folder in ("ranks", "work/step1.incomplete"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path, "work/step1.incomplete/__0_0.distcp", "")
    write(tmp_path, "ranks/rank0.exit", "0")
    Record(finished=True, left_process_group=True).write(tmp_path / "ranks" / "rank0.json")
    Outcome(timed_out=False, left_processes=[], private=["/tmp"], written=[]).write(tmp_path)
    found, left = report(ranks=1), verdict.Left(tmp_path, 5.0, ())
    verdict.fill_in(found, left, run.Options(off=("left_process_group",)))
    assert found.kinds == {"checkpoint_incomplete"}, found.describe()


def test_saves_are_loaded_on_two_ranks_too_and_told_of_if_not_compared(monkeypatch) -> None:
    monkeypatch.setattr(verdict, "load_back", lambda *_: {})
    for ranks, loaded_on in ((1, {1, 2}), (2, {1})):
        asked = ["/run/step1"], [], report(ranks=ranks), verdict.Left(Path("/run"), 5.0, ())
        assert set(verdict._loaded(*asked)) == loaded_on
    (said,) = checkpoints.unjudged([], ["/run/step1"], {1: {"/run/step1": {"leaves": {}}}})
    assert said == "step1: it loads; what was passed to its save was not seen"
    first = SavedState("/run/last", "save", called="/run/last", leaves={0: {"a": {}, "b": {}}})
    later = SavedState("/run/last", "save", called="/run/last", leaves={0: {"a": {}}})
    first.events.add("removed")
    assert checkpoints.judge_replaced([first, later]) == []
    later.callers, later.failures = {0}, {0: "OSError: No space left"}
    assert last_of([first, later]) is first


def test_what_a_folder_says_of_its_scripts(tmp_path) -> None:
    (tmp_path / "env").mkdir()
    for name in ("env/pyvenv.cfg", "env/library.py", "_parts.py"):
        write(tmp_path, name, "")
    runs = write(tmp_path, "runs.py", "def main():\n    pass\n\nresult = main()\n")
    helps = write(tmp_path, "helps.py", "from logging import getLogger\nlogger = getLogger()\n")
    found = [(file, recipe.is_helper(file)) for file in recipe.python_files(tmp_path)]
    assert found == [(helps, True), (runs, False)]
    write(tmp_path, "README.md", "--nproc-per-node 3 runs.py\n--nproc-per-node 5 helps.py\n")
    write(tmp_path, "start.sh", "--nproc_per_node=16 runs.py\n--nproc_per_node=4 runs.py\n")
    assert recipe.asked_ranks(runs) == {3, 4}
    for said, takes in (("", True), ("type=int", False), ("nargs=2", False)):
        assert takes_dir(f"parser.add_argument('--dir', {said})") is takes
    exits = write(tmp_path, "exits.py", "try: exit()\nexcept OSError: pass\nelse: print()\n")
    assert not ends_there([FrameSummary(str(exits), 1, "<module>")], str(exits))
