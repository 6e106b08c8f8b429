#!/usr/bin/env bash
# device_storage_copy_keeps_the_lock, torch==2.11.0: `UntypedStorage.copy_` of four bytes to pageable memory stops every Python thread until the copies queued before it have ended; `Tensor.copy_` of the same bytes does not.
# Guess: both give the interpreter's lock back while they wait, as calls into CUDA do.
# Instead: copy tensors, or page-lock what a storage is copied to, numbers too. torch's
#     `DefaultStager` copies storages, and leaves out numbers of four bytes: an optimizer has one a
#     parameter, so its staging thread stops training.
# Took: 8 s on one H200
set -euo pipefail

# Needs an NVIDIA GPU and installs nothing: it checks the torch that is there.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/program.py" <<'END'
import sys
import threading
import time
from collections.abc import Callable

import torch

if torch.__version__.split("+")[0] != "2.11.0":
    sys.exit(f"this was seen with torch 2.11.0, and here is {torch.__version__}")

source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
target = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
number = torch.ones(1, device="cuda")
pageable = torch.empty(1)
pinned = torch.empty(1, pin_memory=True)
side = torch.cuda.Stream()


def longest_pause(copy: Callable[[], object]) -> float:
    """Seconds for which this thread stood still while another called `copy` after a long copy."""
    torch.cuda.synchronize()
    ended = threading.Event()

    def other() -> None:
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            copy()
        ended.set()

    thread = threading.Thread(target=other)
    longest = 0.0
    last = time.perf_counter()
    thread.start()
    while not ended.is_set():
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    longest = max(longest, time.perf_counter() - last)
    thread.join()
    side.synchronize()
    return longest


copies = {
    "a storage to pageable memory": lambda: pageable.untyped_storage().copy_(
        number.untyped_storage(), non_blocking=True
    ),
    "a storage to page-locked memory": lambda: pinned.untyped_storage().copy_(
        number.untyped_storage(), non_blocking=True
    ),
    "a tensor to pageable memory": lambda: pageable.copy_(number, non_blocking=True),
}
for name, copy in copies.items():
    pauses = sorted(longest_pause(copy) for _ in range(3))
    print(f"{name}: {pauses[1] * 1e3:.1f} ms", file=sys.stderr)
    print(f"{name}: other threads", "stand still" if pauses[1] > 0.03 else "go on")
END
cat > "$folder/expected" <<'END'
a storage to pageable memory: other threads stand still
a storage to page-locked memory: other threads go on
a tensor to pageable memory: other threads go on
END
timeout 60 "${PYTHON:-python3}" -W ignore "$folder/program.py" > "$folder/seen"
cat "$folder/seen"
if ! diff "$folder/expected" "$folder/seen" > "$folder/difference"; then
    echo "device_storage_copy_keeps_the_lock: this is no longer what was seen with torch 2.11.0:"
    cat "$folder/difference"
    exit 1
fi
