"""The harness reports what a bad recipe did, so that a person can use it, and leaves nothing."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sizes
from selection import REPO
from test_verdicts import BAD, is_right, judge

from rankproof.__main__ import main
from rankproof.judge import Failure, Rank
from rankproof.kept import KeptRun
from rankproof.kept import _present_code as kept_code
from rankproof.leader import descendants, dump_stacks
from rankproof.recipe import (
    Control,
    RecipeError,
    discover,
    load_controls,
    load_recipe,
)
from rankproof.run import HOME, Report, _own, _written, load_back, reproduce, run
from rankproof.sources import code_sha256

BAD_SCRIPTS = REPO / "tests" / "data" / "bad"


def harness_processes() -> list[str]:
    """The processes of this one's servers: each run's leader and ranks are gone."""
    return [line for line in descendants().values() if "rankproof." in line]


@pytest.mark.parametrize("name", ["hangs", "killed", "leaves_a_process"])
def test_a_bad_recipe_is_reported_under_torchrun_and_nothing_of_it_is_left(name: str) -> None:
    case = BAD[name]
    report = judge("bad", name, case, "torchrun")
    assert is_right(report, case), report.describe()
    left = harness_processes()
    assert all("rankproof.server" in line for line in left), left
    assert len(left) == len(servers()), "a leader is a fork of its server"
    described = report.describe()
    for wanted in (f"{name} on 2 ranks: FAILED", "rank 0, last lines", "rank 1, last lines"):
        assert wanted in described
    assert f"python -m harness run tests/data/bad/{name}.py --ranks 2" in described
    if name == "hangs":
        assert described.count("stacks at the deadline") == 2
        assert "in wait_for_a_message" in described


def test_the_deadline_counts_from_the_recipes_first_line(tmp_path, monkeypatch) -> None:
    """However long a busy machine takes to import torch."""
    slow = write(tmp_path, "sitecustomize.py", "import time\ntime.sleep(2)\n")
    monkeypatch.setenv("PYTHONPATH", str(slow.parent))
    report = run(write(tmp_path, "recipe.py", "x = 1\n"), 1, launcher="torchrun", deadline_s=1)
    assert report.ok, report.describe()


def servers() -> list:
    return [s for s in _own.__dict__.values() if s.process.poll() is None]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def test_a_recipe_gets_its_own_arguments_and_so_does_the_command_that_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = write(tmp_path, "fails.py", "import sys\nraise ValueError(sys.argv[1:])\n")
    command = ["harness", "run", str(path), "--ranks", "1", "--launcher", "warm"]
    monkeypatch.setattr(sys, "argv", [*command, "--", "--layers", "4"])
    assert main() == 1
    printed = capsys.readouterr().out
    assert "ValueError: ['--layers', '4']" in printed
    assert printed.rstrip().endswith("--ranks 1 -- --layers 4")


SAVES = """
    import os
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        weight = torch.arange(8.0)
        dcp.save({{"weight": weight}}, checkpoint_id="step1")
        {after}
        dist.barrier()
        dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("after", "kinds"),
    [
        ("pass", set()),
        (
            "os.remove('step1/.metadata')",
            {"checkpoint_incomplete"},
        ),
        (
            "os.remove('step1/__0_0.distcp')",
            {"checkpoint_incomplete"},
        ),
    ],
)
def test_a_checkpoint_must_load_in_a_fresh_process(tmp_path, after: str, kinds: set) -> None:
    recipe = write(tmp_path, "saves.py", SAVES.format(after=after))
    assert run(recipe, 1, launcher="warm").kinds == kinds


def test_a_checkpoint_with_other_values_than_were_passed_is_wrong(tmp_path) -> None:
    """A stager that hands out the live tensor: what is on disk is a later step."""
    recipe = write(
        tmp_path,
        "live.py",
        """
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import AsyncStager

        class LiveStager(AsyncStager):
            _synchronize_after_execute = False

            def stage(self, state_dict):
                state_dict["weight"] += 1
                return state_dict

            def close(self):
                pass

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            state = {"weight": torch.zeros(4)}
            dcp.async_save(state, checkpoint_id="step1", async_stager=LiveStager()).result()
            dist.destroy_process_group()
        """,
    )
    report = run(recipe, 1, launcher="warm")
    assert report.kinds == {"checkpoint_wrong"}, report.describe()
    assert "weight" in report.failures[0].text


