"""A stock Qwen3, streamed, that saves beside training, is killed there, and resumes."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.offload import HostAdamW, resident_bytes, stream_layers

CPU = torch.device("cpu")
STEPS, SAVED, KILLED = 5, 2, 4
RATE, MAX_NORM, WORDS = 1e-2, 0.5, 64


def qwen3(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        hidden_size=64,  # matrices of 4,096 elements have moments of 8 bits
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=WORDS,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (2, 10), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


class Run:
    """A model, its optimizer and schedule; ``state`` is what is saved of them."""

    def __init__(self, model: nn.Module, streamed, optimizer: HostAdamW) -> None:
        self.model = model
        self.streamed = streamed
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        self.state = TrainingState(model, optimizer, schedule=self.scheduler)

    def train(self, step: int) -> float:
        """The loss of a step, which is taken."""
        loss = self.model(**batch(step)).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def results(self) -> dict[str, torch.Tensor]:
        """Weights, masters, moments and steps by name, as they are when all is updated."""
        self.streamed.wait()
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().clone()
            for which, kept in self.optimizer.state[parameter].items():
                found[f"{name} {which}"] = kept.clone()
        return found


@contextmanager
def running(
    seed: int = 0,
    in_backward: bool = False,
    one_copy_a_host: bool = False,
    budget_layers: int = 0,
    moments: str = "fp32",
) -> Iterator[Run]:
    """A run whose weights come from ``seed``."""
    torch.set_num_threads(1)
    model = qwen3(seed)
    layers = model.model.layers
    stream = {"one_copy_a_host": one_copy_a_host}
    stream["budget"] = budget_layers * resident_bytes(layers[0])
    update = {"in_backward": in_backward, "max_norm": None if in_backward else MAX_NORM}
    update["moments"] = moments
    with (
        stream_layers(model, layers, CPU, **stream) as streamed,
        HostAdamW(model.parameters(), streamed, lr=RATE, **update) as optimizer,
    ):
        yield Run(model, streamed, optimizer)


def train_and_save(run: Run, folder: Path, killed: bool) -> list[float]:
    """The losses of all steps; ``SAVED`` is saved while the next ones train."""
    losses = []
    with CheckpointManager(folder, run.state, grace_s=None) as checkpoints:
        assert checkpoints.resume() == 0
        for step in range(1, STEPS + 1):
            if killed and step == KILLED:
                run.model(**batch(step)).loss.backward()
                checkpoints.latest.result()
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(run.train(step))
            if step == SAVED:
                checkpoints.save(step)
    return losses


def resume(run: Run, folder: Path) -> list[float]:
    """The losses of the steps behind ``SAVED``."""
    with CheckpointManager(folder, run.state, grace_s=None) as checkpoints:
        done = checkpoints.resume()
        assert done == SAVED, f"went on behind step {done}"
        return [run.train(step) for step in range(done + 1, STEPS + 1)]


WAYS = {
    "own": {"moments": "fp32"},
    "one": {"moments": "fp32", "one_copy_a_host": True},
    "8bit": {"moments": "8bit"},
}


def on_two_ranks(rank: int, folder: str, of_one: dict[str, str]) -> None:
    """Resume what one rank has saved; save the same from two; write down what came of it.

    All of it in each of ``WAYS``; ``of_one`` are checkpoints by the kind of moments.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for way, options in WAYS.items():
        here = Path(folder) / way
        with running(seed=7, **options) as run:
            losses = resume(run, Path(of_one[options["moments"]]))
            resumed = losses, run.results()
            dist.barrier()
        with running(**options) as run:
            losses = train_and_save(run, here / "saved", killed=False)
            trained = losses, run.results()
            dist.barrier()
        torch.save([resumed, trained], here / f"of_rank{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with running(moments=sys.argv[2]) as run:
        train_and_save(run, Path(sys.argv[1]), killed=True)
