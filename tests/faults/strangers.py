"""Models and loops as a reader has them: tied weights, LoRA, two optimizers, a loop that raises."""

from pathlib import Path

import torch
import torch.distributed as dist
from kept_saves import KeptSaves, resume
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from faults.points import tell
from faults.stock import Run, digest

STEPS, INTERRUPTED_AT = 6, 3


class Schedules:
    """Two schedules as one."""

    def __init__(self, *schedules) -> None:
        self.schedules = schedules

    def step(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self) -> dict:
        return {str(n): schedule.state_dict() for n, schedule in enumerate(self.schedules)}

    def load_state_dict(self, state: dict) -> None:
        for n, schedule in enumerate(self.schedules):
            schedule.load_state_dict(state[str(n)])


def build(kind: str, seed: int) -> Run:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    elif kind == "frozen":
        model.model.embed_tokens.requires_grad_(False)
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "two optimizers":
        matrices = [p for p in trained if p.ndim == 2]
        others = [p for p in trained if p.ndim != 2]
        optimizer = [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(others, 0.1, 0.9)]
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
    each = optimizer if isinstance(optimizer, list) else [optimizer]
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.9 - 0.1 * n) for n, o in enumerate(each)
    ]
    return Run(model, optimizer, Schedules(*schedules))


def train_to(run: Run, until: int) -> None:
    while run.step < until:
        generator = torch.Generator().manual_seed(run.step * 10 + dist.get_rank())
        tokens = torch.randint(64, (2, 16), generator=generator)
        run.model(input_ids=tokens, labels=tokens).loss.backward()
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.schedule.step()
        run.step += 1


def train(rank: int, ranks: int, store: Path, pipe: int, root: Path, kind: str) -> None:
    """A run left alone; one that saves, also before its first step; one that resumes from it."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    alone = build(kind, 0)
    train_to(alone, STEPS)
    first = build(kind, 0)
    with KeptSaves(root) as saves:
        saves.save({"run": first.state}, 0)
        train_to(first, INTERRUPTED_AT)
        saves.save({"run": first.state}, INTERRUPTED_AT)
        train_to(first, STEPS)
    answers = {"saved": digest(first) == digest(alone)}
    for step in (0, INTERRUPTED_AT):
        again = build(kind, 1)
        resume({"run": again.state}, root, step)
        train_to(again, STEPS)
        answers[f"resumed from {step}"] = digest(again) == digest(alone)
        if rank == 0:  # a rollback has set it aside
            for aside in root.glob(f"step{INTERRUPTED_AT}.set-aside-*"):
                aside.rename(root / f"step{INTERRUPTED_AT}")
        dist.barrier()
    with KeptSaves(root / "back") as saves:  # a load in mid-run
        for step in (1, 2):
            again = build(kind, 0) if step == 1 else again
            train_to(again, step)
            done = saves.save({"run": again.state}, step)
        saved = digest(again)
        done.result()
        resume({"run": again.state}, root / "back", 1)
        train_to(again, 2)
        answers["gone back in mid-run"] = digest(again) == saved
        saves.save({"run": again.state}, 2)
    tell(pipe, event="ended", digest=answers)
    dist.destroy_process_group()


def leave_by(rank: int, ranks: int, store: Path, pipe: int, root: Path, how: str) -> None:
    """A loop that is left in the middle of its saves: by Ctrl-C, or by the error of one rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    run = build("tied", 0)
    step = resume({"run": run.state}, root)
    tell(pipe, event="resumed", step=step or None, digest=digest(run))
    with KeptSaves(root) as saves:
        while run.step < STEPS:
            train_to(run, run.step + 1)
            tell(pipe, event="saving", step=run.step, digest=digest(run))
            saves.save({"run": run.state}, run.step)
            if run.step == INTERRUPTED_AT and step == 0:
                if how == "Ctrl-C":
                    raise KeyboardInterrupt
                if rank == 1:
                    raise ValueError("a bad batch")
    tell(pipe, event="ended", digest=digest(run))
    dist.destroy_process_group()


def ways_out(scratch: Path) -> dict:
    from faults.soak import run_ranks

    answers = {}
    for how in ("Ctrl-C", "a bad batch"):
        root, job = scratch / how.replace(" ", ""), scratch / f"{how.replace(' ', '')}.job"
        first = run_ranks(leave_by, 2, job, (root, how))
        second = run_ranks(leave_by, 2, job.with_suffix(".again"), (root, how))
        chosen = second.resumed[0][0]
        found = {rank: digest for rank, (_, digest) in second.resumed.items()}
        answers[how] = {
            "codes": list(first.codes.values()),
            "seconds": first.seconds,
            "bits": chosen is None or found == first.saving[chosen],
            "chosen": chosen,
            "hung": first.hung + second.hung,
            "ended": len(second.ended),
        }
    return answers
