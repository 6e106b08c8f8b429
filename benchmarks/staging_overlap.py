"""Where the time of a staging copy goes that should run during the next step; nothing is written.

    STAGING_FILES=/tmp/staging-2.13 python benchmarks/staging_overlap.py --until 300
    python benchmarks/staging_overlap.py --small --out /tmp/rehearsal

A stock Llama trains all the time, as in ``checkpoint_stall.py``, whose windows and costs these are.
The writer drops what it is given, so that the copy alone is seen. In each save it also notes

* ``state_dict_s``: the host in ``state_dict()``; ``call_s``: in the whole call.
* ``held_s``: the staging thread in ``UntypedStorage.copy_`` of numbers of at most eight bytes,
  during which it keeps the interpreter's lock; ``held_copies``: how many of these there were.
* ``update_waits_s``: the training thread in the wait before the optimizer step.

``tokens`` of a step and the ``loop`` (``reads`` a number in mid-step, or is ``free``) vary.
"""

import argparse
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from benchmarks import measuring
from benchmarks.checkpoint_stall import (
    OURS,
    PARAMETERS,
    Case,
    Training,
    size_of,
    usual_steps,
)
from benchmarks.checkpoint_ways import WAYS, RecipeWay, leaves
from benchmarks.measuring import Results, Task, intervals_of, medians

NAMES = (
    "overlapped_stager",
    "default_stager_2.13",
    "default_stager_2.13_numbers_pinned",
    "pinned",
)
CASES = (
    Case(step="long", loop="reads"),
    Case(step="long", loop="free"),
    Case(step="longest", loop="reads"),
    Case(step="longest", loop="free"),
)
NUMBER = 8  # bytes at most


class NothingWritten(FileSystemWriter):
    """Plans and drops."""

    def write_data(self, plan: object, planner: object) -> torch.futures.Future:
        done = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: object, results: list) -> None: ...


class Notes:
    """Seconds by name since the last ``take``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def timed(self, name: str, work: object) -> object:
        def timed(*arguments: object, **options: object) -> object:
            begun = time.perf_counter()
            result = work(*arguments, **options)
            self.add(name, time.perf_counter() - begun)
            return result

        return timed

    def take(self) -> dict[str, float]:
        taken = self.seconds
        self.seconds = {}
        return taken


@contextmanager
def noted(way: RecipeWay, notes: Notes):
    """Note what the way and torch's stager do."""
    app_state_dict = way.app.state_dict
    before_update = way.before_update
    copy_ = torch.UntypedStorage.copy_

    def noted_copy(target: torch.UntypedStorage, source: torch.UntypedStorage, *rest, **options):
        begun = time.perf_counter()
        result = copy_(target, source, *rest, **options)
        if target.nbytes() <= NUMBER:
            notes.add("held_s", time.perf_counter() - begun)
            notes.add("held_copies", 1)
        return result

    way.app.state_dict = notes.timed("state_dict_s", app_state_dict)
    way.before_update = notes.timed("update_waits_s", before_update)
    torch.UntypedStorage.copy_ = noted_copy
    try:
        yield
    finally:
        del way.app.state_dict
        del way.before_update
        torch.UntypedStorage.copy_ = copy_


def measure(training: Training, results: Results, fixed: dict, name: str, rounds: int) -> None:
    """The rows of one way: its stager makes its buffers once for all cases."""
    way = WAYS[name](training.app, training.device)
    way.checkpoints.writer = NothingWritten
    training.way = way
    notes = Notes()
    directory = training.new_directory()
    try:
        with noted(way, notes):
            first = training.saving(directory)
            first_call_s = first.save.returned_at - first.save.called_at
            measuring.tell(
                f"{name}: first call {first.save.returned_at - first.save.called_at:.2f} s"
            )
            for case in CASES:
                training.prepare(case)
                training.saving(directory)
                saves, without, parts = [], [], []
                for _ in range(rounds if case.step == "long" else rounds - 2):
                    notes.take()
                    saves.append(training.saving(directory))
                    parts.append(notes.take())
                    without.append(training.quiet(saves[-1]))
                quiet = [intervals_of(window.ends) for window in without]
                samples = []
                for number, window in enumerate(saves):
                    usual = usual_steps(quiet, number)
                    wanted = ("staging_cost_s", "call_s", "staged_s", "step_s")
                    times = window.times(usual)
                    sample = {key: times[key] for key in wanted}
                    for part in ("state_dict_s", "held_s", "held_copies", "update_waits_s"):
                        sample[part] = parts[number].get(part, 0.0)
                    samples.append(sample)
                tokens = training.size.tokens[case.step] * dist.get_world_size()
                row = {"name": name, **vars(case), "tokens": tokens, "note": way.note, **fixed}
                row["first_call_s"] = first_call_s
                results.add(row | medians(samples, ["staging_cost_s"]))
                own = [usual_steps(quiet, i, own=False) for i in range(len(without))]
                empty = [
                    {"staging_cost_s": w.times(u)["staging_cost_s"], "step_s": w.times(u)["step_s"]}
                    for w, u in zip(without, own, strict=True)
                ]
                none = {"name": "none", **vars(case), "tokens": tokens, **fixed}
                if rounds > 2 and not results.find("none", **vars(case), tokens=tokens):
                    results.add(none | medians(empty, ["staging_cost_s"]))
    finally:
        training.way = None
        way.close()
        training.remove(directory)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    size = size_of(None, arguments.small, dist.get_world_size())
    storages = {"memory": Path("/dev/shm"), "disk": Path("/dev/shm")}
    training = Training(size, device, storages)
    state = leaves(training.app.state_dict()).values()
    by_address = {x.data_ptr(): x.nbytes for x in state if isinstance(x, torch.Tensor)}
    link = measuring.link_rates(device, size.link_bytes)
    workload = {"precision": "float32 weights and Adam state, bfloat16 compute"}
    head = measuring.header("staging_overlap", device, workload, link)
    results = Results(arguments.out, head, OURS, PARAMETERS)
    fixed: dict[str, object] = {"tensors": len(by_address)}
    if link:
        fixed["bound_s"] = sum(by_address.values()) / link["pinned_d2h_bytes_per_s"]
        fixed["bound_from"] = "bytes of state of a rank over the rate of its link"
    tasks = []
    for name in NAMES:
        work = partial(measure, training, results, fixed, name, arguments.rounds)
        tasks.append(Task(name, 60 + 20 * arguments.rounds, work))
    tasks = measuring.chosen(tasks, arguments.only)
    measuring.run_tasks(tasks, results, arguments.until, training.agreement)


def main() -> None:
    parser = measuring.command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="pairs of windows of each case")
    arguments = parser.parse_args()
    with measuring.started_rank() as device:
        run(arguments, device)


if __name__ == "__main__":
    main()
