"""Measure what communication costs a sharded stock Llama, and what each way of hiding it leaves.

    torchrun --nproc-per-node=2 --max-restarts=3 benchmarks/fsdp_overlap.py --until 300
    torchrun --nproc-per-node=2 benchmarks/fsdp_overlap.py --small --out /tmp/rehearsal  # on a CPU

    for way in fsdp2 fsdp2_in_place; do  # memory: a fresh process each
        torchrun --nproc-per-node=2 benchmarks/fsdp_overlap.py --tasks memory_$way; done
    torchrun --nproc-per-node=2 benchmarks/fsdp_overlap.py --tasks bitwise,losses,sums
    python benchmarks/join_rows.py FOLDER  # rows measured elsewhere, of the present code

Tasks run in the order in which ``--tasks`` names them, by default that of ``TASKS``, as far as they
fit before ``--until`` (seconds from now); rows are written as they are known. A task that hangs
ends its ranks; torchrun starts them again behind it.

How a number is made
--------------------
Every way trains the same stock Llama (``workloads.py``: ``llama-8b-blocks``, float32 weights,
bfloat16 gathers, fused AdamW, clipping) on the same tokens. Some ways are on the device at a time,
the reference among them, and take turns: a window is a few steps that are not timed and some that
are, and begins on all ranks together. Every other round the order is reversed. A window's time is
that of the slowest rank.

* ``step_s``: median of a way's windows, with the bootstrap's 95 % interval.
* ``efficiency``: the reference's window over this way's of the same round; median, interval.
* ``speed_over_fsdp2``: stock FSDP2's window over this way's of the same round, likewise.
* ``no_communication``, the reference: whole bfloat16 weights on each rank, which updates its own
  float32 rows and casts them into its weights. Nothing is sent, gathered or copied.
* ``fsdp2_no_collectives``: stock FSDP2, its collectives replaced by copies on the device;
  ``speed_over_no_collectives`` is against it.
* ``peak_*_bytes``: of a fresh process for each way, which trains at one size after another.
* ``fsdp2_faster_way``: the way that ``use_peer_copies`` has kept by its first steps; which one,
  its ``note`` says.
* ``bitwise_steps``: steps after which every weight and loss was that of stock FSDP2, bit by bit,
  under deterministic algorithms.
* ``loss_difference``: from stock FSDP2's losses over ``losses_steps`` steps, the mean of the last
  tenth; of a second stock run it is the noise.
* ``sum_error``: of gradients against the sum of all ranks' in float64, root of the mean square, of
  that of the sum. Beyond two ranks sums depend on their order.

The synthetic stack (eight units of four bfloat16 matrices, one Adam in bfloat16) stays for one
comparison: FSDP2 in place with the stock one, where nothing but products hides communication.
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes_source" / "sharding"))
sys.path.insert(0, str(ROOT))

import fsdp2_settings  # noqa: E402

from benchmarks import measuring  # noqa: E402
from benchmarks.fsdp_ways import REFERENCE, STACKS, WAYS, Case, Way, rows_of  # noqa: E402
from benchmarks.measuring import Task, summary, tell, timing_event  # noqa: E402
from overlap_recipes.fsdp2 import peer_memory  # noqa: E402

STEPS = {1024: 5, 2048: 4, 4096: 3, 8192: 2, 12_288: 2, 16_384: 1}  # timed ones of a window
ROUNDS = 8
COLLECTIVE_TIMEOUT = timedelta(seconds=120)


# -- what to measure --------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """Ways in turn: about ``seconds`` on two GPUs, ``rounds`` of each size."""

    seconds: float
    ways: tuple[str, ...]
    tokens: tuple[int, ...]
    options: dict = field(default_factory=dict)
    rounds: int = ROUNDS


THREE = (REFERENCE, "fsdp2", "fsdp2_in_place")
THREE_AND_TUNED = (REFERENCE, "fsdp2", "fsdp2_in_place", "fsdp2_tuned")
FOUR = (REFERENCE, "fsdp2_no_collectives", "fsdp2", "fsdp2_in_place")
FOUR_AND_TUNED = (REFERENCE, "fsdp2_no_collectives", "fsdp2", "fsdp2_in_place", "fsdp2_tuned")
GROUP = (REFERENCE, "fsdp2", "fsdp2_reduce_group")
TUNED = (REFERENCE, "fsdp2_tuned", "fsdp2_in_place")
CHOOSES = (REFERENCE, "fsdp2", "fsdp2_faster_way")  # once for a model: one size
BEGUN = (REFERENCE, "fsdp2_in_place", "fsdp2_in_place_begun", "fsdp2_in_place_kept")
MEGATRON = (REFERENCE, "fsdp2_in_place", "megatron-fsdp")
GUIDE = (REFERENCE, "fsdp2_in_place", "megatron-fsdp-guide")
SYNTHETIC = {"model": "synthetic", "loop": "free"}
TASKS = {  # the most important first
    "eager": Windows(90, FOUR, (4096, 12_288)),
    "begun": Windows(90, BEGUN, (4096, 12_288)),
    "small": Windows(100, THREE_AND_TUNED, (1024, 2048, 4096)),
    "chooses_1024": Windows(40, CHOOSES, (1024,)),
    "chooses_2048": Windows(40, CHOOSES, (2048,)),
    "chooses_4096": Windows(45, CHOOSES, (4096,)),
    "compiled": Windows(75, THREE, (2048, 4096), {"compiled": True}, 6),
    "compiled_small": Windows(50, THREE, (1024,), {"compiled": True}, 6),
    "group": Windows(45, GROUP, (2048, 4096), {}, 6),
    "tuned": Windows(60, TUNED, (4096, 2048, 12_288), {}, 6),
    "large": Windows(80, THREE, (8192, 16_384), {}, 6),
    "free_long": Windows(90, FOUR, (4096, 12_288), {"loop": "free"}),
    "synthetic": Windows(70, tuple(STACKS), (2048, 4096, 1024), SYNTHETIC),
    "free": Windows(45, THREE, (1024, 2048), {"loop": "free"}, 6),
    "bf16": Windows(50, THREE, (2048, 8192), {"reduce_dtype": "bfloat16"}, 6),
    "recompute": Windows(60, THREE, (2048, 8192), {"activation_checkpointing": True}, 6),
    "megatron": Windows(60, MEGATRON, (2048, 8192), {}, 4),
    "megatron_guide": Windows(60, GUIDE, (2048, 8192), {}, 4),
    "four": Windows(60, FOUR_AND_TUNED, (4096, 2048), {}, 4),  # more GPUs than two
    "four_long": Windows(50, THREE_AND_TUNED, (12_288,), {}, 4),
    "four_megatron": Windows(50, MEGATRON, (4096, 2048, 12_288), {}, 4),
    "four_guide": Windows(50, GUIDE, (4096, 2048, 12_288), {}, 4),
    "four_rest": Windows(60, THREE, (1024, 8192, 16_384), {}, 4),
}
OURS = [name for name, way in (STACKS | WAYS).items() if way.ours]
VARIED = ("tokens",) + tuple(Case.__dataclass_fields__)


# -- windows ----------------------------------------------------------------------------------


class Run:
    """One command: a result file that grows.

    Raises:
        ValueError: there is one rank, which has nothing to communicate.
    """

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        if dist.get_world_size() == 1:
            raise ValueError("start at least two ranks: one has nothing to communicate")
        self.arguments = arguments
        self.device = device
        self.agreement = measuring.Agreement()
        workload = {
            "model": "stock blocks of Llama 3 8B (workloads.py), or a stack of matrices",
            "precision": "float32 weights, bfloat16 gathers; the stack bfloat16 throughout",
            "optimizer": "AdamW, fused",
            "tokens": "a rank and step",
        }
        head = measuring.header("fsdp_overlap", device, workload, {})
        self.results = measuring.Results(arguments.out, head, OURS, VARIED)

    def case(self, **options: object) -> Case:
        if self.arguments.small and "model" not in options:
            options["model"] = "llama-tiny"
        return Case(**options)

    def row(self, name: str, case: Case, tokens: int) -> dict:
        """The row as it is known, or a new one."""
        known = self.results.find(name, tokens=tokens, **asdict(case))
        if known:
            return known
        return {"name": name, "tokens": tokens} | asdict(case) | {"samples": {}}

    def measured(self, ways: tuple[str, ...], case: Case, sizes: list[int]) -> bool:
        for name in ways:
            for tokens in sizes:
                if "efficiency" not in self.row(name, case, tokens):
                    return False
        return True

    def window(self, loop: object, count: int) -> float:
        """Seconds a step of ``count`` steps on the slowest rank, behind half as many."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        for _ in range(max(1, count // 2)):
            loop.step()
        begin = timing_event(self.device)
        end = timing_event(self.device)
        begin.record()
        for _ in range(count):
            loop.step()
        end.record()
        end.synchronize()
        return self.agreement.largest(begin.elapsed_time(end) / 1e3 / count)

    def compare(
        self, ways: tuple[str, ...], case: Case, sizes: list[int], rounds: int = ROUNDS
    ) -> None:
        """Rows of ``ways``, the reference among them, in windows that take turns."""
        kinds = STACKS if case.model == "synthetic" else WAYS
        built = {name: kinds[name](case, self.device) for name in ways}
        for tokens in sizes:
            loops = {name: way.loop(tokens) for name, way in built.items()}
            losses = {}
            for name, loop in loops.items():
                for _ in range(3):
                    loop.step()
                losses[name] = 0.0
                if loop.loss is not None:
                    losses[name] = float(loop.loss)
            tell(f"{case}, {tokens} tokens, losses {losses}")
            count = 1 if self.arguments.small else STEPS[tokens]
            windows = {name: partial(self.window, loop, count) for name, loop in loops.items()}
            samples = list(measuring.in_turn(windows, rounds))
            for name in ways:
                self.add(name, built[name].how(), case, tokens, samples)
            del loops, windows
            measuring.forget_memory(self.device)

    def add(self, name: str, how: dict, case: Case, tokens: int, samples: list[dict]) -> None:
        """A row of ``name``; ``samples`` are rounds: by way, the seconds of its window."""
        row = self.row(name, case, tokens) | how
        own = [seconds[name] for seconds in samples]

        def speed_over(way: str) -> list[float]:
            return [seconds[way] / seconds[name] for seconds in samples]

        beside_no_collectives = "fsdp2_no_collectives" in samples[0]
        if beside_no_collectives:
            speeds = speed_over("fsdp2_no_collectives")
            row |= summary("speed_over_no_collectives", speeds)
        # What a row has already is not replaced by windows beside that way.
        if not beside_no_collectives or "efficiency" not in row:
            row["pairs"] = len(samples)
            row |= summary("step_s", own)
            row |= summary("efficiency", speed_over(REFERENCE))
            row["samples"] = {"window_s": own}
        if "fsdp2" in samples[0]:
            row |= summary("speed_over_fsdp2", speed_over("fsdp2"))
        self.results.add(row)

    def memory(self, name: str) -> None:
        """Peaks of ``name`` alone, in this process, which has done nothing else."""
        case = self.case()
        before = self.in_use()
        way = WAYS[name](case, self.device)
        for tokens in self.sizes(1024, 2048, 4096, 12_288):
            loop = way.loop(tokens)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            for _ in range(4):
                loop.step()
            measuring.synchronize(self.device)
            row = self.row(name, case, tokens) | measuring.device_peaks(self.device)
            if self.device.type == "cuda":  # the allocator still holds its peak
                row["peak_device_bytes"] = self.in_use() - before
            self.results.add(way.how() | row)

    def in_use(self) -> int:
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def trained(self, name: str, steps: int, layers: int, tokens: int) -> tuple[Way, list[float]]:
        way = WAYS[name](self.case(), self.device, layers=layers)
        loop = way.loop(tokens)
        losses = []
        for _ in range(steps):
            loop.step()
            losses.append(loop.loss)
        tell(f"{name}: losses {losses[0]} ... {losses[-1]}")
        assert losses[0] != losses[-1], "nothing was learned, so nothing was compared"
        return way, losses

    def bitwise(self, steps: int, layers: int = 4) -> None:
        """Losses and weights of in place and stock FSDP2 after ``steps``, all bits.

        Raises:
            AssertionError: a bit differs; the message names the first step or weight.
        """
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        (tokens,) = self.sizes(512)
        losses = {}
        weights = {}
        for name in ("fsdp2", "fsdp2_in_place"):
            way, losses[name] = self.trained(name, steps, layers, tokens)
            weights[name] = {n: p.to_local().cpu() for n, p in way.model.named_parameters()}
            del way
        torch.use_deterministic_algorithms(False)
        for step in range(steps):
            is_same = losses["fsdp2"][step] == losses["fsdp2_in_place"][step]
            assert is_same, f"losses differ from step {step} on"
        for name, weight in weights["fsdp2"].items():
            assert torch.equal(weight, weights["fsdp2_in_place"][name]), f"{name} differs"
        row = self.row("fsdp2_in_place", self.case(), tokens)
        self.results.add(row | {"note": f"{layers} layers", "bitwise_steps": steps})
        tell(f"every bit of stock FSDP2 after {steps} steps")

    def losses(self, steps: int, layers: int = 2) -> None:
        """How far losses are from stock FSDP2's, beside those of a second stock run."""
        (tokens,) = self.sizes(512)
        _, expected = self.trained("fsdp2", steps, layers, tokens)
        for name in ("fsdp2", "fsdp2_in_place"):
            _, losses = self.trained(name, steps, layers, tokens)
            apart = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
            tail = apart[-max(1, steps // 10) :]
            row = self.row(name, self.case(), tokens) | {
                "last_loss": losses[-1],
                "losses_steps": steps,
                "loss_difference": sum(tail) / len(tail),
            }
            self.results.add({"note": f"{layers} layers"} | row)
            tell(f"{name}: losses differ by at most {max(apart)}")

    def sums(self, layers: int = 2) -> None:
        """Errors of reduced gradients against the float64 sum of all ranks'."""
        (tokens,) = self.sizes(512)
        ranks = dist.get_world_size()
        for name in ("fsdp2", "fsdp2_in_place"):
            way = WAYS[name](self.case(), self.device, layers=layers)
            loop = way.loop(tokens)
            loop.step()
            groups = peer_memory.param_groups(way.model)
            parameters = []
            for group in groups:
                parameters += group.fsdp_params
            whole: dict = {}  # this rank's gradients before they are reduced, by number

            def keep(number: int, kept: dict, gradient: torch.Tensor) -> None:
                kept[number] = gradient.double()

            for number, parameter in enumerate(parameters):
                parameter.unsharded_param.register_hook(partial(keep, number, whole))
            loop.forward_backward()
            squares = torch.zeros(2, dtype=torch.float64)  # of errors, and of what is expected
            for number, parameter in enumerate(parameters):
                gradient = whole[number]
                dist.all_reduce(gradient)
                expected = rows_of(gradient / ranks)
                found = parameter.sharded_param.grad.to_local().double()
                norms = torch.stack([(found - expected).norm(), expected.norm()])
                squares += norms.cpu() ** 2
            error = (squares[0] / squares[1]).sqrt().item()
            largest = self.agreement.largest(error)
            row = self.row(name, self.case(), tokens) | {"sum_error": largest}
            self.results.add({"note": f"{layers} layers"} | row)
            del way, loop, whole, groups, parameters, parameter, group

    def link(self) -> None:
        """Bytes a rank receives from its peers a second, by NCCL and by copies, nothing beside."""
        nbytes = 2**12 if self.arguments.small else 2**28
        memory = peer_memory.PeerMemory(dist.group.WORLD, self.device)
        shards = memory.empty([nbytes], torch.uint8)
        ranks = memory.ranks
        whole = torch.empty(ranks, nbytes, dtype=torch.uint8, device=self.device)

        def copies() -> None:
            for rank, shard in enumerate(shards):
                if rank != memory.rank:
                    whole[rank].copy_(shard, non_blocking=True)

        works = {
            "nccl_gather": lambda: fsdp2_settings.all_gather(whole.view(-1), shards[memory.rank]),
            "copy_engine_gather": copies,
        }
        for name, work in works.items():
            seconds = statistics.median(measuring.seconds_of(work, self.device, 9))
            self.results.data["link"][f"{name}_bytes_per_s"] = (ranks - 1) * nbytes / seconds
        tell(f"link {self.results.data['link']}")
        self.results.write()

    def sizes(self, *tokens: int) -> list[int]:
        """As many as ``tokens``, small ones in a rehearsal."""
        if self.arguments.small:
            return [64, 128, 192][: len(tokens)]
        return list(tokens)

    def tasks(self) -> list[Task]:
        """What was asked for, in that order, or the link and all ``TASKS``."""
        small = self.arguments.small
        found = [
            Task("link", 5, self.link, lambda: bool(self.results.data["link"])),
            Task("bitwise", 60, lambda: self.bitwise(5 if small else 200)),
            Task("losses", 130, lambda: self.losses(20 if small else 1000)),
            Task("sums", 25, self.sums),
        ]
        for name, wanted in TASKS.items():
            case = self.case(**wanted.options)
            sizes = self.sizes(*wanted.tokens)
            rounds = 2 if small else wanted.rounds
            work = partial(self.compare, wanted.ways, case, sizes, rounds)
            done = partial(self.measured, wanted.ways, case, sizes)
            found.append(Task(name, wanted.seconds, work, done))
        for name in WAYS:
            found.append(Task(f"memory_{name}", 20, partial(self.memory, name)))
        by_default = ["link"] + list(TASKS)
        return measuring.chosen(found, self.arguments.only or by_default)


def main() -> None:
    arguments = measuring.command_line(__doc__).parse_args()
    with measuring.started_rank(COLLECTIVE_TIMEOUT) as device:
        run = Run(arguments, device)
        measuring.run_tasks(run.tasks(), run.results, arguments.until, run.agreement)


if __name__ == "__main__":
    main()
