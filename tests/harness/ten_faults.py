"""Ten planted faults, through rankproof and through what else people test distributed code with.

    python tests/harness/ten_faults.py

runs ten scripts of ``tests/data/bad`` on two ranks: by rankproof, as the body of a test of torch's
``MultiProcessTestCase``, and by accelerate's ``execute_subprocess_async`` of ``accelerate launch``.
It prints what each says, and how long that took.
"""

import argparse
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
BAD = REPO / "tests" / "data" / "bad"
FAULTS = (
    "raises",
    "barrier_on_one_rank",
    "exits_on_one_rank",
    "never_awaits",
    "live_stager",
    "swallows_a_failed_save",
    "async_used_before_wait",
    "child_dies",
    "leaves_a_process_group",
    "leaves_a_process",
)
WITH_ORDER = ("async_used_before_wait",)
PATIENCE_S = 60  # of each, for a script that hangs
SCRIPT = "SCRIPT_OF_THE_TEST"


def by_rankproof(script: Path) -> str:
    from harness.run import run

    order = script.stem in WITH_ORDER
    report = run(script, 2, launcher="warm", order=order, deadline_s=PATIENCE_S)
    if report.ok:
        return "passed"
    first = report.failures[0]
    return f"{first.kind}: {first.text}"


def by_torchs_test_case(script: Path) -> str:
    """The test lies in this file: it is run by a process of its own."""
    with tempfile.TemporaryDirectory() as work:
        env = os.environ | {
            SCRIPT: str(script),
            "HOME": work,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(PATIENCE_S),
        }
        command = [sys.executable, __file__, "--as-a-test"]
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
    return "passed" if done.returncode == 0 else last_error(done.stderr)


def by_accelerates_launcher(script: Path) -> str:
    from accelerate.test_utils.testing import execute_subprocess_async, get_launch_command

    with tempfile.TemporaryDirectory() as work:
        command = get_launch_command(num_processes=2, cpu=True, main_process_port=free_port())
        command = [sys.executable, "-m", "accelerate.commands.launch", *command[2:], str(script)]
        env = os.environ | {"HOME": work}
        before = os.getcwd()
        os.chdir(work)
        try:
            execute_subprocess_async(command, env=env, timeout=PATIENCE_S, echo=False, quiet=True)
        except (RuntimeError, TimeoutError) as error:
            return last_error(str(error)) or type(error).__name__
        finally:
            os.chdir(before)
    return "passed"


def last_error(text: str) -> str:
    """The last line that names an exception, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\S+: )?\w*(Error|Exception)\b", line.strip())]
    return ([*lines, *errors] or [""])[-1].strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def as_a_test() -> None:
    """What a project would write: the script is the body of a test on two ranks."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    class TestScript(MultiProcessTestCase):
        world_size = 2

        def setUp(self) -> None:
            super().setUp()
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = str(free_port())
            self._spawn_processes()

        def test_script(self) -> None:
            os.environ["RANK"] = str(self.rank)
            os.environ["LOCAL_RANK"] = str(self.rank)
            os.environ["WORLD_SIZE"] = str(self.world_size)
            runpy.run_path(os.environ[SCRIPT], run_name="__main__")

    globals()["TestScript"] = TestScript  # spawned ranks find it by its name
    TestScript.__module__ = __name__
    TestScript.__qualname__ = "TestScript"


WAYS = {
    "rankproof": by_rankproof,
    "MultiProcessTestCase": by_torchs_test_case,
    "accelerate's launcher": by_accelerates_launcher,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=FAULTS)
    for name in parser.parse_args().only:
        for way, judge in WAYS.items():
            started = time.monotonic()
            said = judge(BAD / f"{name}.py")
            seconds = time.monotonic() - started
            print(f"{name:24} {way:22} {seconds:6.1f} s  {said[:120]}", flush=True)


if SCRIPT in os.environ:
    as_a_test()

if __name__ == "__main__":
    if sys.argv[1:] == ["--as-a-test"]:
        unittest.main(argv=[sys.argv[0]])
    main()
