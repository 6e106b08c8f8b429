"""Measure who is held by a copy: the host, the device, both or nobody.

    python benchmarks/three_streams.py --out benchmarks
    python benchmarks/three_streams.py --small --out /tmp/rehearsal      # seconds on a CPU

``CHUNKS`` matrices go to the device, are multiplied by a matrix there and come back, in each of
the ways of ``recipes_source/offload/three_streams.py``. A way's trace goes to ``traces/``.

How a number is made
--------------------
* ``step_s``: host seconds from the call until the device has finished, all chunks; the device is
  idle before. Medians of ``--repeats`` calls after two unmeasured ones.
* ``call_s``: host seconds until the call returns: the host can do nothing else.
* ``bound_s``: of an ideal pipeline with these slots, computed: each lane takes its next chunk as
  soon as the chunk and the slot are there, kernels take what one alone takes, and the link has the
  rate of one direction while one copies and its duplex rate while both do, all of this run.
* ``eta``: ``bound_s`` over ``step_s``.
* ``hidden_share``: the part of the copies' time on the device during which a kernel ran, from one
  profiled call.
* ``peak_reserved_bytes``: device memory that the allocator took from the driver for this way, the
  slots of ``three_streams`` included, the matrix not. What is allocated would not show tensors that
  are freed and that a stream still uses.
* ``pinned_bytes``: sources and results, if page-locked.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "offload")]

from three_streams import CHUNKS, SLOTS, Pipeline, judge, one_stream  # noqa: E402

from benchmarks.measuring import (  # noqa: E402
    Drawn,
    Results,
    blocks,
    header,
    link_rates,
    profiled_events,
    say,
    seconds_of,
    synchronize,
    write_trace,
)

SIDE, SIDE_SMALL = 11584, 64  # rows and columns of a chunk of bfloat16: just below 2**28 bytes
LINK_BYTES, LINK_BYTES_SMALL = 2**30, 2**20
BOUND_FROM = (
    "an ideal pipeline with as many slots: the kernel alone, and the rate of one direction or of "
    "both, whichever are under way; all of this run"
)
RECIPE = ("three_streams",)
GAP_US = 20.0  # calls of the host closer than this are one block of a picture
MARKED_US = 1.0  # a call of the host that is shorter is not drawn


class Work:
    """Sources and results on the host, the matrix on the device."""

    def __init__(self, device: torch.device, side: int) -> None:
        self.device = device
        self.weight = torch.randn(side, side, dtype=torch.bfloat16, device=device)
        self.hosts: dict[bool, tuple[list, list]] = {}

    def host(self, pin: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Sources and results, allocated when first asked for."""
        if pin not in self.hosts:
            like = {"dtype": torch.bfloat16, "pin_memory": pin and self.device.type == "cuda"}
            shape = tuple(self.weight.shape)
            sources = [torch.zeros(shape, **like) for _ in range(CHUNKS)]
            for source in sources:
                source.copy_(torch.randn(shape, dtype=torch.bfloat16, device=self.device))
            self.hosts[pin] = sources, [torch.zeros(shape, **like) for _ in range(CHUNKS)]
        return self.hosts[pin]

    @property
    def chunk_bytes(self) -> int:
        return self.weight.nbytes


def in_turn(work: Work, *, pin: bool, non_blocking: bool) -> Callable[[], object]:
    sources, results = work.host(pin)
    return lambda: one_stream(sources, results, work.weight, non_blocking)


def three_streams(work: Work) -> Callable[[], object]:
    pipeline = Pipeline(work.weight)
    sources, results = work.host(True)
    return lambda: pipeline.run(sources, results)


def record_stream(work: Work) -> Callable[[], object]:
    """The pipeline with new tensors for every chunk, marked for the streams that use them."""
    sources, results = work.host(True)
    streams = torch.get_device_module(work.device)
    load, store = streams.Stream(), streams.Stream()

    def run() -> None:
        compute = streams.current_stream()
        for source, result in zip(sources, results, strict=True):
            with streams.stream(load):
                chunk = source.to(work.device, non_blocking=True)
            compute.wait_stream(load)
            product = chunk @ work.weight
            store.wait_stream(compute)
            with streams.stream(store):
                result.copy_(product, non_blocking=True)
            if work.device.type == "cuda":
                chunk.record_stream(compute)
                product.record_stream(store)

    return run


WAYS: dict[str, Callable[[Work], Callable[[], object]]] = {
    "pageable": lambda work: in_turn(work, pin=False, non_blocking=False),
    "pageable_non_blocking": lambda work: in_turn(work, pin=False, non_blocking=True),
    "pinned_blocking": lambda work: in_turn(work, pin=True, non_blocking=False),
    "one_stream": lambda work: in_turn(work, pin=True, non_blocking=True),
    "three_streams": three_streams,
    "record_stream": record_stream,
}
NOTES = {
    "pageable_non_blocking": "the host waits for the driver all the same",
    "record_stream": "as three_streams, with new device tensors for every chunk",
}


def measure(work: Work, run: Callable[[], object], repeats: int) -> dict:
    samples: dict[str, list[float]] = {"step_s": [], "call_s": []}
    for _ in range(repeats + 2):
        synchronize(work.device)
        begin = time.perf_counter()
        run()
        returned = time.perf_counter()
        synchronize(work.device)
        samples["step_s"].append(time.perf_counter() - begin)
        samples["call_s"].append(returned - begin)
    samples = {name: values[2:] for name, values in samples.items()}
    return {name: statistics.median(values) for name, values in samples.items()} | {
        "samples": samples
    }


