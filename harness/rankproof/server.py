"""A process that starts runs: it forks a leader for each, and forks ranks that have torch already.

``python -m rankproof.server [module ...]`` reads one spec path a line, runs it under a forked
leader, and answers with one line when nothing of it is left. Before the first run by the launcher
``warm`` it imports torch and the modules named: a rank forked from there begins in about 1 s, not 4
to 8. Under ``torchrun`` ranks are interpreters of their own; torchrun alone is such a fork. The
server starts no thread and touches no accelerator. When nobody can ask it any more, it removes its
temporary directory, and that of a run whose caller did not live to see it: a caller that lives has
put the file ``interrupted`` there.
"""

import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from rankproof import leader, rank
from rankproof.protocol import INTERRUPTED, Spec

TORCHRUN = "torch.distributed.run"
PRELOADED = (
    "torch",
    "torch._dynamo",  # what an optimizer's first step imports
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils._python_dispatch",
)


def _fork_ranks(spec: Spec) -> dict[int, int]:
    """Fork the ranks; the store has threads, so they are told its port afterwards."""
    import torch.distributed as dist

    pipes = [os.pipe() for _ in range(spec.ranks)]
    pids = {}
    me = os.getpid()
    for number, pipe in enumerate(pipes):
        child = os.fork()
        if child:
            pids[child] = number
            continue
        leader.die_with_parent(me)
        port = os.read(pipe[0], 16).decode()
        for end in pipe:
            os.close(end)
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(spec.ranks),
            "LOCAL_WORLD_SIZE": str(spec.ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "ROLE_NAME": "default",
            "ROLE_RANK": str(number),
            "ROLE_WORLD_SIZE": str(spec.ranks),
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "warm",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        rank.run(spec)
    global store  # which serves until this process ends
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for reading, writing in pipes:
        os.write(writing, str(store.port).encode())
        os.close(reading)
        os.close(writing)
    return pids


def _start(spec: Spec) -> dict[int, int]:
    """Start ``torchrun``, in a fork that has it imported, or the file as one process."""
    rank_of = ["-m", "rankproof.rank", str(spec.path)]
    me = os.getpid()
    if spec.launcher == "python":
        started = subprocess.Popen(
            [sys.executable, *rank_of],
            cwd=spec.cwd,
            env=spec.env,
            preexec_fn=lambda: leader.die_with_parent(me),
        )
        started.returncode = 0  # the leader waits for all its children itself
        return {started.pid: -1}
    if child := os.fork():
        return {child: -1}
    leader.die_with_parent(me)
    tempfile.tempdir = None  # the server's own
    torchrun = importlib.import_module(TORCHRUN)
    torchrun.main(["--standalone", f"--nproc-per-node={spec.ranks}", *rank_of])
    sys.exit()


def _lead(spec: Spec, server: int) -> None:
    """In a forked process: run the spec and end."""
    requests = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(Path(spec.run_dir) / "leader.out", os.O_WRONLY | os.O_CREAT)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.setsid()
        leader.die_with_parent(server)
        os.environ.clear()
        os.environ |= spec.env
        os.chdir(spec.cwd)
        start = _fork_ranks if spec.launcher == "warm" else _start
        leader.lead(spec, lambda: start(spec), requests)
        os._exit(0)
    except SystemExit:
        raise  # in a rank: its interpreter ends as any does
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def serve(modules: list[str]) -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a CUDA driver started here breaks forks
    me = os.getpid()
    answers = open(os.dup(1), "w")  # noqa: SIM115 (open until the end)
    os.dup2(2, 1)  # what a module prints when it is imported is no answer
    try:
        for line in sys.stdin:
            spec = Spec.read(line.strip())
            wanted = {"warm": (*PRELOADED, *modules), "torchrun": (TORCHRUN,)}
            for module in wanted.get(spec.launcher, ()):
                importlib.import_module(module)
            gc.freeze()  # what is imported is no garbage: a fork neither looks at it nor copies it
            child = os.fork()
            if child == 0:
                answers.close()  # else each rank would tell a script that shows warnings of it
                _lead(spec, me)
            status = os.waitpid(child, 0)[1]
            if not leader.held_open(0):  # nobody can ask any more
                if not Path(spec.run_dir, INTERRUPTED).exists():
                    shutil.rmtree(spec.callers_dir, ignore_errors=True)
                return
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    finally:
        if os.getpid() == me:  # no rank, which ends here, too
            shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