LISTS = """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import AsyncStager

    class LaterStager(AsyncStager):
        _synchronize_after_execute = False

        def stage(self, state_dict):
            state_dict["{key}"] = {later}
            return state_dict

        def close(self):
            pass

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        state = {{"losses": [1, 2.5, None], "shape": (1, "a"), "random": b"state"}}
        dcp.async_save(state, checkpoint_id="step1", async_stager=LaterStager()).result()
        dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("key", "later"),
    [("losses", "[1, 2.5, None, 3]"), ("shape", "(1, 'b')"), ("random", "b'other'")],
)
def test_lists_tuples_and_bytes_are_compared_too(tmp_path, key: str, later: str) -> None:
    recipe = write(tmp_path, "later.py", LISTS.format(key=key, later=later))
    report = run(recipe, 1, launcher="warm")
    assert report.kinds == {"checkpoint_wrong"}, report.describe()
    assert f"{key} ({later} instead of" in report.failures[0].text


def test_lists_tuples_and_bytes_that_are_as_passed_are_right(tmp_path) -> None:
    recipe = write(tmp_path, "same.py", LISTS.format(key="shape", later="(1, 'a')"))
    report = run(recipe, 1, launcher="warm")
    assert report.ok, report.describe()


def test_a_plain_tensor_that_differs_between_ranks_is_wrong(tmp_path) -> None:
    recipe = write(
        tmp_path,
        "differs.py",
        """
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            dcp.save({"mean": torch.full((2,), float(dist.get_rank()))}, checkpoint_id="step1")
            dist.destroy_process_group()
        """,
    )
    report = run(recipe, 2, launcher="warm")
    assert report.kinds == {"checkpoint_wrong"}, report.describe()


SAVES_IN_BACKGROUND = """
    import asyncio, concurrent.futures, os, threading, time
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    class NeverFinished(dcp.FileSystemWriter):
        def finish(self, *args, **kwargs):
            open("finishing", "w").close()
            threading.Event().wait()

    async def until_done(future):
        await asyncio.wrap_future(future)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        group = dist.new_group(backend="gloo")
        ended = threading.Event()
        writer = {writer}("step1")
        saved = dcp.async_save(
            {{"weight": torch.ones(4)}}, storage_writer=writer, process_group=group
        )
        {ending}
        dist.destroy_process_group()
"""
CALL_BACK = "saved.add_done_callback(lambda _: ended.set())"
UNTIL_BEGUN = "[None for _ in iter(lambda: os.path.exists('step1'), True)]"
UNTIL_FINISHING = "[None for _ in iter(lambda: os.path.exists('finishing'), True)]"


def save_in_background(
    folder: Path, ending: str, writer: str = "dcp.FileSystemWriter", order: bool = False
) -> Report:
    text = SAVES_IN_BACKGROUND.format(writer=writer, ending=ending)
    recipe = write(folder, "saves_in_background.py", text)
    return run(recipe, 1, launcher="warm", gate="hold_write", order=order, deadline_s=30)


@pytest.mark.parametrize(
    "ending",
    [
        "while not saved.done(): pass",
        "for future in concurrent.futures.as_completed([saved]): future.result()",
        f"{CALL_BACK}; ended.wait()",
        f"{CALL_BACK}\n        while not ended.is_set(): pass",
        "asyncio.run(until_done(saved))",
    ],
)
def test_a_recipe_may_learn_of_the_end_of_a_held_write_in_any_way(tmp_path, ending: str) -> None:
    report = save_in_background(tmp_path, ending)
    assert report.ok, report.describe()


@pytest.mark.parametrize(
    ("ending", "writer", "text"),
    [
        (f"saved.done(); {UNTIL_BEGUN}", "dcp.FileSystemWriter", "the directory is empty"),
        (f"saved.done(); saved.done(); {UNTIL_FINISHING}", "NeverFinished", "before it knew"),
        (f"{CALL_BACK}; {UNTIL_BEGUN}", "dcp.FileSystemWriter", "the directory is empty"),
        (f"{CALL_BACK}; time.sleep(0); {UNTIL_FINISHING}", "NeverFinished", "before it knew"),
    ],
)
def test_to_ask_once_or_to_be_called_back_is_not_to_wait(tmp_path, ending, writer, text) -> None:
    report = save_in_background(tmp_path, ending, writer)
    assert "checkpoint_missing" in report.kinds, report.describe()
    missing = [failure for failure in report.failures if failure.kind == "checkpoint_missing"]
    assert text in missing[0].text
    assert "never awaited" in missing[0].hint


def test_a_poll_orders_what_the_recipe_does_next_after_the_upload(tmp_path) -> None:
    report = save_in_background(tmp_path, "while not saved.done(): pass", order=True)
    assert report.ok, report.describe()


SAVES_AND_MOVES = """
    import os, shutil
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    class FullDisk(dcp.FileSystemWriter):
        def prepare_local_plan(self, plan):
            raise OSError("No space left on device")

    def save(value, directory, **settings):
        dcp.save({{"weight": torch.full((4,), float(value))}}, checkpoint_id=directory, **settings)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        {does}
        dist.barrier()
        dist.destroy_process_group()
