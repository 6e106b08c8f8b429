# SPDX-License-Identifier: BSD-3-Clause
"""What a save to an object store and a load of it take, beside other ways to move the same bytes.

    python tools/object_stores.py            # 252 MB; 25 ms a request, 40 MB/s a connection
    python tools/object_stores.py --mb 1000 --ms 5 --rate 80 --repeats 5

The store is ``s3_server.py`` in another process. Needs obstore and s3fs.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import s3fs
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import from_url
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from s3_server import serving  # noqa: E402

from overlap_recipes.checkpoint import CheckpointManager, TrainingState  # noqa: E402
from overlap_recipes.checkpoint.loading import load_newest  # noqa: E402

PIECE = 8 << 20  # bytes of a request of the peers
BUCKET = "bucket"


# -- what is compared: each saves and loads the tensors of a training state


class Job:
    """A model with its optimizer, in so many bytes."""

    def __init__(self, nbytes: int) -> None:
        width = 512
        layers = nbytes // (12 * width * width)  # a parameter and AdamW's moments: 12 bytes
        self.model = torch.nn.Sequential()
        for _ in range(layers):
            self.model.append(torch.nn.Linear(width, width, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for number, (parameter, moments) in enumerate(self.optimizer.state.items()):
            found[f"{number}"] = parameter.detach()
            found[f"{number}.m"] = moments["exp_avg"]
            found[f"{number}.v"] = moments["exp_avg_sq"]
        return found

    def bytes(self) -> memoryview:
        flat = torch.cat([tensor.flatten() for tensor in self.tensors().values()])
        return memoryview(flat.numpy()).cast("B")


class Ours:
    """``save`` of a manager, in its block, and what its ``resume`` does."""

    def __init__(self, job: Job) -> None:
        self.state = TrainingState(job.model, job.optimizer)
        url = f"s3://{BUCKET}/ours"
        self.manager = CheckpointManager(url, self.state, keep_last=2, grace_s=None)
        self.manager.__enter__()
        self.step = 1
        self.manager.save(1).result()  # which locks memory, and plans

    def save(self) -> None:
        self.step += 1
        self.manager.save(self.step).result()

    def load(self) -> None:
        assert load_newest({"app": self.state}, self.manager.store, None, ()) == self.step

    def close(self) -> None:
        self.manager.__exit__(None, None, None)


class Obstore:
    """The same bytes as one object: parts of 5 MB, twelve at a time; ranges by sixteen threads."""

    def __init__(self, job: Job) -> None:
        self.store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
        self.data = job.bytes()
        self.loaded = memoryview(bytearray(len(self.data)))

    def save(self) -> None:
        self.store.put("obstore", self.data)

    def load_piece(self, begin: int) -> None:
        end = min(begin + PIECE, len(self.data))
        self.loaded[begin:end] = memoryview(self.store.get_range("obstore", start=begin, end=end))

    def load(self) -> None:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(self.load_piece, range(0, len(self.data), PIECE)))

    def close(self) -> None:
        assert self.loaded == self.data


class S3fs(Obstore):
    """The same by ``pipe_file``, which sends ten parts at a time, and ``cat_ranges``."""

    def __init__(self, job: Job) -> None:
        self.fs = s3fs.S3FileSystem()
        self.data = job.bytes()

    def save(self) -> None:
        self.fs.pipe_file(f"{BUCKET}/s3fs", bytes(self.data), chunksize=PIECE)

    def load(self) -> None:
        begins = range(0, len(self.data), PIECE)
        ends = [min(begin + PIECE, len(self.data)) for begin in begins]
        paths = [f"{BUCKET}/s3fs" for _ in begins]
        self.loaded = b"".join(self.fs.cat_ranges(paths, list(begins), ends))


class Dcp:
    """``dcp.save`` and ``dcp.load`` with torch's own writer and reader for fsspec."""

    def __init__(self, job: Job) -> None:
        self.tensors = job.tensors()
        self.url = f"s3://{BUCKET}/dcp"

    def save(self) -> None:
        dcp.save(self.tensors, storage_writer=FsspecWriter(self.url), no_dist=True)

    def load(self) -> None:
        dcp.load(self.tensors, storage_reader=FsspecReader(self.url), no_dist=True)

    def close(self) -> None:
        pass


WAYS = {"ours": Ours, "obstore": Obstore, "s3fs": S3fs, "dcp": Dcp}


class Written(logging.Handler):
    """Takes from the library's log how long a save was written after its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "written in" in record.msg:
            self.seconds.append(record.args[-1])


class Watch:
    """Seconds, CPU seconds, bytes over the wire, and the most memory above that at the begin."""

    def __init__(self) -> None:
        self.url = f"{os.environ['AWS_ENDPOINT_URL']}/__counts__"
        self.is_over = False

    def counts(self) -> Counter:
        with urllib.request.urlopen(self.url) as answer:
            return Counter(json.load(answer))

    def sample(self) -> None:
        while not self.is_over:
            self.most = max(self.most, resident())
            time.sleep(0.005)

    def measure(self, do: Callable[[], None]) -> dict[str, float]:
        self.counts()  # which forgets those before
        at_begin = resident()
        self.most = at_begin
        self.is_over = False
        sampler = threading.Thread(target=self.sample)
        sampler.start()
        cpu = time.process_time()
        began = time.monotonic()
        do()
        seconds = time.monotonic() - began
        cpu = time.process_time() - cpu
        self.is_over = True
        sampler.join()
        counts = self.counts()
        moved = counts["up"] + counts["down"]
        held = self.most - at_begin
        requests = counts["requests"]
        return {"s": seconds, "cpu_s": cpu, "moved": moved, "held": held, "requests": requests}


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=252)
    parser.add_argument("--ms", type=float, default=25, help="milliseconds a request")
    parser.add_argument("--rate", type=float, default=40, help="MB/s a connection")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    with serving(options.ms, options.rate) as environment:
        os.environ |= environment
        compare(options)


def compare(options: argparse.Namespace) -> None:
    written = Written()
    log = logging.getLogger("overlap_recipes.checkpoint.writing")
    log.setLevel(logging.INFO)
    log.addHandler(written)
    watch = Watch()
    job = Job(options.mb * 1_000_000)
    ways = {name: WAYS[name](job) for name in options.ways}
    nbytes = len(job.bytes())
    print(f"{nbytes / 1e6:.0f} MB; medians of {options.repeats}")
    measured: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for _ in range(options.repeats):  # in turns: what else runs here befalls all alike
        for name, way in ways.items():
            for what in ("save", "load"):
                measured[name, what].append(watch.measure(getattr(way, what)))
    for way in ways.values():
        way.close()
    if written.seconds:
        seconds = statistics.median(written.seconds[1:])
        print(f"ours: of a save {seconds:.2f} s were writing, the rest copies and comparisons")
    for what in ("save", "load"):
        for name in ways:
            runs = measured[name, what]
            median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(
                f"{name:8} {what}  {median['s']:6.2f} s  CPU {median['cpu_s']:5.2f} s  "
                f"over the wire {median['moved'] / nbytes:5.3f}  in {median['requests']:4.0f} "
                f"requests  memory +{max(run['held'] for run in runs) / 1e6:4.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
