# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/profiled_copies.py
"""Whether the copies of a call were asynchronous, read from a profile of it.

A trace of PyTorch's profiler tells it, and you can look at it yourself:

* Each copy on the device names the memory that it used, ``Memcpy HtoD (Pinned -> Device)`` or
  ``(Pageable -> Device)``, and the stream that it ran on. Where kernels run on that stream too, the
  copy holds the device.
* Each call of the CUDA runtime (``cudaMemcpyAsync``, ``cudaStreamSynchronize``) lasts as long as it
  held the host.

The names are those of the CUDA profiler; other accelerators have others. Copies within a device and
between devices are not judged. Kernels and copies that a CUDA graph launches count.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Copies", "Verdict", "is_my_copy_asynchronous", "judge"]

CALL = "judged call"  # its name in the trace
DIRECTIONS = ("HtoD", "DtoH")


@dataclass(frozen=True)
class Copies:
    """The copies of one direction during a call."""

    pinned: bool  # every one of them
    own_stream: bool  # no kernel ran on a stream of theirs
    device_s: float  # seconds on the device
    hidden_share: float  # of these, while a kernel ran

    def __str__(self) -> str:
        memory = "pinned" if self.pinned else "PAGEABLE"
        stream = "own stream" if self.own_stream else "THE KERNELS' STREAM"
        return f"{memory}, {stream}, {self.hidden_share:.0%} of {self.device_s:.1e} s hidden"


@dataclass(frozen=True)
class Verdict:
    """``copies`` by direction ("HtoD", "DtoH"); the host spent ``host_s`` s in copies and waits."""

    copies: dict[str, Copies]
    host_s: float

    @property
    def holds_host(self) -> bool:
        """Whether the host was held for more than half of the time that the copies took.

        A wait by ``.item()`` counts as well.
        """
        return self.host_s > sum(copies.device_s for copies in self.copies.values()) / 2

    def __str__(self) -> str:
        if not self.copies:
            return "no device copy to judge: no accelerator, or nothing was copied to or from it"
        held = "HELD" if self.holds_host else "free"
        parts = [f"host {held}, {self.host_s:.1e} s in copy calls"]
        for direction, copies in self.copies.items():
            parts.append(f"{direction} {copies}")
        return "; ".join(parts)


def is_my_copy_asynchronous(function: Callable[[], object]) -> Verdict:
    """Profile one call of ``function`` and judge its copies.

    Call it once before: the first call of a kernel loads it, and waits.
    """
    if not torch.accelerator.is_available():
        return Verdict({}, 0.0)
    torch.accelerator.synchronize()
    with torch.profiler.profile(acc_events=True) as profile:
        with torch.profiler.record_function(CALL):
            function()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        profile.export_chrome_trace(str(trace))
        return judge(json.loads(trace.read_text())["traceEvents"])


def judge(events: list[dict]) -> Verdict:
    """Read the events of a Chrome trace in which ``judged call`` is annotated on the host."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    streams_of_kernels = {kernel["args"]["stream"] for kernel in kernels}
    found = {}
    for direction, copies in copies_by_direction(events).items():
        streams = {copy["args"]["stream"] for copy in copies}
        total = sum(copy["dur"] for copy in copies)
        found[direction] = Copies(
            pinned=not any("Pageable" in copy["name"] for copy in copies),
            own_stream=streams.isdisjoint(streams_of_kernels),
            device_s=total / 1e6,
            hidden_share=sum(beside(copy, kernels) for copy in copies) / total,
        )
    return Verdict(found, host_microseconds(events) / 1e6)


def copies_by_direction(events: list[dict]) -> dict[str, list[dict]]:
    """The copies between host and device; "Memcpy HtoD (Pinned -> Device)" is of "HtoD"."""
    found: dict[str, list[dict]] = {}
    for event in events:
        if event.get("cat") != "gpu_memcpy":
            continue
        direction = event["name"].split()[1]
        if direction in DIRECTIONS:
            found.setdefault(direction, []).append(event)
    return found


def host_microseconds(events: list[dict]) -> float:
    """How long copies and waits that the judged call made held the host."""
    (call,) = [e for e in events if e["name"] == CALL and e.get("cat") == "user_annotation"]
    end = call["ts"] + call["dur"]
    held = 0.0
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver"):
            continue
        waits = "Memcpy" in event["name"] or "Synchronize" in event["name"]
        if waits and call["ts"] <= event["ts"] <= end:
            held += event["dur"]
    return held


def beside(copy: dict, kernels: list[dict]) -> float:
    """Microseconds of ``copy`` during which at least one of ``kernels`` ran."""
    begin = copy["ts"]
    end = copy["ts"] + copy["dur"]
    covered = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        stop = min(end, kernel["ts"] + kernel["dur"])
        covered += max(0.0, stop - max(begin, kernel["ts"]))
        begin = max(begin, stop)
    return covered