"""
FAILS_UNSEEN = (
    "dcp.async_save({}, storage_writer=FullDisk('step1'), "
    "process_group=dist.new_group(backend='gloo'))"
)


def save_and_move(folder: Path, does: str, ranks: int = 2) -> Report:
    text = SAVES_AND_MOVES.format(does=does.replace("\n", "\n        "))
    return run(write(folder, "saves_and_moves.py", text), ranks, launcher="warm")


@pytest.mark.parametrize(
    ("does", "checkpoints"),
    [
        ("save(1, 'aside')\nif rank == 0: os.replace('aside', 'step1')", ["step1"]),
        (
            "for n in (1, 2):\n    save(n, 'aside')\n"
            "    if rank == 0: os.rename('aside', f'step{n}')\n    dist.barrier()",
            ["step1", "step2"],
        ),
        (
            "os.makedirs('aside', exist_ok=True)\nsave(1, 'aside/step1')\n"
            "if rank == 0: shutil.move('aside', 'published')",
            ["step1"],
        ),
    ],
)
def test_a_checkpoint_is_judged_where_it_was_renamed_to(tmp_path, does, checkpoints) -> None:
    report = save_and_move(tmp_path, does)
    assert report.ok, report.describe()
    assert report.checkpoints == checkpoints


def test_a_renamed_checkpoint_must_still_load(tmp_path) -> None:
    does = "save(1, 'aside')\nos.remove('aside/.metadata')\nos.rename('aside', 'step1')"
    report = save_and_move(tmp_path, does, ranks=1)
    assert report.kinds == {"checkpoint_incomplete"}, report.describe()


@pytest.mark.parametrize(
    "does",
    [
        "save(rank, f'rank{rank}', no_dist=True)",
        "if rank == 0: save(7, 'vocabulary', no_dist=True)\ndist.barrier()\nsave(1, 'step1')",
    ],
)
def test_ranks_may_save_alone(tmp_path, does: str) -> None:
    report = save_and_move(tmp_path, does)
    assert report.ok, report.describe()
    assert len(report.checkpoints) == 2


def test_a_directory_emptied_before_the_save_excuses_nothing(tmp_path) -> None:
    does = f"shutil.rmtree('step1', ignore_errors=True)\n{FAILS_UNSEEN}"
    report = save_and_move(tmp_path, does, ranks=1)
    assert report.kinds == {"checkpoint_missing", "never_awaited"}, report.describe()


def test_a_checkpoint_removed_after_its_save_is_not_missed(tmp_path) -> None:
    does = "for n in range(3):\n    save(n, f'step{n}')\nif rank == 0: shutil.rmtree('step0')"
    report = save_and_move(tmp_path, does)
    assert report.ok, report.describe()
    assert report.checkpoints == ["step1", "step2"]


@pytest.mark.parametrize("ending", ["sys.exit(0)", "raise SystemExit(main())", "sys.exit(main())"])
def test_exiting_by_the_last_line_is_no_early_exit(tmp_path, ending: str) -> None:
    text = f'import sys\n\ndef main():\n    return 0\n\nif __name__ == "__main__":\n    {ending}\n'
    assert run(write(tmp_path, "exits.py", text), 1, launcher="warm").ok


def test_os_exit_leaves_no_record(tmp_path) -> None:
    report = run(write(tmp_path, "gone.py", "import os\nos._exit(0)\n"), 2, launcher="warm")
    assert report.kinds == {"missing_record"}, report.describe()


def test_the_ranks_die_with_the_process_that_runs_them(tmp_path) -> None:
    """SIGKILL of the supervisor, under either launcher, ends every rank."""
    for launcher in ("warm", "torchrun"):
        pids = tmp_path / launcher
        pids.mkdir()
        recipe = write(
            tmp_path,
            f"waits_{launcher}.py",
            f"""
            import os, pathlib, threading
            (pathlib.Path({str(pids)!r}) / str(os.getpid())).touch()
            threading.Event().wait()
            """,
        )
        code = (
            f"from harness.run import run; "
            f"run({str(recipe)!r}, 2, launcher={launcher!r}, through=[{str(tmp_path)!r}])"
        )
        supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=REPO)
        until = time.monotonic() + 60
        while len(list(pids.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        ranks = [int(path.name) for path in pids.iterdir()]
        assert len(ranks) == 2
        supervisor.kill()
        supervisor.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), launcher


def test_caches_that_torch_set_in_the_caller_are_not_the_recipes(tmp_path, monkeypatch) -> None:
    """An optimizer's first step writes to a cache; where, torch puts into the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "shared"))
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import torch\nweight = torch.ones(2, requires_grad=True)\nweight.sum().backward()\n"
        "torch.optim.AdamW([weight]).step()\n"
    )
    report = run(recipe, 1, launcher="torchrun")
    assert report.ok, report.describe()