def profiled(work: Work, run: Callable[[], object]) -> list[dict]:
    """The events of one call, annotated as ``three_streams.judge`` wants it."""
    synchronize(work.device)
    with torch.profiler.profile(acc_events=True) as profile:
        with torch.profiler.record_function("judged call"):
            run()
        synchronize(work.device)
    return profiled_events(profile)


def pictured(events: list[dict]) -> tuple[list[Drawn], float, float]:
    """The lanes of a profiled call, its begin and its return, in µs."""
    (call,) = (
        e for e in events if e["name"] == "judged call" and e.get("cat") == "user_annotation"
    )
    begin, returned = call["ts"], call["ts"] + call["dur"]

    def copies(direction: str) -> list[dict]:
        return [e for e in events if e.get("cat") == "gpu_memcpy" and direction in e["name"]]

    held = [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and begin <= event["ts"] <= returned
        and ("Memcpy" in event["name"] or "Synchronize" in event["name"])
        and event["dur"] >= MARKED_US
    ]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    drawn = blocks(kernels, "compute", 0.0, lambda event: "kernel")
    for lane, direction in (("H2D", "HtoD"), ("D2H", "DtoH")):
        drawn += blocks(copies(direction), lane, 0.0, lambda event: event["name"])
    drawn += blocks(held, "host", GAP_US, lambda event: event["name"])
    return drawn, begin, returned


def compute_s(work: Work) -> float:
    chunk, product = torch.randn_like(work.weight), torch.empty_like(work.weight)
    return statistics.median(
        seconds_of(lambda: torch.mm(chunk, work.weight, out=product), work.device, 20)
    )


def ideal_s(nbytes: int, kernel_s: float, link: dict[str, float]) -> float:
    """Seconds of an ideal pipeline, see ``bound_s``, for chunks of ``nbytes``."""
    done = {"h2d": 0, "compute": 0, "d2h": 0}  # chunks that have passed each lane
    left: dict[str, float] = {}  # of the chunk in each lane that has one, 1.0 is all of it
    now = 0.0
    while done["d2h"] < CHUNKS:
        may_begin = {
            "h2d": done["h2d"] < min(CHUNKS, done["compute"] + SLOTS),
            "compute": done["compute"] < min(done["h2d"], done["d2h"] + SLOTS),
            "d2h": done["d2h"] < done["compute"],
        }
        left |= {lane: 1.0 for lane, may in may_begin.items() if may and lane not in left}
        rate = "duplex" if {"h2d", "d2h"} <= left.keys() else "pinned"
        speed = {way: link[f"{rate}_{way}_bytes_per_s"] / nbytes for way in ("h2d", "d2h")}
        speed["compute"] = 1 / kernel_s
        step = min(part / speed[lane] for lane, part in left.items())
        now += step
        left = {lane: part - step * speed[lane] for lane, part in left.items()}
        for lane in [lane for lane, part in left.items() if part < 1e-9]:
            del left[lane]
            done[lane] += 1
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="results/, traces/")
    parser.add_argument("--ways", type=lambda s: s.split(","), default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=10, help="samples a row")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal on a CPU")
    arguments = parser.parse_args()
    if unknown := set(arguments.ways) - set(WAYS):
        parser.error(f"no way {sorted(unknown)}; there are {list(WAYS)}")
    started = time.perf_counter()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    work = Work(device, SIDE_SMALL if arguments.small else SIDE)
    link = link_rates(device, LINK_BYTES_SMALL if arguments.small else LINK_BYTES)
    workload = {
        "chunks": CHUNKS,
        "chunk_bytes": work.chunk_bytes,
        "kernel": f"a product of two {work.weight.shape[0]} x {work.weight.shape[1]} matrices",
        "precision": "bfloat16",
    }
    bound = None
    if link:
        workload["kernel_s"] = compute_s(work)
        bound = ideal_s(work.chunk_bytes, workload["kernel_s"], link)
    head = header("three_streams", device, workload, link)
    # Every way runs code of the recipe but record_stream, which is measured against it.
    results = Results(arguments.out, head, dict.fromkeys(WAYS, RECIPE), ())
    for way in arguments.ways:
        pinned = way not in ("pageable", "pageable_non_blocking")
        work.host(pinned)
        run = None  # and with it what the way before held on the device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        run = WAYS[way](work)
        row = {"name": way, "note": NOTES.get(way)} | measure(work, run, arguments.repeats)
        if bound:
            row |= {"bound_s": bound, "bound_from": BOUND_FROM, "eta": bound / row["step_s"]}
        if device.type == "cuda":
            row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved() - before
            row["pinned_bytes"] = 2 * CHUNKS * work.chunk_bytes if pinned else 0
            events = profiled(work, run)
            found = judge(events).copies.values()
            total = sum(copies.device_s for copies in found)
            row["hidden_share"] = sum(c.hidden_share * c.device_s for c in found) / total
            drawn, begin, returned = pictured(events)
            marks = [("call returns", returned)]
            write_trace(arguments.out, head, way, RECIPE, drawn, begin, marks)
            say(started, f"{way}: {judge(events)}")
        results.add(row)
        say(started, f"{way}: { {k: v for k, v in row.items() if k != 'samples'} }")


if __name__ == "__main__":
    main()
