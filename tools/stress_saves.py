"""Save a stock Llama again and again in a loop that does all that may disturb a save.

    torchrun --nproc-per-node=2 tools/stress_saves.py --ways async_save --saves 200
    python tools/stress_saves.py --ways overlapped --saves 20 --model llama-1b --layers 4 \\
        --tokens 8192 --behind 1 --dir /dev/shm

Between saves the loop reads scalars, pauses, clips, follows a schedule, swaps in an average of the
weights, and at times loads an earlier checkpoint. Head and embedding are tied, attention has
adapters, two optimizers share the rest. Every bit is compared; host memory must not grow.
"""

import argparse
import copy
import ctypes
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "checkpoint")]

import _toys as basic  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402

from benchmarks.workloads import LARGEST_NORM, llama, rising_rate, shard  # noqa: E402
from overlap_recipes.checkpoint.saves import Saves  # noqa: E402

RANK_OF_ADAPTERS = 4
AVERAGE = 0.01  # share of the new weights
LONGEST_PAUSE_S = 0.02
GROWTH = 48e6  # bytes of host memory that may come and go


class WithAdapter(nn.Module):
    """A frozen linear layer beside a trained product of two narrow ones."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        where = {"device": frozen.weight.device, "bias": False}
        self.down = nn.Linear(frozen.in_features, RANK_OF_ADAPTERS, **where)
        self.up = nn.Linear(RANK_OF_ADAPTERS, frozen.out_features, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Job(Stateful):
    """A stock Llama, what trains it, and a state for all of it."""

    def __init__(self, asked: argparse.Namespace, device: torch.device) -> None:
        model = llama(asked.model, device, layers=asked.layers, vocabulary=asked.vocabulary)
        for layer in model.model.layers:
            attention = layer.self_attn
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(attention, part, WithAdapter(getattr(attention, part)))
        self.model, self.device, self.step = shard(model), device, 0
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        slow = [p for name, p in trained.items() if "embed" in name or "norm" in name]
        fast = [p for p in trained.values() if all(p is not other for other in slow)]
        self.optimizers = [
            torch.optim.AdamW(fast, lr=1e-3),
            torch.optim.SGD(slow, lr=1e-2, momentum=0.9, weight_decay=0.01),
        ]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, rising_rate)
            for optimizer in self.optimizers
        ]
        self.trained = trained
        self.average = {name: p.detach().clone() for name, p in trained.items()}
        vocabulary = model.get_input_embeddings().num_embeddings
        self.shape, self.vocabulary = (-(-asked.tokens // 512), min(asked.tokens, 512)), vocabulary

    def state_dict(self) -> dict:
        model, optimizers = get_state_dict(self.model, self.optimizers)
        schedules = [schedule.state_dict() for schedule in self.schedules]
        return {
            "model": model,
            "optimizers": optimizers,
            "average": dict(self.average),
            "schedules": {str(n): state for n, state in enumerate(schedules)},
            "step": self.step,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        model, optimizers = state_dict["model"], state_dict["optimizers"]
        set_state_dict(
            self.model, self.optimizers, model_state_dict=model, optim_state_dict=optimizers
        )
        for number, schedule in enumerate(self.schedules):
            schedule.load_state_dict(state_dict["schedules"][str(number)])
        self.step = state_dict["step"]

    def batch(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        return torch.randint(self.vocabulary, self.shape, generator=draw).to(self.device)

    def train(self) -> float:
        ids = self.batch()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(list(self.trained.values()), LARGEST_NORM)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        for name, weight in self.trained.items():
            self.average[name].lerp_(weight.detach(), AVERAGE)
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss of the averaged weights, which stand in for the trained ones meanwhile."""
        kept = {name: weight.detach().clone() for name, weight in self.trained.items()}
        for name, weight in self.trained.items():
            weight.copy_(self.average[name])
        ids = self.batch()
        loss = self.model.eval()(input_ids=ids, labels=ids, use_cache=False).loss
        self.model.train()
        for name, weight in self.trained.items():
            weight.copy_(kept[name])
        return loss.item()


class Way:
    """One way of saving, by the calls that they have in common."""

    def __init__(self, name: str, root: Path, job: Job) -> None:
        self.root, self.job = root, job
        if name == "overlapped":
            self.saves = Saves(job.device, list(job.model.buffers()))
            self.before_change: Callable[[], None] = self.saves.before_update
        else:
            self.saves = of_recipe(name, root, job)
            self.before_change = getattr(self.saves.stager, "before_update", lambda: None)
        self.name = name

    def save(self) -> Path:
        directory = self.root / f"step{self.job.step}"
        if self.name == "overlapped":
            self.saves.save({"app": self.job}, directory)
        else:
            self.saves.save(self.job.step, {"app": self.job.state_dict()})
        return directory


