# SPDX-License-Identifier: BSD-3-Clause
"""What a save costs by the number of ranks, on one host: ranks over gloo, forked from this process.

    python tools/many_ranks.py | tee lines             # 2, 8, 32 and 64 ranks, both stores
    python tools/many_ranks.py --write lines           # a result file of them, with 1,024 by a fit
    python tools/many_ranks.py --reshard 2 64 48 3     # each resumes what the one before has saved
    python tools/many_ranks.py --kills 20 --seeds 1 2  # 64 ranks, struck during saves, resumed

The state has 2,304 tensors that are sharded as by FSDP2, 768 counters and a norm that all ranks
have, and places of each rank. A value says of which tensor, element and step it is. Collectives are
counted where they are called, at the process group. The object store is the server of
``s3_server.py``, in another process of this host; that needs obstore. Seeds run at the same time.
"""

import argparse
import gc
import json
import logging
import math
import multiprocessing
import os
import random
import select
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401 (here once, and not in each rank)
import torch.distributed as dist

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from many_ranks_job import Job  # noqa: E402
from s3_server import serving  # noqa: E402

from benchmarks.code_versions import code_of_today  # noqa: E402
from benchmarks.measuring import header, machine_label  # noqa: E402
from overlap_recipes.checkpoint import (  # noqa: E402
    CheckpointManager,
    checked_files,
    saves,
    talk,
    writer,
)
from overlap_recipes.checkpoint.stores import directory, objects  # noqa: E402