def test_the_claims_of_a_recipe_are_checked_whatever_the_caller_optimises(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    recipe = write(tmp_path, "claims.py", "assert 1 == 2, 'the claim is wrong'\n")
    report = run(recipe, 1, launcher="torchrun")
    assert report.kinds == {"raised"}, report.describe()


@pytest.mark.parametrize(
    ("source", "saves"),
    [
        ("from torch.distributed import checkpoint as dcp", True),
        ("import torch.distributed.checkpoint as dcp", True),
        ("from torch.distributed.checkpoint.state_dict_saver import save", True),
        ("import helper_that_saves", True),
        ("from torch.distributed import checkpoints_of_another_kind", False),
        ("import torch.distributed as dist  # not torch.distributed.checkpoint", False),
    ],
)
def test_a_recipe_that_may_save_is_found_by_what_it_imports(tmp_path, source, saves) -> None:
    write(tmp_path, "helper_that_saves.py", "from torch.distributed.checkpoint import save\n")
    assert load_recipe(write(tmp_path, "recipe.py", source + "\n")).saves == saves


def test_a_recipe_sees_the_callers_library_and_not_the_harness(tmp_path, monkeypatch) -> None:
    library = tmp_path / "library"
    library.mkdir()
    write(library, "callers_library.py", "answer = 42\n")
    monkeypatch.setenv("PYTHONPATH", f"{HOME}{os.pathsep}{library}")
    text = f"""
        import importlib.util, os, subprocess, sys
        import callers_library
        assert os.environ["PYTHONPATH"] == {str(library)!r}
        assert {HOME!r} not in sys.path
        subprocess.run([sys.executable, "-c", "import callers_library"], check=True)
    """
    recipe = write(tmp_path, "recipe.py", text)
    for launcher in ("warm", "torchrun"):
        report = run(recipe, 1, launcher=launcher)
        assert report.ok, report.describe()


def test_an_interrupted_run_does_not_answer_for_the_next_one(tmp_path) -> None:
    begun = tmp_path / "begun"
    waits = write(
        tmp_path,
        "waits.py",
        f"import threading\nopen({str(begun)!r}, 'w').close()\nthreading.Event().wait()\n",
    )

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR2)

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, interrupted)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(waits, 1, launcher="warm", keep=tmp_path / "kept", through=(tmp_path,))
    finally:
        signal.signal(signal.SIGUSR2, before)
    report = run(write(tmp_path, "says.py", "print('hello')\n"), 1, launcher="warm")
    assert report.ok and report.outputs == ["hello\n"], report.describe()


