"""The parts that ``first_step.py`` measures, behind the imports that are one of them."""

import argparse
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from benchmarks import measuring
from benchmarks.workloads import HOST_BOUND, compile_blocks, rising_rate, shard
from overlap_recipes.checkpoint import Saves, TrainingState
from overlap_recipes.checkpoint.hub_folder import give_memory, load_folder
from overlap_recipes.checkpoint.kept import Checkpoint
from overlap_recipes.checkpoint.loading import load_newest
from overlap_recipes.checkpoint.stores.directory import Directory

STEP = 1  # the name of the checkpoint
OURS = ("in_turn", "beside", "folder")


class Clock(Protocol):
    """Of ``first_step``: ``end`` notes a part."""

    last: float
    parts: dict[str, float]

    def end(self, part: str) -> None: ...


class Lines(logging.Handler):
    """Keeps the library's lines, behind the seconds since the process began."""

    def __init__(self, started: float) -> None:
        super().__init__(logging.INFO)
        self.started = started
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.created - self.started:.2f} s {record.getMessage()}")


def config_of(small: bool) -> PreTrainedConfig:
    """Qwen3 1.7B's; a small one of its kind."""
    if not small:
        return HOST_BOUND["qwen3-1.7b"]
    return Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        tie_word_embeddings=True,
    )


def on_meta(small: bool) -> PreTrainedModel:
    with torch.device("meta"):
        config = config_of(small)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def optimizer_of(model: PreTrainedModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=torch.cuda.is_available())


def state_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> TrainingState:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rising_rate)
    return TrainingState(model, optimizer, schedule=schedule)


def first_batch(vocabulary: int, length: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(measuring.own_rank())
    rows = torch.randint(vocabulary, (16, length), generator=draw)
    loader = DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context="fork")
    return next(iter(loader))


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def write(chosen: argparse.Namespace, device: torch.device) -> None:
    """The checkpoint of a model that has made a step, and its weights as safetensors."""
    torch.manual_seed(0)
    with torch.device(device):
        config = config_of(chosen.small)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if measuring.own_rank() == 0:
        model.save_pretrained(chosen.root / "folder")
    model = shard(model)
    optimizer = optimizer_of(model)
    state = state_of(model, optimizer)
    step(model, optimizer, torch.ones(2, 8, dtype=torch.long, device=device))
    store = Directory(chosen.root / "checkpoints")
    if measuring.own_rank() == 0:
        store.root.mkdir(parents=True, exist_ok=True)
    with Saves(device, model.buffers, write_threads=8) as saves:
        saves.save({"run": state}, Checkpoint(store, STEP, keep_last=1, keep_every=0)).result()
    dist.barrier()


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def run(chosen: argparse.Namespace, clock: Clock) -> None:
    started = clock.last - clock.parts["import_s"]
    lines = Lines(started)
    logging.getLogger("overlap_recipes").addHandler(lines)
    logging.getLogger("overlap_recipes").setLevel(logging.INFO)
    with measuring.started_rank() as device:
        torch.empty(1, device=device)
        if chosen.way == "write":
            write(chosen, device)
            if chosen.cold and measuring.own_rank() == 0:
                drop_from_cache(chosen.root)
            return
        clock.end("join_s")
        found = measured(chosen, clock, device, lines)
        found["total_s"] = clock.last - started - found["second_step_s"]
        agreement = measuring.Agreement()
        for name, value in found.items():
            if name.endswith("_s"):
                found[name] = agreement.largest(value)
        add(chosen, device, found, lines.lines)
        if chosen.cold:  # for the next start
            agreement.barrier()
            if measuring.own_rank() == 0:
                drop_from_cache(chosen.root)


def measured(
    chosen: argparse.Namespace, clock: Clock, device: torch.device, lines: Lines
) -> dict[str, float]:
    config = config_of(chosen.small)
    length = 32 if chosen.small else 1024
    pool = ThreadPoolExecutor(1)
    fetching = None
    if chosen.way == "beside":
        fetching = pool.submit(first_batch, config.vocab_size, length)
    model = None
    if chosen.way != "from_pretrained":
        model = shard(on_meta(chosen.small))
        give_memory(model, device)
    clock.end("build_s")
    memory = measuring.HostMemory()
    lines.lines.clear()
    clock.last = time.time()
    if chosen.way == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(chosen.root / "folder", dtype=torch.float32)
        model = shard(model.train()).to(device)
        optimizer = optimizer_of(model)
    elif chosen.way == "folder":
        optimizer = optimizer_of(model)
        load_folder(model, chosen.root / "folder", device)
    else:
        optimizer = optimizer_of(model)
        store = Directory(chosen.root / "checkpoints")
        if load_newest({"run": state_of(model, optimizer)}, store, None, ()) != STEP:
            raise RuntimeError("the checkpoint has another step")
    measuring.synchronize(device)
    clock.end("load_s")
    peaks = memory.peaks()
    memory.close()
    clock.last = time.time()
    if chosen.compile:
        compile_blocks(model)
    tokens = fetching.result() if fetching else first_batch(config.vocab_size, length)
    tokens = tokens.to(device)
    clock.end("data_s")
    loss = step(model, optimizer, tokens)
    measuring.synchronize(device)
    clock.end("first_step_s")
    step(model, optimizer, tokens)
    measuring.synchronize(device)
    clock.end("second_step_s")
    pool.shutdown()
    return {**clock.parts, **peaks, "first_loss": loss}


def add(
    chosen: argparse.Namespace, device: torch.device, found: dict[str, float], lines: list[str]
) -> None:
    model = "qwen3-tiny" if chosen.small else "qwen3-1.7b"
    workload = {"model": f"stock {model}", "precision": "float32 weights and Adam state"}
    head = measuring.header("first_step", device, workload, {})
    head["driver"] = head["driver"] or "none"
    results = measuring.Results(chosen.out, head, OURS, ("model", "compiled", "storage"))
    storage = "disk" if chosen.cold else "memory"
    key = {"model": model, "compiled": chosen.compile, "storage": storage}
    before = results.find(chosen.way, **key).get("samples", {})
    samples = []
    for number in range(len(before.get("load_s", ()))):
        samples.append({name: before[name][number] for name in found})
    row = measuring.medians([*samples, found])
    results.add({"name": chosen.way, **key, **row, "log": lines})
    if measuring.own_rank() == 0:
        for name, value in found.items():
            if name.endswith("_s"):
                print(f"{name:>16} {value:8.3f}")
        print("\n".join(lines))
