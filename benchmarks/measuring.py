"""What every benchmark here needs: clocks, the link's rates, result files, small traces.

Torch and the standard library are enough. ``benchmarks/result_files.py`` reads what this writes.
"""

import argparse
import faulthandler
import gc
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.code_versions import code_of_today

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "recipes_source"
STARTED = time.perf_counter()


# -- the command ------------------------------------------------------------------------------


def command_line(doc: str) -> argparse.ArgumentParser:
    """The arguments that all benchmarks have, described by the first line of ``doc``."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="for the results")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal on a CPU")
    until = "begin no task that ends later: seconds from now, or since the epoch"
    parser.add_argument("--until", "--seconds", type=moment, default="3600", help=until)
    only = "these tasks, in this order, with commas between"
    parser.add_argument("--only", "--tasks", type=lambda text: text.split(","), help=only)
    return parser


def shared_store() -> dist.Store:
    """Torchrun's, which outlives the ranks that it starts; a rank alone has its own."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return dist.HashStore()


OTHERS_BYTES = 2 * 10**9  # a context of CUDA takes half a GB
OTHERS_END_S = 20.0  # ranks that torchrun has just ended give their memory back


def refuse_shared_device(device: torch.device) -> None:
    """Wait a moment until no other program holds memory of ``device``.

    Raises:
        RuntimeError: one does. Its kernels would run between those that are measured.
    """
    memory = torch.get_device_module(device).mem_get_info
    end = time.monotonic() + OTHERS_END_S
    while True:
        free, total = memory(device)
        held = total - free
        if held <= OTHERS_BYTES:
            return
        if time.monotonic() > end:
            raise RuntimeError(
                f"another program holds {held / 1e9:.1f} GB of {device}: end it first, or its work "
                f"is measured, too"
            )


@contextmanager
def started_rank(timeout: timedelta | None = None) -> Iterator[torch.device]:
    """This rank's device, in the group that torchrun describes, or in a group of one.

    The group has a store of its own: in torchrun's, ranks that are started again would find the
    addresses and the time-outs of those before.

    Raises:
        RuntimeError: another program works on the device.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
        refuse_shared_device(device)
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shared = shared_store()
    key = f"port {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"  # another after a restart
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        shared.set(key, str(store.port))
    else:
        store = dist.TCPStore("localhost", int(shared.get(key)))
    dist.init_process_group(store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def moment(seconds: str) -> float:
    """Seconds from now or since the epoch, as time since the epoch.

    The rank that asks first says it for all ranks, and for those that are started again.
    """
    wanted = float(seconds)
    if wanted <= 1e9:  # from now
        wanted += time.time()
    return float(shared_store().compare_set(f"in {seconds} s", "", str(wanted)))


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def all_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def tell(text: str) -> None:
    """Print ``text`` on rank 0, behind the seconds since the command began."""
    if own_rank() == 0:
        print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


# -- clocks -----------------------------------------------------------------------------------


class HostEvent:
    """Stands in for a timing event on a CPU, where work is done when the call returns."""

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds to ``end``, as a CUDA event gives them."""
        return (end.at - self.at) * 1e3


def timing_event(device: torch.device) -> HostEvent | torch.cuda.Event:
    """An event that can be timed, not yet recorded."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostEvent()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds on the current stream of each of ``repeats`` calls of ``work``, after one unmeasured.

    The device is synchronised before the first call and after the last only.
    """
    work()
    events = [timing_event(device) for _ in range(repeats + 1)]
    synchronize(device)
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    synchronize(device)
    pairs = zip(events, events[1:], strict=False)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


class StepClock:
    """When steps ended on the device, by the host's clock (s, ``time.perf_counter()``).

    ``tick()`` behind each step; the host stays at most ``queued`` steps ahead of the device, as in
    a loop that looks at the loss of the step before last.
    """

    queued = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        """Begin anew, with the device idle."""
        synchronize(self.device)
        origin = timing_event(self.device)
        origin.record()
        origin.synchronize()
        self.origin_at = time.perf_counter()
        self.events = [origin]

    def tick(self) -> None:
        end = timing_event(self.device)
        end.record()
        self.events.append(end)
        if len(self.events) > self.queued:
            self.events[-self.queued].synchronize()

    def ends(self) -> list[float]:
        """The start, and the end of each step."""
        self.events[-1].synchronize()
        return [self.origin_at + self.events[0].elapsed_time(end) / 1e3 for end in self.events]