def test_a_checkpoint_that_takes_too_long_to_load_says_so(tmp_path, monkeypatch) -> None:
    waits = write(tmp_path, "waits.py", "import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr("rankproof.run.LOAD_BACK", waits)
    answer = load_back({"step1": {}}, 1, tmp_path, deadline_s=0.5)
    assert answer == {"step1": {"error": "did not load within 0.5 s"}}


@pytest.mark.parametrize(("deadline_s", "loads_within_s"), [(30, 120), (300, 300)])
def test_a_checkpoint_has_as_long_to_load_as_its_recipe(
    tmp_path, monkeypatch, deadline_s: float, loads_within_s: float
) -> None:
    limits = []

    def record(request: dict, world_size: int, parent: Path, deadline_s: float) -> dict:
        limits.append(deadline_s)
        return {}

    monkeypatch.setattr("rankproof.run.load_back", record)
    recipe = write(tmp_path, "saves.py", SAVES.format(after="pass"))
    run(recipe, 1, launcher="warm", deadline_s=deadline_s)
    assert set(limits) == {loads_within_s}


def test_the_command_that_runs_it_again_is_complete(tmp_path) -> None:
    path = tmp_path / "a recipe.py"
    command = reproduce(path, ("a b",), ranks=2, control=None, gate="hold_write", order=True)
    end = f"run '{path}' --ranks 2 --gate hold_write --order -- 'a b'"
    assert command.endswith(end)
    command = reproduce(path, (), ranks=2, control="n", gate="queue_work", order=False)
    assert command.endswith("--ranks 2 --control n --gate queue_work")


def test_a_run_is_kept_until_code_edit_or_ranks_change_and_only_if_it_ended_as_it_must(
    tmp_path,
) -> None:
    write(tmp_path, "r.toml", CONTROL)
    store, path = tmp_path / "store", write(tmp_path, "r.py", "x = 1\n")

    def kept(ranks: int = 1, control: str = "", **changed: object) -> KeptRun:
        kept_code.cache_clear()
        recipe = load_recipe(path, tmp_path)
        edit = dataclasses.replace(recipe.control(control), **changed) if control else None
        return KeptRun(store, recipe, ranks, edit)

    passed = Report("r", str(path), 1, "torchrun", "command")
    raised = dataclasses.replace(passed, failures=[Failure("raised", "AssertionError: x is 2")])
    assert kept().report() is None
    kept().keep(passed)
    kept(control="n").keep(raised)
    assert kept().report() == passed and kept(control="n").report() == raised
    assert kept(ranks=2).report() is None
    assert kept(control="n", says="other words").report() == raised
    assert kept(control="n", replace="x = 3").report() is None
    path.write_text("x = 1  # another comment\n")
    assert kept().report() == passed
    path.write_text("x = 2\n")
    assert kept().report() is None
    path.write_text("x = 1\n")
    assert kept().report() == passed
    kept().keep(raised)
    kept(control="n").keep(passed)
    assert kept().report() is None and kept(control="n").report() is None


def test_a_kept_run_keeps_its_links(tmp_path) -> None:
    recipe = write(tmp_path, "links.py", "import os\nos.symlink('gone', 'link')\n")
    run(recipe, 1, launcher="warm", keep=tmp_path / "kept")
    assert (tmp_path / "kept" / "work" / "link").is_symlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "0 ranks: pass a number of 1 or more"),
        (["--gate", "hold_all"], "no gate 'hold_all'; see --help"),
        (["--keep", "."], "exists already; pass a directory that does not"),
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(
    tmp_path, monkeypatch, capsys, options: list[str], message: str
) -> None:
    ran = tmp_path / "ran"
    recipe = write(tmp_path, "runs.py", f"open({str(ran)!r}, 'w').close()\n")
    assert command(monkeypatch, "run", recipe, "--launcher", "warm", *options) == 2
    assert message in capsys.readouterr().err
    assert not ran.exists()


def test_the_command_line_takes_a_recipes_own_deadline(tmp_path, monkeypatch, capsys) -> None:
    write(tmp_path, "waits.toml", "deadline_s = 0.5")
    recipe = write(tmp_path, "waits.py", "import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(
        "rankproof.recipe.Settings.load", lambda _, path: load_recipe(path, tmp_path)
    )
    started = time.monotonic()
    assert command(monkeypatch, "run", recipe, "--ranks", 1, "--launcher", "warm") == 1
    assert "still running at the deadline" in capsys.readouterr().out
    assert time.monotonic() - started < 60


def test_a_daemon_thread_does_not_keep_a_program_from_ending(tmp_path) -> None:
    text = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    report = run(write(tmp_path, "monitored.py", text), 1, launcher="warm")
    assert report.ok, report.describe()


def test_the_threads_of_torchs_compiler_are_not_the_recipes(tmp_path) -> None:
    text = """
        import os, threading

        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.submit(threading.active_count)
        assert any(not t.daemon for t in threading.enumerate() if t.name != "MainThread")
    """
    report = run(write(tmp_path, "compiles.py", text), 1, launcher="warm")
    assert report.ok, report.describe()


def test_a_left_thread_is_named_with_the_line_that_started_it(tmp_path) -> None:
    text = "import threading\n\nthreading.Thread(target=threading.Event().wait).start()\n"
    report = run(write(tmp_path, "leaves.py", text), 1, launcher="warm")
    assert report.kinds == {"left_thread"}, report.describe()
    assert "started at leaves.py:3" in report.failures[0].text


