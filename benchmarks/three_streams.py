"""Measure who is held by a copy: the host, the device, both or nobody.

    python benchmarks/three_streams.py --out benchmarks
    python benchmarks/three_streams.py --small --out /tmp/rehearsal      # seconds on a CPU

``CHUNKS`` matrices go to the device, are multiplied by a matrix there and come back, in each of
the ways of ``recipes_source/offload/three_streams.py``. A way's trace goes to ``traces/``.

How a number is made
--------------------
* ``step_s``: host seconds from the call until the device has finished, all chunks; the device is
  idle before. Medians of ten calls after two unmeasured ones.
* ``call_s``: host seconds until the call returns: the host can do nothing else.
* ``bound_s``: the first load, the last kernel and the last store by themselves, and between them
  the slowest lane for each chunk, with the rates of both directions at once; all of this run.
* ``eta``: ``bound_s`` over ``step_s``.
* ``hidden_share``: the part of the copies' time on the device during which a kernel ran, from one
  profiled call.
* ``peak_reserved_bytes``: device memory that the allocator took from the driver for this way, the
  slots of ``three_streams`` included, the matrix not. What is allocated would not show tensors that
  are freed and that a stream still uses.
* ``pinned_bytes``: sources and results, if page-locked.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes_source" / "offload"))
sys.path.insert(0, str(ROOT))

from three_streams import CHUNKS, Pipeline, one_stream  # noqa: E402

from benchmarks import measuring  # noqa: E402
from benchmarks.measuring import Drawn, Task, blocks, synchronize  # noqa: E402

SIDE = 11584  # rows and columns of a chunk of bfloat16: just below 2**28 bytes
SIDE_SMALL = 64
LINK_BYTES = 2**30
LINK_BYTES_SMALL = 2**20
BOUND_FROM = "first load, slowest lane for each chunk, last store; rates of this run"
REPEATS = 10
CALL = "the call"  # its name in a profile
GAP_US = 20.0  # calls of the host closer than this are one block of a picture
MARKED_US = 1.0  # a call of the host that is shorter is not drawn

WAYS = {  # name → whether its host memory is pinned, and its note
    "pageable": (False, None),
    "pageable_non_blocking": (False, "the host waits for the driver all the same"),
    "pinned_blocking": (True, None),
    "one_stream": (True, None),
    "three_streams": (True, None),
    "record_stream": (True, "as three_streams, with new device tensors for every chunk"),
}


def host_memory(weight: torch.Tensor, pin: bool) -> tuple[list, list]:
    """Sources, with random values, and results."""
    like = {"dtype": weight.dtype, "pin_memory": pin and weight.is_cuda}
    sources = [torch.zeros(weight.shape, **like) for _ in range(CHUNKS)]
    for source in sources:
        source.copy_(torch.randn_like(weight))
    results = [torch.zeros(weight.shape, **like) for _ in range(CHUNKS)]
    return sources, results


def way(name: str, sources: list, results: list, weight: torch.Tensor) -> Callable[[], object]:
    """What is measured under ``name``."""
    if name == "three_streams":
        pipeline = Pipeline(weight)
        return partial(pipeline.run, sources, results)
    if name == "record_stream":
        streams = torch.get_device_module(weight.device)
        load = streams.Stream()
        store = streams.Stream()
        return partial(recorded, sources, results, weight, load, store)
    non_blocking = name in ("pageable_non_blocking", "one_stream")
    return partial(one_stream, sources, results, weight, non_blocking)


def recorded(sources: list, results: list, weight: torch.Tensor, load, store) -> None:
    """The pipeline with new tensors for every chunk, marked for the streams that use them."""
    streams = torch.get_device_module(weight.device)
    compute = streams.current_stream()
    for source, result in zip(sources, results, strict=True):
        with streams.stream(load):
            chunk = source.to(weight.device, non_blocking=True)
        compute.wait_stream(load)
        product = chunk @ weight
        store.wait_stream(compute)
        with streams.stream(store):
            result.copy_(product, non_blocking=True)
        if weight.is_cuda:
            chunk.record_stream(compute)
            product.record_stream(store)


def one_call(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    synchronize(device)
    begin = time.perf_counter()
    run()
    returned = time.perf_counter()
    synchronize(device)
    ended = time.perf_counter()
    return {"step_s": ended - begin, "call_s": returned - begin}


def lanes_of(events: list[dict], begin: float, returned: float) -> list[Drawn]:
    """Kernels, copies, and what held the host, as a page draws them."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    drawn = blocks(kernels, "compute", 0.0, lambda event: "kernel")
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    loads = [event for event in copies if "HtoD" in event["name"]]
    stores = [event for event in copies if "DtoH" in event["name"]]
    drawn += blocks(loads, "H2D", 0.0, lambda event: event["name"])
    drawn += blocks(stores, "D2H", 0.0, lambda event: event["name"])
    waits = []
    for event in events:
        if holds_the_host(event) and begin <= event["ts"] <= returned:
            waits.append(event)
    return drawn + blocks(waits, "host", GAP_US, lambda event: event["name"])