def of_recipe(name: str, root: Path, job: Job) -> object:
    from _checks import NamedWhenComplete, SameOnAllRanks
    from async_save import AsyncCheckpoints

    stager = None
    if name == "pinned_staging":
        from pinned_staging import PinnedStager

        stager = PinnedStager()
    elif name == "default_stager":
        from default_stager import OverlappedStager

        stager = OverlappedStager(job.device, job.model.buffers)
    return AsyncCheckpoints(root, stager, NamedWhenComplete, SameOnAllRanks())


def map_tensors(tree: object, function: Callable[[torch.Tensor], object]) -> object:
    """``tree`` with other tensors; what is no tensor is copied."""
    if isinstance(tree, dict):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, function) for value in tree)
    return function(tree) if isinstance(tree, torch.Tensor) else copy.deepcopy(tree)


def differing(directory: Path, expected: dict) -> list[str]:
    """The leaves of a checkpoint that are not, bit by bit, what was saved."""
    loaded = map_tensors(expected, lambda tensor: torch.full_like(tensor, 7))
    dcp.load({"app": loaded}, checkpoint_id=directory)
    found, saved = basic.leaves(loaded), basic.leaves(expected)
    return [path for path, leaf in saved.items() if not basic.same_bits(found[path], leaf)]


def resident_bytes() -> int:
    """This process's resident set (Linux), without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def stress(name: str, asked: argparse.Namespace, root: Path, device: torch.device) -> str:
    job = Job(asked, device)
    dice, pauses = random.Random(asked.seed), random.Random(asked.seed + 1 + dist.get_rank())
    job.train()
    counts = {"steps": 1, "evaluations": 0, "loads": 0}
    unchecked: list[tuple[Path, dict]] = []
    memory: list[int] = []
    way = Way(name, root, job)

    def check(keep: int) -> None:
        while len(unchecked) > keep:
            directory, expected = unchecked.pop(0)
            wrong = differing(directory, expected)
            assert not wrong, f"{directory.name}: {wrong[:3]} of {len(wrong)} differ"
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(directory)

    with way.saves:
        for save in range(asked.saves):
            for _ in range(1 + (dice.random() < 0.2)):
                time.sleep(pauses.uniform(0, LONGEST_PAUSE_S))
                job.train()
                counts["steps"] += 1
            expected = map_tensors(job.state_dict(), lambda tensor: tensor.detach().clone())
            directory = way.save()
            unchecked.append((directory, expected))
            if save % 6 == 2:
                way.before_change()
                job.evaluate()
                counts["evaluations"] += 1
            elif save % 9 == 4:
                job.train()
                way.saves.wait()
                way.before_change()
                number = job.step + 1  # the step goes on, so that no directory is used twice
                dcp.load({"app": job}, checkpoint_id=directory)
                job.average = {n: t.clone() for n, t in expected["average"].items()}
                job.step = number
                counts["loads"] += 1
            if len(unchecked) > asked.behind:
                way.saves.wait()
                check(keep=0)
            if save % max(1, asked.saves // 20) == 0:
                memory.append(resident_bytes())
        way.saves.wait()
        check(keep=0)
        if name == "default_stager":
            way.saves.stager.close()
    early, late = min(memory[: len(memory) // 2]), min(memory[len(memory) // 2 :])
    assert late - early < GROWTH, f"host memory grew by {(late - early) / 1e6:.0f} MB: {memory}"
    done = ", ".join(f"{count} {what}" for what, count in counts.items())
    grown = (late - early) / 1e6
    return f"{name}: {asked.saves} saves, every bit right; {done}; memory {grown:+.0f} MB"


def main(asked: argparse.Namespace) -> None:
    device = basic.start_rank()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        for name in asked.ways:
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=asked.dir) as temporary:
                root = basic.directory_of_rank_0(Path(temporary))
                said = stress(name, asked, root, device)
                dist.barrier()
            if dist.get_rank() == 0:
                print(f"{said}; {time.perf_counter() - started:.0f} s", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["async_save"])
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, help="other than the model's")
    parser.add_argument("--tokens", type=int, default=32, help="a step and rank")
    parser.add_argument("--behind", type=int, default=4, help="checkpoints kept before a check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where checkpoints go")
    main(parser.parse_args())
