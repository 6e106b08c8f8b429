"""Ten planted faults, through rankproof and through what else people test distributed code with.

    python tests/harness/ten_faults.py

runs ten scripts of ``tests/data/bad`` on two ranks: by rankproof, as the body of a test of torch's
``MultiProcessTestCase`` (it needs ``expecttest``), under torch's ``LocalTensorMode``, where one
process stands for all ranks, and by ``execute_subprocess_async``, with which accelerate's tests run
scripts under torchrun. It prints what each says, how long that took, and how many lines a project
writes for it.
"""

import argparse
import contextlib
import importlib.util
import inspect
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

import psutil

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
PATIENCE_S = 60  # what each is told to wait for a script that hangs
LIMIT_S = 90  # after which nobody waits any more
ENDS_ITSELF_S = 5  # multiprocessing's resource tracker does, behind its parent
SCRIPT = "SCRIPT_OF_THE_TEST"


def by_rankproof(script: Path) -> str:
    import harness  # noqa: F401 (puts rankproof on the path)
    from rankproof.run import run

    order = script.stem in WITH_ORDER
    report = run(script, 2, launcher="warm", order=order, deadline_s=PATIENCE_S)
    if report.ok:
        return report.describe().splitlines()[0]
    first = report.failures[0]
    return f"{first.kind}: {first.text}"


def as_a_test() -> None:
    """What a project would write: the script is the body of a test on two ranks."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    class TestScript(MultiProcessTestCase):
        world_size = 2

        def setUp(self) -> None:
            super().setUp()
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = str(free_port())
            os.environ["WORLD_SIZE"] = str(self.world_size)
            self._spawn_processes()

        def test_script(self) -> None:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(self.rank)
            runpy.run_path(os.environ[SCRIPT], run_name="__main__")

    globals()["TestScript"] = TestScript  # spawned ranks find it by its name
    TestScript.__module__ = __name__
    TestScript.__qualname__ = "TestScript"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def under_local_tensors() -> None:
    """One process, whose tensors hold what each rank's would; a group that sends nothing."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    join = dist.init_process_group
    new_group = dist.new_group
    dist.init_process_group = lambda _: join("fake", store=FakeStore(), rank=0, world_size=2)
    dist.new_group = lambda backend: new_group(backend="fake")
    os.environ["RANK"] = "0"
    with LocalTensorMode(2):
        runpy.run_path(os.environ[SCRIPT], run_name="__main__")


def by_accelerate() -> None:
    from accelerate.test_utils.testing import execute_subprocess_async

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(os.environ[SCRIPT])
    execute_subprocess_async(command, env=os.environ, timeout=PATIENCE_S)


def in_a_process(way: str, script: Path) -> str:
    """What a way says of a script, in a process whose every descendant is ended behind it."""
    with tempfile.TemporaryDirectory() as work:
        said = Path(work, "said")
        env = os.environ | {
            SCRIPT: str(script),
            "HOME": work,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(PATIENCE_S),
        }
        with open(said, "w") as file:  # no pipe: what a script leaves would hold it open
            command = [sys.executable, __file__, "--as", way]
            process = subprocess.Popen(command, cwd=work, env=env, stdout=file, stderr=file)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"does not end within {LIMIT_S} s"
        left = end_what_runs(work)
        text = said.read_text(errors="replace")
    if code == 0:
        return "passed" + (f"; {left} process(es) left, unsaid" if left else "")
    return code if isinstance(code, str) else first_error(text)


def end_what_runs(work: str) -> int:
    """End every process whose home is ``work``; how many there were that did not end themselves."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == work:
                left.append(process)
    _, left = psutil.wait_procs(left, ENDS_ITSELF_S)
    for process in left:
        process.kill()
    return len(left)


def first_error(text: str) -> str:
    """The first line that names an exception, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = []
    for line in lines:
        if re.match(r"(stderr: *)?(\[\w+\]: *)?[\w.]*(Error|Exception)\b", line):
            errors.append(line)
    return [*errors, *reversed(lines), ""][0]


WAYS = {
    "rankproof": by_rankproof,
    "MultiProcessTestCase": lambda script: in_a_process("test", script),
    "LocalTensorMode": lambda script: in_a_process("local", script),
    "accelerate": lambda script: in_a_process("accelerate", script),
}
# Ways that are no test of unittest.
OWN = {"accelerate": by_accelerate, "local": under_local_tensors}
WRITTEN = {  # by a project, once for all of its scripts
    "MultiProcessTestCase": (as_a_test, free_port),
    "LocalTensorMode": (under_local_tensors,),
    "accelerate": (by_accelerate,),
}


def lines_of(way: str) -> int:
    """How many lines of code a project writes for a way: none for a command."""
    count = 0
    for function in WRITTEN.get(way, ()):
        source = inspect.getsource(function)
        count += len([line for line in source.splitlines() if line.strip()])
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=FAULTS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    if "MultiProcessTestCase" in options.ways and importlib.util.find_spec("expecttest") is None:
        sys.exit("torch's MultiProcessTestCase needs it: pip install expecttest")
    for way in options.ways:
        print(f"{way}: {lines_of(way)} lines", flush=True)
    for name in options.only:
        for way in options.ways:
            started = time.monotonic()
            said = WAYS[way](BAD / f"{name}.py")
            seconds = time.monotonic() - started
            print(f"{name:24} {way:22} {seconds:6.1f} s  {said[:150]}", flush=True)


HOW = sys.argv[2] if sys.argv[1:2] == ["--as"] else ""
if SCRIPT in os.environ and HOW not in OWN:
    as_a_test()

if __name__ == "__main__":
    if HOW == "test":
        unittest.main(argv=[sys.argv[0]])
    elif HOW in OWN:
        OWN[HOW]()
    else:
        main()
