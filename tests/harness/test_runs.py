"""A run of a recipe: its processes, threads, environment and files, and that nothing is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from selection import REPO
from test_verdicts import BAD, is_right, judge
from written_recipes import write

from rankproof.judge import Rank
from rankproof.launch import HOME, servers
from rankproof.leader import descendants, dump_stacks
from rankproof.protocol import Outcome, Record
from rankproof.run import run
from rankproof.verdict import written


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
    assert len(left) == len(living_servers()), "a leader is a fork of its server"
    described = report.describe()
    for wanted in (f"{name} on 2 ranks: FAILED", "rank 0, last lines", "rank 1, last lines"):
        assert wanted in described
    assert f"python -m harness run tests/data/bad/{name}.py --ranks 2" in described
    if name == "hangs":
        assert described.count("stacks at the deadline") == 2
        assert "in wait_for_a_message" in described


def test_a_process_that_is_left_is_named_however_slowly_torchrun_ends(tmp_path) -> None:
    """A busy machine may take longer for torchrun's end than ranks get: here it never ends."""
    text = """
        import os, pathlib, signal, subprocess, sys

        wait_forever = "import threading; threading.Event().wait()"
        subprocess.Popen([sys.executable, "-c", wait_forever], start_new_session=True)
        above = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
        torchrun = int(above.rpartition(")")[2].split()[1])
        os.kill(torchrun, signal.SIGSTOP)
    """
    report = run(write(tmp_path, "leaves.py", text), 1, launcher="torchrun", deadline_s=5)
    assert report.kinds == {"left_process"}, report.describe()


def test_the_deadline_counts_from_the_recipes_first_line(tmp_path, monkeypatch) -> None:
    """However long a busy machine takes to import torch."""
    slow = write(tmp_path, "sitecustomize.py", "import time\ntime.sleep(2)\n")
    monkeypatch.setenv("PYTHONPATH", str(slow.parent))
    report = run(write(tmp_path, "recipe.py", "x = 1\n"), 1, launcher="torchrun", deadline_s=1)
    assert report.ok, report.describe()


def living_servers() -> list:
    return [s for s in servers.by_modules.values() if s.process.poll() is None]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("os._exit(0)", set()),
        ("os._exit(0)\nprint()", {"missing_record"}),
        ("for _ in range(2):\n    os._exit(0)", {"missing_record"}),
    ],
)
def test_os_exit_is_the_end_by_the_last_line_alone(tmp_path, text: str, kinds: set) -> None:
    report = run(write(tmp_path, "gone.py", f"import os\n{text}\n"), 2, launcher="warm")
    assert report.kinds == kinds, report.describe()


def test_the_ranks_die_with_the_process_that_runs_them_and_nothing_is_left(tmp_path) -> None:
    """SIGKILL of the supervisor, under either launcher, ends every rank and every directory."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
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
            "import harness; from rankproof.run import run; "
            f"run({str(recipe)!r}, 2, launcher={launcher!r}, through=[{str(pids)!r}])"
        )
        env = os.environ | {"TMPDIR": str(tmp)}
        supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, env=env)
        until = time.monotonic() + 300
        while len(list(pids.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        ranks = [int(path.name) for path in pids.iterdir()]
        assert len(ranks) == 2
        supervisor.kill()
        supervisor.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), launcher
        while any(tmp.iterdir()) and time.monotonic() < until:
            time.sleep(0.05)
        assert list(tmp.iterdir()) == [], launcher


def test_the_claims_of_a_recipe_are_checked_whatever_the_caller_optimises(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    recipe = write(tmp_path, "claims.py", "assert 1 == 2, 'the claim is wrong'\n")
    report = run(recipe, 1, launcher="torchrun")
    assert report.kinds == {"raised"}, report.describe()


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


def test_a_forked_process_ends_with_the_status_that_the_script_gives_it(tmp_path) -> None:
    text = """
        import os, sys

        child = os.fork()
        if child == 0:
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    """
    report = run(write(tmp_path, "forks.py", text), 1, launcher="warm")
    assert report.ok, report.describe()


def test_a_rank_that_was_ended_by_a_signal_is_said_to_be(tmp_path) -> None:
    """By SIGTERM, with which torchrun ends the other ranks."""
    text = """
        import os, signal

        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
    """
    report = run(write(tmp_path, "ends.py", text), 2, launcher="warm")
    assert report.kinds == {"missing_record"}, report.describe()
    assert report.failures[0].text == "rank 1 was ended by SIGTERM"


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


def test_an_assertion_without_a_message_is_told_by_its_source(tmp_path) -> None:
    script = write(tmp_path, "r.py", "found = [1]\nassert (\n    len(found)\n    == 2\n)\n")
    (failure,) = run(script, 1, launcher="warm").failures
    assert failure.text == "AssertionError: assert len(found) == 2"


def test_what_is_written_in_the_scripts_own_folder_counts_wherever_that_lies() -> None:
    """Written and removed: in /tmp that is any script's right, in its own project it is not."""
    record = Record(wrote_elsewhere=["/tmp/project/a.log", "/tmp/other"])
    rank = Rank(0, "", "", 0, record, True, [])
    private = Outcome(False, [], private=["/tmp"], written=[])
    nowhere = Outcome(False, [], private=[], written=[])
    assert written(private, [rank], ("/tmp/project/",)) == ([], ["/tmp/project/a.log"])
    assert written(private, [rank], ("/tmp/",)) == ([], []), "a script that lies in /tmp itself"
    assert written(nowhere, [rank], ()) == ([], ["/tmp/other", "/tmp/project/a.log"])


@pytest.mark.parametrize("ended_by_us", [True, False])
def test_names_of_shared_memory_count_if_nobody_ended_the_script(ended_by_us: bool) -> None:
    """A resource tracker, which would remove them, is ended with the ranks."""
    names = ["/dev/shm/sem.mp-2lv56sot", "/dev/shm/torch_7_9"]
    outcome = Outcome(ended_by_us, [], private=["/dev/shm", "/tmp"], written=["/tmp/a", *names])
    counted = [] if ended_by_us else names
    assert written(outcome, [], ()) == ([], sorted(["/tmp/a", *counted]))