RANKS = (2, 8, 32, 64)
KINDS = ("directory", "object_store")
FAR = 1024  # ranks, of which the fit says what they would cost
PARAMETERS = 768
SAVES = 5  # of a job that is measured, besides the first
STRUCK_SAVES = 3  # of a job that is struck
WAIT_S = 240.0  # of ranks for each other: two cores have many to serve
DEADLINE_S = 900.0  # of a job
COLLECTIVES = (
    *("allgather", "_allgather_base", "allreduce", "alltoall", "alltoall_base", "barrier"),
    *("broadcast", "gather", "recv", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("scatter", "send"),
)
LINEAR = (
    *("plan_s", "metadata_s", "metadata_bytes", "received_bytes", "first_received_bytes"),
    *("plan_received_bytes", "plan_received_by_others_bytes"),
)
STORE_CALLS = ("begin", "join", "create", "settle", "commit", "drop", "remove", "set_aside")


# -- what is counted


class Counted:
    """Collectives of this rank and their bytes; events at which it may be struck."""

    def __init__(self, strike_at: int, strike: Callable[[], None]) -> None:
        self.numbers: Counter = Counter()
        self.lock = threading.Lock()
        self.is_armed = False
        self.events = 0
        self.strike_at = strike_at
        self.strike = strike

    def install(self) -> None:
        for name in COLLECTIVES:
            self.around(dist.ProcessGroup, name, self.note_collective)
        for store in (directory.Directory, objects.Objects):
            for name in STORE_CALLS:
                self.around(store, name)
        for sink in (directory.FileSink, objects.ObjectSink):
            self.around(sink, "__exit__")
        self.around(os, "fsync")
        self.around(checked_files, "read_manifest", self.note_manifest)
        self.time(writer._Planner, "create_global_plan", "plan_s")
        self.time(writer._Layout, "metadata_with", "metadata_s")

    def around(self, owner: object, name: str, note: Callable | None = None) -> None:
        """Each call of ``owner.name`` is two events, its begin and its end."""
        original = getattr(owner, name)

        def call(*arguments: object, **named: object) -> object:
            if note is not None:
                note(arguments)
            self.event()
            result = original(*arguments, **named)
            self.event()
            return result

        setattr(owner, name, call)

    def note_collective(self, arguments: tuple) -> None:
        """After the group the output comes first; then the input, where there are both."""
        tensors = [part for part in arguments[1:] if isinstance(part, list | torch.Tensor)]
        with self.lock:
            self.numbers["collectives"] += 1
            if tensors:
                self.numbers["sent_bytes"] += nbytes_of(tensors[-1])
                self.numbers["received_bytes"] += nbytes_of(tensors[0])

    def note_manifest(self, arguments: tuple) -> None:
        with self.lock:
            self.numbers["manifests"] += 1

    def time(self, owner: type, name: str, what: str) -> None:
        """Count seconds of CPU of the calls: the cores are shared."""
        original = getattr(owner, name)

        def call(*arguments: object) -> object:
            began = time.thread_time()
            result = original(*arguments)
            self.numbers[what] += time.thread_time() - began
            if isinstance(result, bytes):
                self.numbers["metadata_bytes"] = len(result)
            return result

        setattr(owner, name, call)

    def event(self) -> None:
        if not self.is_armed:
            return
        with self.lock:
            self.events += 1
            if self.events == self.strike_at:
                self.strike()

    def taken(self) -> dict[str, float]:
        """The numbers since the last call."""
        with self.lock:
            numbers = dict(self.numbers)
            self.numbers.clear()
        return numbers


def nbytes_of(tensors: object) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(nbytes_of(each) for each in tensors)


# -- ranks


class OutOfTime(Exception):
    """A job has been ended at the time that was given to all."""


class Ranks:
    """Jobs of forked ranks below one root; what each rank has told."""

    def __init__(self, root: str, parameters: int, ends_at: float = math.inf) -> None:
        self.root = root
        self.parameters = parameters
        self.ends_at = ends_at  # by the monotonic clock, the last job as well
        self.durable = 0  # the newest step whose save has ended well, or that was resumed
        self.told: list[dict] = []
        self.codes: list[int] = []

    def run(self, ranks: int, count: int, struck: tuple[str, int] = ("", 0)) -> list[dict]:
        """Fork ``ranks``, which resume, check every bit, and save ``count`` times.

        Raises:
            OutOfTime: they have been ended at ``ends_at``.
        """
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        reading, writing = os.pipe()
        gc.collect()
        gc.freeze()  # what is not written stays shared
        children: list[int] = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.setpgid(0, children[0] if children else 0)
                self.be_rank(rank, ranks, listening, writing, count, struck)
            group = children[0] if children else child
            os.setpgid(child, group)
            children.append(child)
        os.close(writing)
        listening.close()
        self.told = []
        until = min(time.monotonic() + DEADLINE_S, self.ends_at)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            self.hear(pipe, until)
        if time.monotonic() > until:
            os.killpg(children[0], signal.SIGKILL)
        self.codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if time.monotonic() > self.ends_at:
            raise OutOfTime
        return self.told

    def hear(self, pipe: object, until: float) -> None:
        """Take what ranks tell, until all have ended."""
        rest = b""
        while select.select([pipe], [], [], max(0, until - time.monotonic()))[0]:
            data = pipe.read(1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.told.append(message)
                if message["what"] in ("save", "resume"):
                    self.durable = max(self.durable, message["step"])

    def be_rank(self, rank: int, ranks: int, listening, writing: int, count: int, struck) -> None:
        code = 1
        try:
            torch.set_num_threads(1)
            listens = listening.detach()
            store = dist.TCPStore(
                "127.0.0.1",
                port_of(listens),
                world_size=ranks,
                is_master=rank == 0,
                master_listen_fd=listens if rank == 0 else None,
            )
            timeout = timedelta(seconds=WAIT_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            talk.wait_of_ranks = lambda: timeout
            saves.EXIT_S = WAIT_S

            def tell(**message: object) -> None:
                os.write(writing, json.dumps({"rank": rank, **message}).encode() + b"\n")

            who, at = struck
            logging.disable(logging.ERROR if who else logging.WARNING)  # as of saves that fail
            counted = Counted(at if is_struck(who, rank) else 0, lambda: strike(who))
            self.job(count, counted, tell)
            dist.barrier()  # gloo may abort a process that ends within a collective
            code = 0
        except BaseException:
            if not struck[0]:
                traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def job(self, count: int, counted: Counted, tell: Callable) -> None:
        job = Job(self.parameters)
        counted.install()
        with CheckpointManager(self.root, job.state, keep_last=2, grace_s=None) as checkpoints:
            counted.taken()
            began = time.monotonic()
            done = checkpoints.resume()
            resume_s = time.monotonic() - began
            if done:
                job.check(done)
            tell(what="resume", step=done, resume_s=resume_s, **counted.taken())
            for step in (done + 1, done + 2):
                job.train(step)
            checkpoints.saves.preparation.done.result()
            tell(what="prepare", **counted.taken())
            counted.is_armed = True
            for step in range(done + 2, done + 2 + count):
                if step > done + 2:
                    job.train(step)
                began = time.monotonic()
                saved = checkpoints.save(step)
                call_s = time.monotonic() - began
                saved.result()
                numbers = {"call_s": call_s, "save_s": time.monotonic() - began}
                numbers |= counted.taken()
                tell(what="save", step=step, is_first=step == done + 2, **numbers)
            tell(what="end", events=counted.events)


def port_of(listens: int) -> int:
    duplicate = socket.socket(fileno=os.dup(listens))
    with duplicate:
        return duplicate.getsockname()[1]


def is_struck(who: str, rank: int) -> bool:
    if who in ("all", "first"):
        return rank == 0
    return who == str(rank)


def strike(who: str) -> None:
    if who == "all":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# -- what a person asks for


@contextmanager
def roots(kinds: list[str]) -> Iterator[Callable[[str, str], str]]:
    """A function that gives a root of a kind, by a name of its own."""
    with ExitStack() as block:
        if "object_store" in kinds:
            os.environ |= block.enter_context(serving(ms=0, rate=0))
        scratch = Path(block.enter_context(tempfile.TemporaryDirectory(prefix="many_ranks.")))

        def root_of(kind: str, name: str) -> str:
            return f"s3://bucket/{name}" if kind == "object_store" else str(scratch / name)

        yield root_of


def row_of(kind: str, ranks: int, told: list[dict]) -> dict:
    """What a job has told, as a row of a result file."""
    of_saves = [each for each in told if each["what"] == "save"]
    first = [each for each in of_saves if each["is_first"]]
    later = [each for each in of_saves if not each["is_first"]]
    planned = [each for each in told if each["what"] == "prepare"]
    on_others = [each for each in planned if each["rank"] > 0]
    counts = {each["collectives"] for each in later}
    assert len(counts) == 1, f"collectives differ from save to save, or rank to rank: {counts}"
    calls = [each["call_s"] for each in later]
    seconds = [each["save_s"] for each in later if each["rank"] == 0]
    return {
        "name": kind,
        **code_of_today(),
        "ours": True,
        "saved_ranks": ranks,
        "collectives": counts.pop(),
        "plan_s": most("plan_s", planned),
        "metadata_bytes": most("metadata_bytes", of_saves),
        "metadata_s": most("metadata_s", first),
        "later_metadata_s": most("metadata_s", later),
        "sent_bytes": most("sent_bytes", later),
        "received_bytes": most("received_bytes", later),
        "call_s": statistics.median(calls),
        "save_s": statistics.median(seconds),
        "first_collectives": most("collectives", first),
        "first_received_bytes": most("received_bytes", first),
        "plan_collectives": most("collectives", planned),
        "plan_received_bytes": most("received_bytes", planned),
        "plan_received_by_others_bytes": most("received_bytes", on_others),
        "samples": {"save_s": seconds},
    }


def most(name: str, told: list[dict]) -> float:
    return max(each.get(name, 0) for each in told)


def far(rows: list[dict]) -> dict:
    """What ``FAR`` ranks would cost by a straight line through ``rows``, without what cores do."""
    found = {
        "name": rows[0]["name"],
        **code_of_today(),
        "ours": True,
        "saved_ranks": FAR,
        "collectives": rows[-1]["collectives"],
        "note": "Not run: by a straight line through the other rows.",
        "samples": {},
    }
    numbers = [row["saved_ranks"] for row in rows]
    for name in LINEAR:
        slope, constant = statistics.linear_regression(numbers, [row[name] for row in rows])
        value = constant + FAR * slope
        found[name] = round(value) if name.endswith("_bytes") else value
        print(f"{rows[0]['name']} {name}: {constant:.3g} + {slope:.3g} a rank")
    return found


def write(lines: Path) -> None:
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    workload = {
        "sharded_tensors": 3 * PARAMETERS,
        "parameters": PARAMETERS,
        "hosts": 1,
        "cores": os.cpu_count(),
        "backend": "gloo on loopback",
        "saves": SAVES,
    }
    head = header("many_ranks", torch.device("cpu"), workload, {}) | {"driver": "none"}
    head["ranks"] = max(row["saved_ranks"] for row in rows)
    for kind in KINDS:
        of_kind = [row for row in rows if row["name"] == kind and row["saved_ranks"] != FAR]
        if len(of_kind) > 1:
            rows.append(far(of_kind))
    file = REPO / "benchmarks" / "results" / f"many_ranks.{machine_label(head)}.json"
    file.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    print(f"wrote {file.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--stores", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--write", type=Path, metavar="LINES", help="that earlier runs printed")
    parser.add_argument("--reshard", type=int, nargs="+", metavar="RANKS")
    parser.add_argument("--kills", type=int, help="how many jobs are struck, of each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all kills")
    asked = parser.parse_args()
    if asked.write:
        write(asked.write)
        return
    ends_at = time.monotonic() + asked.limit
    with roots(asked.stores) as root_of:
        for kind in asked.stores:
            if asked.reshard:
                reshard(Ranks(root_of(kind, "reshard"), asked.parameters), kind, asked.reshard)
            elif asked.kills:
                kill_all(root_of, kind, asked, ends_at)
            else:
                for ranks in asked.ranks:
                    job = Ranks(root_of(kind, f"ranks{ranks}"), asked.parameters)
                    told = job.run(ranks, 1 + SAVES)
                    assert job.codes == [0] * ranks, job.codes
                    print(json.dumps(row_of(kind, ranks, told)), flush=True)


def reshard(job: Ranks, kind: str, numbers: list[int]) -> None:
    for ranks in numbers:
        began = time.monotonic()
        durable = job.durable
        told = job.run(ranks, 1)
        assert job.codes == [0] * ranks, job.codes
        resumes = [each for each in told if each["what"] == "resume"]
        resumed = {each["step"] for each in resumes}
        assert resumed == {durable}, (resumed, durable)
        manifests = sum(each.get("manifests", 0) for each in resumes)
        print(
            f"{kind}: {ranks} ranks resumed step {durable} with every bit, read {manifests} "
            f"manifests, in {most('resume_s', resumes):.1f} s of {time.monotonic() - began:.0f}",
            flush=True,
        )


def kill_all(
    root_of: Callable[[str, str], str], kind: str, asked: argparse.Namespace, ends_at: float
) -> None:
    """Each seed has a process of its own, forked from this one, and a root."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(asked.seeds), mp_context=context) as processes:
        futures = []
        for seed in asked.seeds:
            job = Ranks(root_of(kind, f"kills{seed}"), asked.parameters, ends_at)
            futures.append(processes.submit(kill, job, kind, seed, max(asked.ranks), asked.kills))
        survived = sum(future.result() for future in futures)
    of = asked.kills * len(asked.seeds)
    print(f"{kind}: of {of} jobs {survived} were struck and resumed: 0 saves lost", flush=True)
    if survived < of:
        sys.exit("out of time")


def kill(job: Ranks, kind: str, seed: int, ranks: int, kills: int) -> int:
    """Strike jobs one after the other; each resumes what the one before has left.

    Returns:
        How many were struck, and resumed by the next: fewer than ``kills`` at the end of the time.
    """
    draw = random.Random(f"{kind} {seed}")
    survived = 0
    try:
        told = job.run(ranks, STRUCK_SAVES)
        events = {each["rank"]: each["events"] for each in told if each["what"] == "end"}
        assert len(events) == ranks, job.codes
        numbers = draw.sample(range(kills), kills)  # early and late, if the time ends before
        for done, number in enumerate([*numbers, kills]):
            who = ("first", "all", str(draw.randrange(1, ranks)))[number % 3]
            of_who = events[int(who) if who.isdigit() else 0]
            at = 1 + (number * of_who + draw.randrange(of_who)) // kills
            struck = (who, at) if number < kills else ("", 0)  # the last only resumes
            durable = job.durable
            told = job.run(ranks, STRUCK_SAVES, struck)
            resumed = {each["step"] for each in told if each["what"] == "resume"}
            how_many = sum(each["what"] == "resume" for each in told)
            assert how_many == ranks, f"{ranks - how_many} ranks have not resumed: {job.codes}"
            assert len(resumed) == 1 and min(resumed) >= durable, (resumed, durable)
            survived = done
            was_struck = -signal.SIGKILL in job.codes
            assert was_struck == bool(struck[0]), (struck, events, job.codes)
            print(f"{kind}, seed {seed}: {resumed} resumed, {durable} known", struck, flush=True)
    except OutOfTime:
        print(f"{kind}, seed {seed}: out of time", flush=True)
    return survived


if __name__ == "__main__":
    main()
