"""A process that has imported torch once and forks ranks from there: about 1 s a run, not 4 to 8.

``python -m rankproof.warm [--saves]`` reads one spec path a line, runs it under a forked leader,
and answers with one line when nothing of it is left. It starts no thread and touches no
accelerator.
"""

import json
import os
import signal
import sys
from pathlib import Path

from rankproof import leader, rank

PRELOADED = (
    "torch",
    "torch._dynamo",  # what an optimizer's first step imports
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils._python_dispatch",
)
FOR_SAVES = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.state_dict",
)


def _fork_rank(spec: dict, number: int, port_pipe: tuple[int, int]) -> int:
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    leader.die_with_parent(me)
    port = os.read(port_pipe[0], 16).decode()
    os.close(port_pipe[0])
    os.close(port_pipe[1])
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(spec["ranks"]),
        "LOCAL_WORLD_SIZE": str(spec["ranks"]),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "warm",
    }
    rank.run(spec)


def _lead(spec: dict, server: int, requests: int) -> None:
    """In a forked process: run the spec's ranks and end; at once if nobody holds ``requests``."""
    import torch.distributed as dist

    os.setsid()
    leader.die_with_parent(server)
    os.environ.clear()
    os.environ |= spec["env"]
    os.chdir(spec["cwd"])
    stores = []

    def start() -> dict[int, int]:
        pipes = [os.pipe() for _ in range(spec["ranks"])]
        pids = {_fork_rank(spec, number, pipe): number for number, pipe in enumerate(pipes)}
        # The store has threads, so the ranks are forked first and told its port afterwards.
        stores.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        for reading, writing in pipes:
            os.write(writing, str(stores[0].port).encode())
            os.close(reading)
            os.close(writing)
        return pids

    leader.lead(spec, start, alive=lambda: leader.held_open(requests))
    os._exit(0)


def serve(saves: bool) -> None:
    """Serve; with ``saves``, for scripts that import torch's checkpointing themselves."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a CUDA driver started here breaks forks
    for module in PRELOADED + (FOR_SAVES if saves else ()):
        __import__(module)
    me = os.getpid()
    print("ready", flush=True)
    for line in sys.stdin:
        spec = json.loads(Path(line.strip()).read_text())
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            requests, null = os.dup(0), os.open(os.devnull, os.O_RDWR)
            log = os.open(Path(spec["run_dir"]) / "leader.out", os.O_WRONLY | os.O_CREAT)
            for target, source in ((0, null), (1, log), (2, log)):
                os.dup2(source, target)
            try:
                _lead(spec, me, requests)
            except SystemExit:
                raise  # in a rank: its interpreter ends as any does
            except BaseException:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve("--saves" in sys.argv)
