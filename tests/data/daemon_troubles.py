"""What can go wrong around the daemons of ``process_checkpointer``; the argument names it."""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
from contextlib import closing
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path.insert(0, str(RECIPES))

import async_save as basic  # noqa: E402
import process_checkpointer  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from process_checkpointer import ProcessCheckpoints  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import _async_process_executor  # noqa: E402


def port_is_taken(root: Path) -> None:
    """The port that torch found free is another program's when the daemon comes to open it."""
    with socket.socket() as other_program:
        other_program.bind(("", 0))
        other_program.listen()
        _async_process_executor.get_free_port = lambda: other_program.getsockname()[1]
        process_checkpointer.main(root)


def daemon_dies_while_it_starts(root: Path) -> None:
    """The last rank's daemon ends before it meets the others, which wait for it."""
    device = basic.start_rank()
    app = basic.build_app(device)
    try:
        ProcessCheckpoints(root, app)
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("a daemon that did not start was not reported")
    assert not multiprocessing.active_children(), "a daemon was left behind"
    dist.destroy_process_group()


def resumed(root: Path) -> None:
    """Training goes on from a checkpoint, and saves beside it."""
    device = basic.start_rank()
    root = basic.directory_of_rank_0(root)
    app = basic.build_app(device)
    basic.train_step(app, device)
    with closing(basic.AsyncCheckpoints(root)) as first_job:
        first_job.save(app)
    app = basic.load_app(root / "step1", device)
    expected = [basic.snapshot(app)]
    with closing(ProcessCheckpoints(root, app)) as checkpoints:
        basic.train_step(app, device)
        checkpoints.save(app)
        expected.append(basic.snapshot(app))
    for bits in expected:
        basic.assert_same_bits(basic.load_app(root / f"step{bits['/step']}", device), bits)
    dist.destroy_process_group()


def interrupted(root: Path) -> None:
    """The wait for a daemon that stands still is interrupted; the emergency save comes at once."""
    device = basic.start_rank()
    app = basic.build_app(device)
    basic.train_step(app, device)
    expected, waits, wait = [], [], process_checkpointer.wait
    with closing(ProcessCheckpoints(root, app)) as checkpoints:

        def interrupted_once(uploads: list, timeout: float) -> None:
            waits.append(timeout)
            if len(waits) == 1:
                raise KeyboardInterrupt
            os.kill(checkpoints.daemon.pid, signal.SIGCONT)
            wait(uploads, timeout)

        process_checkpointer.wait = interrupted_once
        process_checkpointer.freeze(checkpoints.daemon)
        for _ in range(2):
            expected.append(basic.snapshot(app))
            try:
                checkpoints.save(app)
            except KeyboardInterrupt:
                checkpoints.save(app)
            else:
                first = checkpoints.upload
                basic.train_step(app, device)
        beside = not first.done()
        os.kill(checkpoints.daemon.pid, signal.SIGCONT)
    assert not beside, "the emergency save filled buffers that were being written"
    for bits in expected:
        basic.assert_same_bits(basic.load_app(root / f"step{bits['/step']}", device), bits)
    dist.destroy_process_group()


def more_tensors_than_open_files(root: Path) -> None:
    """The limit of open files, as the shell set it, is below the number of tensors."""
    basic.start_rank()
    usual, most = 256, 2048
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
    model = nn.ParameterList(nn.Parameter(torch.full((2,), float(i))) for i in range(2 * usual))
    app = basic.AppState(model, torch.optim.SGD(model.parameters()))
    with closing(ProcessCheckpoints(root, app)) as checkpoints:
        checkpoints.save(app)
        checkpoints.wait()
        assert checkpoints.checkpointer.value == "process", "a thread wrote it"
    dist.destroy_process_group()


def no_memory_for_the_buffers(root: Path) -> None:
    """The daemon has started when the shared buffers cannot be made."""
    device = basic.start_rank()

    def no_memory(state: dict) -> None:
        raise OSError(12, "Cannot allocate memory")

    process_checkpointer.shared_buffers = no_memory
    try:
        ProcessCheckpoints(root, basic.build_app(device))
    except OSError as error:
        assert error.errno == 12
    else:
        raise AssertionError("it was built without buffers")
    assert not multiprocessing.active_children(), "a daemon was left behind"
    dist.destroy_process_group()


TROUBLES = (port_is_taken, daemon_dies_while_it_starts, resumed, interrupted)
TROUBLES += (more_tensors_than_open_files, no_memory_for_the_buffers)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        {trouble.__name__: trouble for trouble in TROUBLES}[sys.argv[1]](Path(temporary))
elif sys.argv[1] == "daemon_dies_while_it_starts":  # imported by a daemon
    last = int(os.environ["WORLD_SIZE"]) - 1
    if int(os.environ["RANK"]) == last:
        os._exit(3)