def test_what_a_thread_raises_unseen_is_reported(tmp_path) -> None:
    text = """
        import threading

        def work():
            raise OSError("No space left on device")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    report = run(write(tmp_path, "recipe.py", text), 1, launcher="warm")
    assert report.kinds == {"raised"}, report.describe()
    assert "OSError: No space left on device (in thread Thread-" in report.failures[0].text


def test_a_save_is_seen_by_whatever_name_it_is_imported(tmp_path) -> None:
    text = """
        import torch
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import save

        dist.init_process_group("gloo")
        save({"mean": torch.full((2,), float(dist.get_rank()))}, checkpoint_id="step1")
        dist.destroy_process_group()
    """
    report = run(write(tmp_path, "recipe.py", text), 2, launcher="warm")
    assert report.kinds == {"checkpoint_wrong"}, report.describe()


def test_hidden_folders_and_virtual_environments_hold_no_recipes(tmp_path) -> None:
    for folder in ("recipes", ".hidden", "environment"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "recipe.py", "")
    (tmp_path / "environment" / "pyvenv.cfg").touch()
    assert [recipe.folder for recipe in discover(tmp_path)] == ["recipes"]


def test_a_process_of_somebody_else_is_never_asked_for_its_stacks(tmp_path, monkeypatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    asked = []
    with monkeypatch.context() as patched:
        patched.setattr("rankproof.leader.os.kill", lambda pid, signal: asked.append(pid))
        patched.setattr("rankproof.leader.STACK_DUMP_S", 0)
        (tmp_path / "rank0.pid").write_text(str(os.getppid()))
        (tmp_path / "rank1.pid").write_text(str(child.pid))
        dump_stacks(tmp_path)
    child.communicate(b"\n")
    assert asked == [child.pid]


def test_report_survives_json() -> None:
    report = run(BAD_SCRIPTS / "leaves_a_process_group.py", 1, launcher="warm")
    assert Report.from_dict(report.to_dict()) == report


# The command line


def command(monkeypatch, *options: object) -> int:
    monkeypatch.setattr(sys, "argv", ["rankproof", *map(str, options)])
    try:
        return main()
    except SystemExit as ended:
        return ended.code


def test_a_folder_is_judged_as_its_settings_say(tmp_path, monkeypatch, capsys) -> None:
    """Helpers and what is left out do not run; the worst verdict counts, JSON and JUnit say all."""
    settings = """
        pattern = "train_*.py"
        exclude = ["*_slow.py"]
        ranks = [1]
        [args]
        "train_small.py" = "--epochs 3"
    """
    write(tmp_path, "rankproof.toml", settings)
    write(tmp_path, "train_helper.py", "WIDTH = 3\n\ndef model():\n    return WIDTH\n")
    write(tmp_path, "train_slow.py", "raise SystemExit('left out')\n")
    write(tmp_path, "other.py", "raise SystemExit('of another name')\n")
    write(tmp_path, "train_small.py", "import sys\nassert sys.argv[1:] == ['--epochs', '3']\n")
    write(tmp_path, "train_two.py", "import torch.multiprocessing as mp\nmp.spawn(print)\n")
    report, run_it = tmp_path / "report.xml", ("run", tmp_path, "--launcher", "warm")

    assert command(monkeypatch, *run_it, "--junit", report, "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert [(r["recipe"], r["verdict"]) for r in told] == [
        ("train_small", "passed"),
        ("train_two", "not judged"),
    ]
    cases = {
        case.get("name"): [c.tag for c in case] for case in ElementTree.parse(report).getroot()
    }
    assert cases == {"train_small-1": [], "train_two-1": ["skipped"]}

    write(tmp_path, "train_wrong.py", "raise ValueError('the loss is not finite')\n")
    assert command(monkeypatch, *run_it, "--junit", report) == 1
    assert "train_wrong on 1 rank: FAILED" in capsys.readouterr().out
    failure = ElementTree.parse(report).find(".//testcase[@name='train_wrong-1']/failure")
    assert failure.get("message") == "ValueError: the loss is not finite"


def test_it_says_its_version_and_that_it_needs_linux(tmp_path, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "--version") == 0
    assert re.fullmatch(r"rankproof \d+\.\d+\.\d+\n", capsys.readouterr().out)
    monkeypatch.setattr(sys, "platform", "darwin")
    script = write(tmp_path, "script.py", "print()\n")
    assert command(monkeypatch, "run", script) == 2
    assert "judged on Linux only" in capsys.readouterr().err


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py", 1), "no such recipe; pass the path of a Python file"),
        ((BAD_SCRIPTS / "raises.py", 0), "0 ranks: pass a number of 1 or more"),
    ],
)
def test_bad_arguments_say_what_to_do(arguments: tuple, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        run(*arguments)


def test_an_empty_folder_says_so(tmp_path) -> None:
    with pytest.raises(RecipeError, match="no recipes"):
        discover(tmp_path)


CONTROL = """
    [[control]]
    name = "n"
    says = "s"
    find = "x = 1"
    replace = "x = 2"
    fails.raised = 'AssertionError: x is 2'
