"""Measure what each part takes from the start of a process to the end of its first step.

    python benchmarks/first_step.py --way write            # the checkpoint and the folder, once
    python benchmarks/first_step.py --way in_turn          # each start adds a sample to its row
    python benchmarks/first_step.py --way beside --cold    # behind another --cold; torchrun too
    python benchmarks/first_step.py --way folder           # or from_pretrained
    python benchmarks/first_step.py --way remove           # at last

The model is stock, built on meta and sharded. ``in_turn`` does one part behind the other, as
scripts do. ``beside`` does on threads what waits for nothing: from the start of the process the
checkpoint's files are read into the page cache, from the import of torch on the device is opened,
and behind the process group the first batch is fetched. Both resume a checkpoint with Adam's state.
``folder`` fills the weights alone from safetensors, each rank its rows; ``from_pretrained`` has
each rank load the whole model on the CPU, shard it, and move its shards.

* Parts: ``import_s`` (torch, transformers, the library), ``join_s`` (process group and device),
  ``build_s`` (model without weights, sharded, with memory), ``load_s`` (with an optimizer),
  ``data_s`` (the first batch of a loader with a worker), ``first_step_s``. ``total_s`` is all of
  it, from the interpreter's first line on. The slowest rank's; so parts of several ranks overlap.
* ``second_step_s``: what a step takes behind the first. With ``--compile``, the first step less
  this is what compiled layers cost with a warm cache: the first start of all fills it.
* ``host_peak_bytes``: the most resident memory over that before the load, of rank 0.
* ``log``: the library's own lines within the load, behind the seconds since the start.

``--cold`` drops the files from the page cache before the start, as on another machine.
"""

import time

STARTED = time.time()  # before anything heavy is imported

import argparse  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from pathlib import Path  # noqa: E402
from threading import Thread  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PIECE = 32 << 20  # bytes that are read ahead at a time
READERS = 8
WAYS = ("write", "in_turn", "beside", "folder", "from_pretrained", "remove")


def read_ahead(files: list[Path]) -> None:
    """Bring files into the page cache."""

    def read(file: Path) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        while os.read(descriptor, PIECE):
            pass
        os.close(descriptor)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, files))


def files_of_this_rank(place: Path, ranks: int) -> list[Path]:
    """Each rank reads ahead what it has saved."""
    files = sorted(place.glob("*"))
    rank = int(os.environ.get("RANK", "0"))
    return [file for number, file in enumerate(files) if number % ranks == rank]


class Clock:
    """Notes the parts as they end."""

    def __init__(self) -> None:
        self.last = STARTED
        self.parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = time.time()
        self.parts[part] = now - self.last
        self.last = now


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/first_step"), help="storage")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="for the results")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal on a CPU")
    parser.add_argument("--compile", action="store_true", help="the layers")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.way == "remove":
        shutil.rmtree(chosen.root)
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if chosen.way == "beside":
        own = files_of_this_rank(chosen.root / "checkpoints" / "step1", ranks)
        Thread(target=read_ahead, args=(own,), daemon=True).start()
    clock = Clock()
    import torch

    if chosen.way == "beside" and torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0"))
        opening = {"target": torch.empty, "args": (1,), "kwargs": {"device": f"cuda:{index}"}}
        Thread(**opening, daemon=True).start()

    from benchmarks import first_step_parts

    clock.end("import_s")
    first_step_parts.run(chosen, clock)


if __name__ == "__main__":
    main()
