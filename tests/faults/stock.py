"""A stock Llama in a stock loop, killed at random points and resumed as the recipes do it."""

import hashlib
import random
from pathlib import Path

import _toys
import torch
import torch.distributed as dist
from kept_saves import KeptSaves, resume
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from faults.points import Fault, Points, tell
from faults.soak import run_ranks
from overlap_recipes.checkpoint import TrainingState

STEPS, SAVE_EVERY, SAMPLES_A_STEP, LENGTH = 20, 1, 12, 16
WITHIN_SAVES = 3  # an interruption strikes in one of so many saves from the start of a run
TARGETS = ("planning", "writing", "metadata", "rename", "pointer", "deletion", "step")


def build(dropout: float) -> TrainingState:
    """Tied head, clipped gradients, warm-up; ``dropout`` in the attention makes chance count."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=True,
        attention_dropout=dropout,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 9))
    torch.manual_seed(1 + dist.get_rank())
    return TrainingState(model, optimizer, schedule=schedule)


def train_step(run: TrainingState) -> float:
    """On the next samples of one stream; the mean loss of all ranks."""
    first = run.step * SAMPLES_A_STEP
    rows = []
    for sample in range(first + dist.get_rank(), first + SAMPLES_A_STEP, dist.get_world_size()):
        generator = torch.Generator().manual_seed(sample)
        rows.append(torch.randint(64, (LENGTH,), generator=generator))
    tokens = torch.stack(rows)
    loss = run.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    (optimizer,) = run.optimizers
    optimizer.step()
    optimizer.zero_grad()
    run.shared["schedule"].step()
    run.step += 1
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def digest(run: TrainingState) -> str:
    """Of the whole state but the random numbers: the same on any number of ranks."""
    sha256 = hashlib.sha256()
    for path, leaf in sorted(_toys.leaves(whole(run.state_dict())).items()):
        if "per_rank" not in path and "has_state" not in path:
            content = leaf.numpy().tobytes() if torch.is_tensor(leaf) else repr(leaf)
            sha256.update(f"{path} {content!r}".encode())
    return sha256.hexdigest()


def whole(tree: object) -> object:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


def train(
    rank: int, ranks: int, store: Path, pipe: int, root: Path, dropout: float, fault: Fault | None
) -> None:
    """Resume what is below ``root`` and train to the last step, unless ``fault`` strikes."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    points = Points(fault if fault and fault.rank == rank else None, root, pipe)
    run = build(dropout)
    step = resume({"run": run}, root)
    tell(pipe, event="resumed", step=step or None, digest=digest(run))
    points.install()
    with KeptSaves(root, keep_last=2) as saves:
        while run.step < STEPS:
            loss = train_step(run)
            tell(pipe, event="loss", step=run.step, loss=loss)
            points.hit("step", "after a step")
            if run.step % SAVE_EVERY == 0:
                tell(pipe, event="saving", step=run.step, digest=digest(run))
                saves.save({"run": run}, run.step)
    tell(pipe, event="counts", counts=dict(points.counts))
    tell(pipe, event="ended", digest=digest(run))
    dist.destroy_process_group()


def interrupted(scratch: Path, seed: int, ranks: list[int], dropout: float) -> dict:
    """A job left alone, and one interrupted after each of ``ranks`` but the last: their answers."""
    alone = run_ranks(train, ranks[0], scratch / "alone.job", (scratch / "alone", dropout, None))
    a_save = {point: count * SAVE_EVERY / STEPS for point, count in alone.counts[0].items()}
    rng, saving, problems, struck = random.Random(seed), alone.saving, [], []
    losses: dict[int, float] = {}
    for number, count in enumerate(ranks):
        last = number == len(ranks) - 1
        point = rng.choice([point for point in TARGETS if point in a_save])
        hit = rng.randint(1, max(1, int(WITHIN_SAVES * a_save[point])))
        fault = None if last else Fault("kill", point, 0, hit)
        how = (scratch / "root", dropout, fault)
        told = run_ranks(train, count, scratch / f"{number}.job", how)
        struck.append(told.struck)
        if told.hung or told.left or len(told.resumed) != count:
            problems.append(f"start {number}: {told}")
        for step, digest in set(told.resumed.values()):
            if step is not None and digest not in saving[step].values():
                problems.append(f"start {number}: not the bits of step {step}")
        saving = saving | told.saving
        losses |= told.losses
    ends = [set(told.ended.values()) for told in (alone, told)]
    apart = [abs(losses[step] / loss - 1) for step, loss in alone.losses.items()]
    return {"struck": struck, "problems": problems, "same_end": ends[0] == ends[1]} | {
        "largest_difference": max(apart),
        "steps": len(apart),
    }