"""


def test_a_control_whose_text_is_gone_says_so(tmp_path) -> None:
    write(tmp_path, "r.toml", CONTROL)
    recipe = load_recipe(write(tmp_path, "r.py", "y = 1\n"), tmp_path)
    with pytest.raises(RecipeError, match="occurs 0 times"):
        run(recipe.path, 1, control=recipe.control("n"))


def test_a_control_whose_text_stands_twice_says_so(tmp_path) -> None:
    write(tmp_path, "r.toml", CONTROL)
    recipe = load_recipe(write(tmp_path, "r.py", "x = 1\nx = 1\n"), tmp_path)
    with pytest.raises(RecipeError, match="occurs 2 times"):
        run(recipe.path, 1, control=recipe.control("n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank = [1]", "unknown keys"),
        ("[[control]]\nname = 'n'", "lacks"),
        ("ranks = [", "r.toml"),
        (CONTROL + "    when = 'now'", "control 'n': unknown keys"),
        (CONTROL.replace("AssertionError: x is 2", ".*"), "fails.raised matches any text"),
        (CONTROL.replace("AssertionError: x is 2", "x is 2"), "begins with the exception's type"),
        (CONTROL.replace("AssertionError: x is 2", "ValueError: ("), "fails.raised is no pattern"),
        (CONTROL.replace("fails.raised", "fails.rose"), "no kind of failure 'rose'"),
        (CONTROL.replace("fails.raised =", "fails ="), "say kind and pattern"),
        (CONTROL + "    file = 'nowhere.py'", "no file .*nowhere.py"),
    ],
)
def test_a_bad_controls_file_names_what_is_wrong(tmp_path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_controls(write(tmp_path, "r.toml", text), tmp_path)


def test_a_control_that_changes_nothing_visible_is_not_caught(tmp_path) -> None:
    write(tmp_path, "r.toml", CONTROL)
    recipe = load_recipe(write(tmp_path, "r.py", "x = 1\n"), tmp_path)
    control = recipe.control("n")
    assert not control.caught(run(recipe.path, 1, launcher="warm", control=control).failures)


PROVES = """
    def double(x):
        return 2 * x

    x = 1
    assert x == 1, f"x is {x}"
    assert double(x) == 2