# -- samples ----------------------------------------------------------------------------------

CONFIDENCE = 0.95
FEWEST = 6  # samples for an interval


def median_interval(values: list[float], draws: int = 4000) -> tuple[float, float] | None:
    """What holds the median with ``CONFIDENCE``: percentiles of the medians of drawn samples.

    The bootstrap, with the same draws every time. None for fewer than ``FEWEST`` values.
    """
    if len(values) < FEWEST:
        return None
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    outside = round(draws * (1 - CONFIDENCE) / 2)
    return medians[outside], medians[-1 - outside]


def summary(field: str, values: list[float]) -> dict[str, float]:
    """``field``: the median; ``field`` with ``_low`` and ``_high`` before its unit: its interval.

    ``staging_cost_s`` has ``staging_cost_low_s`` and ``staging_cost_high_s``.
    """
    stem, unit = (field[:-2], "_s") if field.endswith("_s") else (field, "")
    low, high = median_interval(values) or (None, None)
    found = {field: statistics.median(values) if values else None}
    return found | {f"{stem}_low{unit}": low, f"{stem}_high{unit}": high}


def intervals_of(ends: list[float]) -> list[float]:
    """What lies between moments."""
    return [b - a for a, b in pairwise(ends)]


def medians(samples: list[dict], intervals: Iterable[str] = ()) -> dict:
    """The medians of samples by field, with the ``intervals`` of some, and ``samples`` by field."""
    fields = {key: [sample[key] for sample in samples] for key in samples[0]}
    known = {key: [v for v in values if v is not None] for key, values in fields.items()}
    row = {key: statistics.median(values) if values else None for key, values in known.items()}
    for key in intervals:
        row |= summary(key, known[key])
    return row | {"samples": fields}


def trimmed_mean(values: list[float], share: float = 0.1) -> float:
    """The mean without the ``share`` lowest and highest; of few values their median."""
    cut = max(1, round(share * len(values)))
    return statistics.mean(sorted(values)[cut:-cut] or [statistics.median(values)])


def in_turn(windows: Mapping[str, Callable[[], object]], rounds: int) -> Iterator[dict]:
    """Each window once a round, in another order every other round; results by name."""
    for number in range(rounds):
        order = list(windows) if number % 2 == 0 else list(reversed(windows))
        yield {name: windows[name]() for name in order}


class Agreement:
    """What all ranks must see alike: a gloo group of its own, since NCCL would queue kernels."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def largest(self, value: float) -> float:
        if self.group is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.item()

    def any(self, value: bool) -> bool:
        return self.largest(float(value)) > 0

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def from_rank_0(self, value: object) -> object:
        agreed = [value]
        if self.group is not None:
            dist.broadcast_object_list(agreed, group=self.group)
        return agreed[0]


QUEUED_MATRIX = 16384  # rows and columns


def queue_work(device: torch.device, seconds: float) -> None:
    """Queue products of matrices for about ``seconds`` (800 TFLOP/s); nothing on a CPU."""
    if device.type == "cuda":
        a = torch.randn(QUEUED_MATRIX, QUEUED_MATRIX, device=device, dtype=torch.bfloat16)
        product = torch.empty_like(a)
        for _ in range(round(seconds * 800e12 / (2 * QUEUED_MATRIX**3))):
            torch.mm(a, a, out=product)


# -- the machine ------------------------------------------------------------------------------


def nvidia_smi(field: str) -> str | None:
    """A field of ``nvidia-smi --query-gpu`` for the current device; None where there is none."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return lines.splitlines()[torch.cuda.current_device()].strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}"


