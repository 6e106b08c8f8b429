"""A job of a reader: a stock Llama under FSDP2 that saves beside training, by whatever name the
library was taken in.

    torchrun --nproc-per-node=2 library_job.py PACKAGE ROOT STEPS [KILL_BEHIND]

It resumes from the newest checkpoint below ROOT, trains to STEPS, and prints each step's loss.
With KILL_BEHIND it is killed behind that step, when the save of it is durable.
"""

import importlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

SAVE_EVERY = 2
LENGTH = 8  # tokens of a sequence


def build(state_class: type):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_hidden_layers=2, use_cache=False)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return state_class(model, optimizer, schedule=schedule)


def train_step(state) -> float:
    tokens = torch.randint(32, (2, LENGTH))  # the random state is a part of the run
    loss = state.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    (optimizer,) = state.optimizers
    optimizer.step()
    optimizer.zero_grad()
    state.shared["schedule"].step()
    return loss.item()


def main(package: str, root: Path, steps: int, kill_behind: int | None) -> None:
    checkpoint = importlib.import_module(f"{package}.checkpoint")
    dist.init_process_group("gloo")
    try:
        state = build(checkpoint.TrainingState)
        torch.manual_seed(dist.get_rank())
        with checkpoint.CheckpointManager(root, state) as checkpoints:
            begin = checkpoints.resume()
            print(f"from step {begin}", flush=True)
            for step in range(begin + 1, steps + 1):
                loss = train_step(state)
                line = f"rank {dist.get_rank()} step {step} {loss.hex()}\n"
                print(line, end="", flush=True)  # in one write: all ranks write to one pipe
                if step % SAVE_EVERY == 0:
                    done = checkpoints.save(step)
                if step == kill_behind:
                    done.result()
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    name, place, count, *kill = sys.argv[1:]
    main(name, Path(place), int(count), int(kill[0]) if kill else None)