"""


@pytest.mark.parametrize(
    ("replace", "missed"),
    [
        ("x = 2", ""),
        ("x = undefined", "no failure is one that the control names"),
        ("import no_such_module; x = 2", "no failure is one that the control names"),
        ("double = lambda y: y.no_such_attribute; x = 1", "no failure is one"),
        ("x = 1", "no failure is one that the control names"),
    ],
)
def test_a_control_is_caught_by_the_failure_that_it_names_alone(tmp_path, replace, missed) -> None:
    """An undefined name, a missing import or a slip in another function is no proof."""
    write(tmp_path, "r.toml", CONTROL.replace("x = 2", replace))
    recipe = load_recipe(write(tmp_path, "r.py", PROVES), tmp_path)
    control = recipe.control("n")
    report = run(recipe.path, 1, launcher="warm", control=control)
    assert (
        control.missed(report.failures).startswith(missed)
        if missed
        else control.caught(report.failures)
    ), report.describe()


def test_a_slip_beside_the_named_failure_is_refused() -> None:
    (control,) = control_of("AssertionError: x is 2")
    named = Failure("raised", "AssertionError: x is 2", 0)
    assert control.caught([named])
    for slip in ("NameError: name 'y'", "RuntimeError: rank 1: ModuleNotFoundError: No module"):
        said = control.missed([named, Failure("raised", slip, 1)])
        assert said.startswith("the edit is no Python that could run")
    assert (
        control.missed([named, Failure("left_thread", "write", 1)])
        == "it failed by left_thread, too"
    )


def control_of(pattern: str) -> tuple[Control, ...]:
    return (Control("n", "s", "x = 1", "x = 2", {"raised": (pattern,)}),)


def test_an_assertion_without_a_message_is_told_by_its_source(tmp_path) -> None:
    script = write(tmp_path, "r.py", "found = [1]\nassert (\n    len(found)\n    == 2\n)\n")
    (failure,) = run(script, 1, launcher="warm").failures
    assert failure.text == "AssertionError: assert len(found) == 2"


def test_the_code_hash_follows_code_and_not_prose(tmp_path) -> None:
    path = write(tmp_path, "r.py", '"""Title."""\n\n# %%\n# Prose.\n\nx = 1\n')
    before = code_sha256(path)
    path.write_text('"""Another title."""\n\n# %%\n# Other prose.\nx = 1\n')
    assert code_sha256(path) == before
    path.write_text('"""Another title."""\n\nx = 2\n')
    assert code_sha256(path) != before


def test_the_code_hash_is_the_same_on_every_python(tmp_path) -> None:
    path = write(
        tmp_path, "r.py", '"""T."""\n\n\ndef f(a: int) -> int:\n    """D."""\n    return a\n'
    )
    expected = "a277ee19f49d7c7d3879c2e254144d2a777557a91da3bc1aa1191cb81718f079"
    assert code_sha256(path) == expected


# The template that CONTRIBUTING.md offers

TEMPLATE = load_recipe(REPO / "tests/data/template/recipe.py", REPO / "tests/data/template")


@pytest.mark.parametrize("ranks", TEMPLATE.ranks)
def test_the_template_passes(ranks: int) -> None:
    report = run(TEMPLATE.path, ranks, launcher="warm")
    assert report.ok, report.describe()


@pytest.mark.parametrize("control", TEMPLATE.controls, ids=lambda control: control.name)
def test_the_templates_controls_are_caught(control) -> None:
    report = run(TEMPLATE.path, control.ranks, launcher="warm", control=control)
    assert control.caught(report.failures), report.describe()


# Recipes of a gallery


def gallery(root: Path) -> Path:
    for folder in ("first", "second"):
        (root / folder).mkdir()
        (root / folder / "GALLERY_HEADER.rst").touch()
    write(root / "first", "taken.py", "value = 1\n")
    return write(root / "second", "takes.py", "import taken\nassert taken.value == 1\n")


def test_a_recipe_may_import_one_of_another_folder_of_its_gallery(tmp_path) -> None:
    path = gallery(tmp_path)
    before = load_recipe(path).hashes
    assert before.keys() == {"takes", "taken"}
    report = run(path, 1, launcher="warm")
    assert report.ok, report.describe()
    (tmp_path / "first" / "taken.py").write_text("value = 2\n")
    assert load_recipe(path).hashes != before


def test_what_a_recipe_needs_and_is_not_there_is_named(tmp_path) -> None:
    write(tmp_path, "r.toml", 'needs = ["torch", "no_such_package"]')
    recipe = load_recipe(write(tmp_path, "r.py", "x = 1\n"), tmp_path)
    assert recipe.missing == ["no_such_package"]


def test_code_and_prose_are_counted(tmp_path) -> None:
    text = '''
        """
        Title here
        ==========

        Five words stand in this. :doc:`And` more::

            not these

        .. lanes:: none of these

           nor: 1-2 these
        """

        # %%
        # Head
        # ----
        # Three more words.

        x = (
            1,  # one

            2,
        )
    '''
    path = write(tmp_path, "r.py", text)
    assert sizes.statements(path) == 1
    assert sizes.words_of_prose(path) == 2 + 8 + 1 + 3


def test_what_is_written_in_the_scripts_own_folder_counts_wherever_that_lies() -> None:
    """Written and removed: in /tmp that is any script's right, in its own project it is not."""
    rank = Rank(0, "", "", 0, {"wrote_elsewhere": ["/tmp/project/a.log", "/tmp/other"]}, True, [])
    private = {"private": ["/tmp"], "written": []}
    nowhere = {"private": [], "written": []}
    assert _written(private, [rank], ("/tmp/project/",)) == ([], ["/tmp/project/a.log"])
    assert _written(private, [rank], ("/tmp/",)) == ([], []), "a script that lies in /tmp itself"
    assert _written(nowhere, [rank], ()) == ([], ["/tmp/other", "/tmp/project/a.log"])


def test_what_a_library_makes_at_its_import_is_not_a_ranks_to_leave():
    """torch 2.9 makes a temporary directory when it is imported; each forked rank removes it."""
    gone = [f"-{tempfile.gettempdir()}/rankproof-server-x/tmp1", "-/elsewhere/file"]
    assert _written({"private": [], "written": gone}, [], ()) == ([], ["-/elsewhere/file"])