def link_rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """Pinned copy rates of this rank, byte/s: medians of five copies of ``nbytes``.

    ``pinned_d2h`` and ``pinned_h2d`` are one direction alone, ``duplex_d2h`` and ``duplex_h2d``
    both at once, each on a stream of its own. Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pairs = {"d2h": (hosts[0], there[0]), "h2d": (there[1], hosts[1])}
    streams = {direction: torch.cuda.Stream() for direction in pairs}
    found = {}
    for case, directions in (("pinned", ["d2h"]), ("pinned", ["h2d"]), ("duplex", ["d2h", "h2d"])):
        samples: dict[str, list[float]] = {direction: [] for direction in directions}
        for _ in range(6):
            timed = {d: (timing_event(device), timing_event(device)) for d in directions}
            synchronize(device)
            for direction, (start, end) in timed.items():
                with torch.cuda.stream(streams[direction]):
                    target, source = pairs[direction]
                    start.record()
                    target.copy_(source, non_blocking=True)
                    end.record()
            synchronize(device)
            for direction, (start, end) in timed.items():
                samples[direction].append(nbytes / (start.elapsed_time(end) / 1e3))
        for direction, rates in samples.items():
            found[f"{case}_{direction}_bytes_per_s"] = statistics.median(rates[1:])
    return found


def forget_memory(device: torch.device) -> None:
    """Give back what is not in use; peaks count from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def device_peaks(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


PIECE_BYTES = 64 * 2**20  # of a write, and of a copy that is queued in pieces


def size_on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def write_pieces(path: Path, data: memoryview, nbytes: int) -> None:
    """``nbytes`` in pieces of ``data`` to a new file, in storage when it returns."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for offset in range(0, nbytes, len(data)):
        os.pwrite(file, data[: nbytes - offset], offset)
    os.fsync(file)
    os.close(file)


def storage_rates(
    nbytes: int, agreement: Agreement, new_directory: Callable[[], Path]
) -> dict[int, float]:
    """What a rank writes to new files (byte/s, synced), all at once, by its number of threads.

    Args:
        nbytes: that each rank writes for each of 1, 2, 4 and 8 threads.
        new_directory: makes one, the same for all ranks; removed here.
    """
    data = memoryview(os.urandom(2**20) * (PIECE_BYTES // 2**20))
    rates = {}
    for writers in (1, 2, 4, 8):
        directory = new_directory()
        share = nbytes // writers
        with ThreadPoolExecutor(writers) as pool:
            agreement.barrier()
            begun = time.perf_counter()
            paths = [directory / f"{own_rank()}.{number}" for number in range(writers)]
            list(pool.map(write_pieces, paths, [data] * writers, [share] * writers))
            rates[writers] = writers * share / agreement.largest(time.perf_counter() - begun)
        agreement.barrier()
        if own_rank() == 0:
            shutil.rmtree(directory)
    return rates


class HostMemory:
    """Peak resident set and peak page-locked bytes of this process since the object was made."""

    def __init__(self) -> None:
        gc.collect()
        if torch.cuda.is_available() and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()  # what the mode before had pinned
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.resident_before = self.status("VmRSS")
        self.most_registered = 0
        self.sizes: dict[int, int] = {}
        if torch.cuda.is_available():
            torch.cuda.reset_peak_host_memory_stats()
            self.runtime = torch.cuda.cudart()
            self.register = self.runtime.cudaHostRegister
            self.unregister = self.runtime.cudaHostUnregister
            self.runtime.cudaHostRegister = self.counting_register
            self.runtime.cudaHostUnregister = self.counting_unregister

    def counting_register(self, address: int, nbytes: int, flags: int):
        self.sizes[address] = nbytes
        self.most_registered = max(self.most_registered, sum(self.sizes.values()))
        return self.register(address, nbytes, flags)

    def counting_unregister(self, address: int):
        self.sizes.pop(address, None)
        return self.unregister(address)

    @staticmethod
    def status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise KeyError(name)

    def peaks(self) -> dict[str, int]:
        pinned = self.most_registered
        if torch.cuda.is_available():
            pinned += torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        return {
            "pinned_bytes": pinned,
            "host_peak_bytes": self.status("VmHWM") - self.resident_before,
        }

    def close(self) -> None:
        if torch.cuda.is_available():
            self.runtime.cudaHostRegister = self.register
            self.runtime.cudaHostUnregister = self.unregister


# -- result files -----------------------------------------------------------------------------


def header(benchmark: str, device: torch.device, workload: dict, link: dict) -> dict:
    """The top of a result file: what was measured, where and when."""
    return {
        "benchmark": benchmark,
        "torch": torch.__version__,
        "device": device_name(device),
        "driver": nvidia_smi("driver_version") or "none",
        "ranks": all_ranks(),
        "date": date.today().isoformat(),
        "workload": workload,
        "link": link,
    }


def machine_label(head: dict) -> str:
    """``h200-x2``: the end of the names of result files and traces."""
    name = head["device"]
    model = re.search(r"\b[A-Z]+\d\w*", name)  # "NVIDIA H100 80GB HBM3" is an H100
    short = model.group() if model else name.split()[-1]
    short = "cpu" if name.startswith("CPU") else short.lower()
    return f"{short}-x{head['ranks']}"


@dataclass
class Results:
    """A result file that is written row by row; rank 0 writes.

    Each row says which version and commit it is of. Rows of an earlier run stay; those of our own
    code at another commit are measured again. What else the machine did, by ``MEASURED_BESIDE`` in
    the environment, goes to each row as ``beside``.

    Args:
        folder: ``benchmarks`` or another folder; the file goes to its ``results/``.
        head: see :func:`header`.
        ours: the names of rows that measure a recipe or the library.
        varied: the parameters that, beside the name, tell rows apart.
    """

    folder: Path
    head: dict
    ours: Collection[str]
    varied: tuple[str, ...]
    data: dict = field(init=False)

    def __post_init__(self) -> None:
        name = f"{self.head['benchmark']}.{machine_label(self.head)}.json"
        self.path = self.folder / "results" / name
        old = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.data = self.head | {"not_run": old.get("not_run", {})}
        self.data["link"] = self.head.get("link") or old.get("link", {})
        self.data["rows"] = old.get("rows", [])
        self.code = code_of_today()

    def present(self) -> list[dict]:
        """The rows of others, and those of our code at this commit."""
        found = []
        for row in self.data["rows"]:
            if not row["ours"] or row["commit"] == self.code["commit"]:
                found.append(row)
        return found

    def key(self, row: dict) -> tuple:
        return (row["name"], *(row.get(parameter) for parameter in self.varied))

    def find(self, name: str, **parameters: object) -> dict:
        """The present row of ``name`` with these parameters; empty where there is none."""
        wanted = self.key({"name": name} | parameters)
        return next((row for row in self.present() if self.key(row) == wanted), {})

    def has(self, name: str, **parameters: object) -> bool:
        return bool(self.find(name, **parameters))

    def add(self, row: dict) -> None:
        """Add ``row``, or replace the one with its name and parameters; write and print it."""
        rows = [old for old in self.data["rows"] if self.key(old) != self.key(row)]
        beside = os.environ.get("MEASURED_BESIDE")
        row = {"name": row["name"], **self.code, "ours": row["name"] in self.ours} | row
        row |= {"beside": beside} if beside else {}
        self.data["rows"] = [*rows, row]
        self.data["not_run"].pop(row["name"], None)
        self.write()
        shown = {k: f"{v:.4g}" for k, v in row.items() if isinstance(v, float)}
        tell(f"{' '.join(str(part) for part in self.key(row) if part is not None)}: {shown}")

    def skip(self, name: str, reason: str) -> None:
        """Note why ``name`` has no row."""
        self.data["not_run"][name] = reason
        self.write()

    def write(self) -> None:
        if own_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")  # whole, whenever the process is ended
            new.write_text(json.dumps(self.data, indent=1) + "\n")
            new.replace(self.path)


@dataclass(frozen=True)
class Task:
    """Something to measure: the seconds that it needs, and the work, which adds its rows.

    ``done`` says whether its rows are there already.
    """

    name: str
    seconds: float
    work: Callable[[], None]
    done: Callable[[], bool] = lambda: False


def chosen(tasks: Iterable[Task], only: list[str] | None) -> list[Task]:
    """Those of the names ``only``, in that order, or all.

    Raises:
        SystemExit: there is none of a name.
    """
    known = {task.name: task for task in tasks}
    wanted = only or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no task is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


CUT_OFF = "begun, and cut off"


def run_tasks(tasks: Iterable[Task], results: Results, until: float, agreement: Agreement) -> None:
    """Do ``tasks`` in order; one that fails is noted in ``results``, and the next begins.

    Those that are noted there already are not tried again. One that no longer fits before ``until``
    (``time.time()``) is left out. One that takes twice its seconds ends the process: a rank that
    waits for another does not come back. ``torchrun --max-restarts=3`` starts all ranks again, and
    they go on behind it.
    """
    for task in tasks:
        if agreement.any(task.done() or task.name in results.data["not_run"]):
            continue
        if agreement.any(time.time() + task.seconds > until):
            tell(f"{task.name}: left out, it needs {task.seconds:.0f} s")
            continue
        results.skip(task.name, CUT_OFF)
        faulthandler.dump_traceback_later(2 * task.seconds + 10, exit=True)
        begun = time.perf_counter()
        try:
            task.work()
            results.data["not_run"].pop(task.name, None)
            results.write()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # CheckpointException is no Exception
            results.skip(task.name, f"{type(error).__name__}: {str(error)[:300]}")
            tell(f"{task.name}: {results.data['not_run'][task.name]}")
            traceback.print_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        tell(f"{task.name}: took {time.perf_counter() - begun:.1f} s")


# -- small traces -----------------------------------------------------------------------------


def profiled_events(profile: torch.profiler.profile) -> list[dict]:
    """The complete events of an exported trace by start; ``ts`` and ``dur`` in µs since the epoch.

    They have what the profiler's own events lack in torch 2.11: ``args.stream`` and
    ``args.correlation``.
    """
    with tempfile.TemporaryDirectory() as temporary:
        profile.export_chrome_trace(f"{temporary}/trace.json")
        raw = json.loads(Path(temporary, "trace.json").read_text())
    base = raw.get("baseTimeNanoseconds", 0) / 1e3
    complete = (event for event in raw["traceEvents"] if event.get("ph") == "X")
    return sorted((e | {"ts": e["ts"] + base} for e in complete), key=lambda event: event["ts"])


@dataclass(frozen=True)
class Drawn:
    """An event of a small trace: a lane of ``result_files.TRACE_LANES``, times in µs."""

    lane: str
    label: str
    start: float
    stop: float
    args: dict = field(default_factory=dict)


def blocks(events: Iterable[dict], lane: str, gap_us: float, label: Callable) -> list[Drawn]:
    """Events in order of start as blocks: neighbours with one label less than ``gap_us`` apart.

    Args:
        label: gives an event's label; None leaves the event out.
    """
    found: list[Drawn] = []
    for event in events:
        name, start, stop = label(event), event["ts"], event["ts"] + event["dur"]
        if name is None:
            continue
        last = found[-1] if found else None
        if last and last.label == name and start - last.stop < gap_us:
            found[-1] = Drawn(lane, name, last.start, max(stop, last.stop))
        else:
            found.append(Drawn(lane, name, start, stop))
    return found


GAP_US = 200.0  # kernels closer than this are one block
STALL_US = 5000.0  # a longer gap between blocks is drawn as a stall


def compute_lane(events: Iterable[dict]) -> list[Drawn]:
    """A training loop's kernels as blocks, and the gaps between them as stalls."""

    def label(event: dict) -> str | None:
        if event.get("cat") != "kernel" or event["name"].startswith("nccl"):
            return None
        return "optimizer" if "adam" in event["name"].lower() else "forward, backward"

    drawn = blocks(events, "compute", GAP_US, label)
    gaps = [(a.stop, b.start) for a, b in pairwise(drawn) if b.start - a.stop > STALL_US]
    return drawn + [Drawn("compute", "stall", *gap, {"stall": True}) for gap in gaps]


def write_trace(
    folder: Path,
    head: dict,
    mode: str,
    ours: bool,
    drawn: Iterable[Drawn],
    begin: float,
    marks: Iterable[tuple[str, float]] = (),
) -> None:
    """Write ``traces/<benchmark>.<mode>.<machine>.json`` in Chrome's format; rank 0 writes.

    Args:
        head: see :func:`header`.
        ours: whether ``mode`` is a recipe's or the library's.
        begin: µs, on the clock of ``drawn`` and ``marks``; becomes 0.
        marks: texts and µs, drawn across all lanes.
    """
    if own_rank() != 0:
        return
    drawn = [event for event in drawn if event.stop > event.start]
    tids = {lane: tid for tid, lane in enumerate(dict.fromkeys(d.lane for d in drawn), 1)}
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}}
        for lane, tid in tids.items()
    ]
    for event in drawn:
        times = {"ts": round(event.start - begin, 1), "dur": round(event.stop - event.start, 1)}
        place = {"ph": "X", "name": event.label, "pid": 0, "tid": tids[event.lane]}
        events.append(place | times | {"args": {"lane": event.lane} | event.args})
    for text, at in marks:
        mark = {"ph": "i", "name": text, "s": "g", "pid": 0, "tid": 1, "ts": round(at - begin, 1)}
        events.append(mark | {"args": {"mark": True}})
    kept = ("benchmark", "device", "ranks", "torch", "date")
    other = {"mode": mode, "rank": 0, "model": head["workload"].get("model", "synthetic")}
    other |= {key: head[key] for key in kept}
    other |= code_of_today() | {"ours": ours}
    path = folder / "traces" / f"{head['benchmark']}.{mode}.{machine_label(head)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    path.write_text(json.dumps(data) + "\n")
