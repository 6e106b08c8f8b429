#!/usr/bin/env bash
# gloo_work_holds_the_exit, torch==2.13.0: a process with a `gloo` collective under way in any group ends only when that one has timed out, also after an exception, `abort()` or `shutdown()`.
# Guess: a rank that raises ends at once, as with NCCL's watchdog, and the launcher starts the job again.
# Instead: give each group the least timeout that will do, or let a daemon thread wait for the work: it
#     holds the group, which is then not destroyed. `os._exit` helps, too.
# Took: 80 s whole, on two cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import pathlib
import subprocess
import sys

TIMEOUT_S = 25
pathlib.Path("rank.py").write_text(
    f"""
import datetime, sys, threading, time
import torch, torch.distributed as dist
rank, how = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
group = dist.new_group(timeout=datetime.timedelta(seconds={TIMEOUT_S}))
dist.barrier()
if rank == 1:  # as a rank that is late, or lost with its host
    time.sleep(2 * {TIMEOUT_S})
work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
if how == "abort":
    group.abort()
if how == "shutdown":
    group.shutdown()
if how == "a thread waits":
    def wait(held):
        work.wait()
    threading.Thread(target=wait, args=(group,), daemon=True).start()
print("raises", flush=True)
raise ValueError(how)
"""
)


def ended_soon(how: str) -> bool:
    """Whether rank 0 has ended a third of the timeout after it raised."""
    store = str(pathlib.Path(f"store {how}").absolute()).replace(" ", "_")
    ranks = []
    for rank in ("0", "1"):
        command = [sys.executable, "rank.py", rank, how, store]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    assert ranks[0].stdout.readline() == b"raises\n"
    try:
        ranks[0].wait(TIMEOUT_S / 3)
    except subprocess.TimeoutExpired:
        return False
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return True


for how in ("nothing more", "abort", "shutdown", "a thread waits"):
    print(f"{how}: rank 0 has ended {TIMEOUT_S // 3} s after it raised: {ended_soon(how)}")
END
cat > expected <<'END'
nothing more: rank 0 has ended 8 s after it raised: False
abort: rank 0 has ended 8 s after it raised: False
shutdown: rank 0 has ended 8 s after it raised: False
a thread waits: rank 0 has ended 8 s after it raised: True
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "gloo_work_holds_the_exit: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