def holds_the_host(event: dict) -> bool:
    """Whether it is a call of the host that may wait, and long enough to be drawn."""
    if event.get("cat") not in ("cuda_runtime", "cuda_driver"):
        return False
    waits = "Memcpy" in event["name"] or "Synchronize" in event["name"]
    return waits and event["dur"] >= MARKED_US


def kernel_seconds(weight: torch.Tensor) -> float:
    chunk = torch.randn_like(weight)
    product = torch.empty_like(weight)
    multiply = partial(torch.mm, chunk, weight, out=product)
    return statistics.median(measuring.seconds_of(multiply, weight.device, 20))


def bound_seconds(nbytes: int, kernel_s: float, link: dict[str, float]) -> float:
    """See ``bound_s`` above."""
    first_load = nbytes / link["pinned_h2d_bytes_per_s"]
    last_store = nbytes / link["pinned_d2h_bytes_per_s"]
    load_beside_store = nbytes / link["duplex_h2d_bytes_per_s"]
    store_beside_load = nbytes / link["duplex_d2h_bytes_per_s"]
    slowest = max(kernel_s, load_beside_store, store_beside_load)
    return first_load + (CHUNKS - 1) * slowest + kernel_s + last_store


def hidden_share(run: Callable[[], object], name: str, folder: Path, head: dict) -> float:
    """The share of its copies' time that kernels hide, by one profiled call; writes its trace."""
    torch.cuda.synchronize()
    with torch.profiler.profile(acc_events=True) as profile:
        with torch.profiler.record_function(CALL):
            run()
        torch.cuda.synchronize()
    events = measuring.profiled_events(profile)
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    (call,) = [event for event in annotations if event["name"] == CALL]
    begin = call["ts"]
    returned = begin + call["dur"]
    drawn = lanes_of(events, begin, returned)
    marks = [("call returns", returned)]
    measuring.write_trace(folder, head, name, True, drawn, begin, marks)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = between_host_and_device(events)
    hidden_us = sum(microseconds_hidden(copy, kernels) for copy in copies)
    return hidden_us / sum(copy["dur"] for copy in copies)


def between_host_and_device(events: list[dict]) -> list[dict]:
    """The copies of a profile, such as "Memcpy HtoD (Pinned -> Device)"; none on the device."""
    found = []
    for event in events:
        is_copy = event.get("cat") == "gpu_memcpy"
        if is_copy and ("HtoD" in event["name"] or "DtoH" in event["name"]):
            found.append(event)
    return found


def microseconds_hidden(copy: dict, kernels: list[dict]) -> float:
    """The time of ``copy`` during which at least one of ``kernels`` ran."""
    begin = copy["ts"]
    end = copy["ts"] + copy["dur"]
    covered = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        stop = min(end, kernel["ts"] + kernel["dur"])
        covered += max(0.0, stop - max(begin, kernel["ts"]))
        begin = max(begin, stop)
    return covered


def measure(results: measuring.Results, name: str, weight: torch.Tensor, out: Path) -> None:
    """The row of ``name``, and its trace."""
    pin, note = WAYS[name]
    device = weight.device
    workload = results.head["workload"]
    link = results.head["link"]
    sources, targets = host_memory(weight, pin)
    measuring.forget_memory(device)
    before = torch.cuda.memory_reserved()
    run = way(name, sources, targets, weight)
    calls = [one_call(run, device) for _ in range(2 + REPEATS)]
    row = {"name": name, "note": note} | measuring.medians(calls[2:])
    if link:
        bound = bound_seconds(weight.nbytes, workload["kernel_s"], link)
        row["bound_s"] = bound
        row["bound_from"] = BOUND_FROM
        row["eta"] = bound / row["step_s"]
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved() - before
        row["pinned_bytes"] = 2 * CHUNKS * weight.nbytes if pin else 0
        row["hidden_share"] = hidden_share(run, name, out, results.head)
    results.add(row)


def main() -> None:
    arguments = measuring.command_line(__doc__).parse_args()
    with measuring.started_rank() as device:
        side = SIDE_SMALL if arguments.small else SIDE
        weight = torch.randn(side, side, dtype=torch.bfloat16, device=device)
        link = measuring.link_rates(device, LINK_BYTES_SMALL if arguments.small else LINK_BYTES)
        workload = {
            "chunks": CHUNKS,
            "chunk_bytes": weight.nbytes,
            "kernel": f"a product of two {side} x {side} matrices",
            "precision": "bfloat16",
        }
        if link:
            workload["kernel_s"] = kernel_seconds(weight)
        head = measuring.header("three_streams", device, workload, link)
        # Every way runs code of the recipe but record_stream, which is measured against it.
        results = measuring.Results(arguments.out, head, WAYS, ())
        tasks = []
        for name in WAYS:
            work = partial(measure, results, name, weight, arguments.out)
            tasks.append(Task(name, 15, work))
        tasks = measuring.chosen(tasks, arguments.only)
        measuring.run_tasks(tasks, results, arguments.until, measuring.Agreement())


if __name__ == "__main__":
    main()
