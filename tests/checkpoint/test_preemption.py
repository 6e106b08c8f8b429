"""A loop that is asked to leave saves first, however it asks; children are ended as any."""

import gc
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from selection import REPO, with_library

from overlap_recipes.checkpoint.preemption import Preemption
from rankproof.run import run

DATA = REPO / "tests" / "data"


@pytest.fixture(autouse=True)
def handler():
    """The one of SIGTERM that must be there afterwards; what an error has kept hears no signal."""
    gc.collect()
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def leaving():
    one = Preemption(grace_s=60)
    yield one
    one.left.set()  # a signal that it has heard has no deadline any more


def test_no_line_of_a_loop_is_left_without_its_save() -> None:
    """SIGTERM comes to one rank of two before each of its lines in turn."""
    report = run(DATA / "asking_loops.py", 2, launcher="warm", deadline_s=120)
    assert report.ok, report.describe()


def plain(script: str) -> subprocess.CompletedProcess:
    """``python script``, without what the harness adds."""
    command = [sys.executable, "-W", "ignore", DATA / script]
    return subprocess.run(
        command, env=with_library(), capture_output=True, text=True, timeout=120, check=False
    )


def test_no_line_of_a_loop_is_left_without_its_save_where_there_is_no_group() -> None:
    done = plain("asking_loops.py")
    assert done.returncode == 0, done.stderr


def test_sigterm_ends_a_forked_child() -> None:
    done = plain("forked_children.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("when", ["in a step", "in a save"])
def test_a_rank_ends_though_another_was_lost_without_a_word(when: str, tmp_path: Path) -> None:
    """Not after the ten minutes for which a vote waits: until then no launcher starts it again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-W", "ignore", DATA / "lost_rank.py", tmp_path / "root", when]
    ranks = []
    for rank in ("0", "1"):
        environment = {**with_library(), **group, "RANK": rank}
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        _, error = ranks[0].communicate(timeout=300)
        assert ranks[0].returncode == 1
        assert "Timed out waiting 3000ms" in error
        stopped = os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        assert stopped is not None, "rank 1 was not lost"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_compiled_optimizer_ends_a_step_too(leaving: Preemption) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with leaving:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            step()
            assert not leaving.agreed()
        signal.raise_signal(signal.SIGTERM)
        assert not leaving.agreed(), "the answer of this step was another one"
        step()
        assert leaving.agreed()


def test_a_loop_without_optimizers_is_asked_at_each_call(leaving: Preemption) -> None:
    with leaving:
        assert not leaving.agreed()
        signal.raise_signal(signal.SIGTERM)
        assert leaving.agreed()
        assert leaving.agreed()


@pytest.mark.parametrize(
    ("grace_s", "told"),
    [
        (2, "grace_s is 2: give the seconds"),
        (float("nan"), "grace_s is nan"),
        (True, "grace_s is True"),
        ("30", "grace_s is '30'"),
        ({signal.SIGUSR1: None}, "grace_s is None"),
        ({signal.SIGKILL: 30}, "no signal that a process can handle"),
        ({"SIGTERM": 30}, "'SIGTERM', which is no signal"),
    ],
)
def test_a_grace_without_a_meaning_is_refused(grace_s: object, told: str) -> None:
    """As a deadline it would end the job at once, or its thread would die of it unheard."""
    with pytest.raises(ValueError, match=told):
        Preemption(grace_s)


def test_a_block_on_another_thread_is_refused_where_a_signal_is_handled(leaving) -> None:
    """Its end would raise there, and turn the exit code of a job that has saved into 1."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(leaving.__enter__).result()


def test_ranks_that_could_not_agree_are_told_so(leaving: Preemption) -> None:
    """Outside its block each rank would know of its own signal alone, and stop in its own step."""
    with pytest.raises(RuntimeError, match="block"):
        leaving.agreed()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="block"):
            leaving.agreed()
    finally:
        dist.destroy_process_group()
