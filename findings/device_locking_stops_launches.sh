#!/usr/bin/env bash
# device_locking_stops_launches, torch==2.11.0: while one thread page-locks memory by `cudaHostRegister`, no other thread of the process launches a kernel; what is queued goes on.
# Guess: locking is host work, and holds up no thread but its own.
# Instead: lock once, before training, or queue a step's work first and lock while it runs.
# Took: 8 s on one H200
set -euo pipefail

# Needs an NVIDIA GPU and installs nothing: it checks the torch that is there.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/program.py" <<'END'
import sys

import torch

if torch.__version__.split("+")[0] != "2.11.0":
    sys.exit(f"this was seen with torch 2.11.0, and here is {torch.__version__}")
import threading
import time

SIZE = 6 << 30
x = torch.zeros(1 << 20, device="cuda")
memory = torch.empty(SIZE, dtype=torch.uint8)
memory[::4096] = 1  # every page is there
cudart = torch.cuda.cudart()
for _ in range(1000):
    x.add_(1)
torch.cuda.synchronize()


def longest_launch(until) -> float:
    longest = 0.0
    while not until():
        began = time.perf_counter()
        x.add_(1)
        longest = max(longest, time.perf_counter() - began)
        time.sleep(1e-4)
    return longest


end = time.perf_counter() + 0.5
alone = longest_launch(lambda: time.perf_counter() > end)
torch.cuda.synchronize()

# 0.5 s of queued work, timed by events, with the lock in its midst
torch.cuda._sleep(int(5e7))
start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda.synchronize()
start.record()
torch.cuda._sleep(int(1e9))
stop.record()
torch.cuda.synchronize()
queued_alone = start.elapsed_time(stop)

took = []


def lock() -> None:
    began = time.perf_counter()
    assert int(cudart.cudaHostRegister(memory.data_ptr(), SIZE, 0)) == 0
    took.append(time.perf_counter() - began)


start.record()
torch.cuda._sleep(int(1e9))
stop.record()
thread = threading.Thread(target=lock)
thread.start()
during = longest_launch(lambda: bool(took))
thread.join()
torch.cuda.synchronize()
queued = start.elapsed_time(stop)
cudart.cudaHostUnregister(memory.data_ptr())

print(f"locked {SIZE >> 30} GiB in {took[0]:.2f} s; longest launch alone {alone * 1e3:.2f} ms, "
      f"during it {during * 1e3:.0f} ms; queued work {queued_alone:.0f} and {queued:.0f} ms", file=sys.stderr)
print("a launch waited for more than half of the locking:", during > took[0] / 2)
print("alone it did not:", alone < 0.02)
print("queued work took as long as alone:", queued < 1.1 * queued_alone)
END
cat > "$folder/expected" <<'END'
a launch waited for more than half of the locking: True
alone it did not: True
queued work took as long as alone: True
END
timeout 60 "${PYTHON:-python3}" -W ignore "$folder/program.py" > "$folder/seen"
cat "$folder/seen"
if ! diff "$folder/expected" "$folder/seen" > "$folder/difference"; then
    echo "device_locking_stops_launches: this is no longer what was seen with torch 2.11.0:"
    cat "$folder/difference"
    exit 1
fi
