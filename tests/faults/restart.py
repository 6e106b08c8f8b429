"""Seconds from the kill of a rank to the first step after it, and where they go.

``python -m faults.restart --write``, from ``tests``: torchrun starts a stock Llama on two ranks,
rank 1 kills itself beside an upload, torchrun starts both again, they resume. Each notes the time
where one part of that ends and the next begins. ``--write`` puts the medians where the page of
``preemption`` looks for them.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STARTED = time.time()  # before torch is imported
REPO = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY, KILLED_AT = 10, 2, 7
PARTS = ("noticed_s", "import_s", "join_s", "build_s", "choose_s", "load_s", "first_step_s")

TOY = "toy"  # a model that needs no transformers


def note(root: Path, what: str, when: float | None = None) -> None:
    """A line: which rank was where at what time."""
    line = {"rank": os.environ["RANK"], "at": what, "time": when or time.time()}
    with (root / "times.jsonl").open("a") as file:
        file.write(json.dumps(line | {"start": os.environ["TORCHELASTIC_RESTART_COUNT"]}) + "\n")


def train(root: Path, model_name: str, struck: str) -> int:
    """What torchrun starts; ``struck``: by a kill of rank 1, or by SIGTERM to torchrun."""
    sys.path[:0] = [str(REPO / "recipes_source" / "checkpoint"), str(REPO), str(REPO / "tests")]
    import torch
    import torch._dynamo  # noqa: F401 (what the first optimizer step imports)
    import torch.distributed as dist
    from _toys import start_rank
    from kept_saves import KeptSaves, resume

    from overlap_recipes.checkpoint import TrainingState, loading, preemption

    leaving = preemption.Preemption(grace_s=60)
    note(root, "started", STARTED)
    note(root, "imported")
    device = start_rank()
    note(root, "joined")
    try:
        model = built(model_name, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
        run = TrainingState(model, optimizer, schedule=schedule)
        note(root, "built")
        choose = loading.choose

        def chosen(*args) -> int | None:
            step = choose(*args)
            note(root, "chosen")
            return step

        loading.choose = chosen
        resume({"run": run}, root)
        note(root, "loaded")
        first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and run.step == 0
        with leaving, KeptSaves(root, device, model.buffers(), keep_last=2) as saves:
            while run.step < STEPS:
                torch.manual_seed(run.step)
                tokens = torch.randint(256, (1, 32), device=device)
                loss = loss_of(model, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                loss.item()
                run.step += 1
                if not first_start:
                    note(root, f"step {run.step}")
                elif run.step == KILLED_AT and dist.get_rank() == 1:
                    note(root, "killed")
                    if struck == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    os.kill(os.getppid(), signal.SIGTERM)
                    time.sleep(1)  # torchrun passes it on
                leave = leaving.agreed()
                if leave or run.step % SAVE_EVERY == 0:
                    saves.save({"run": run}, run.step)
                if leave:
                    break
        if dist.get_rank() == 0:
            note(root, f"ended after step {run.step}, loss {loss.item()!r}")
    finally:
        dist.destroy_process_group()
    return 0 if run.step == STEPS else preemption.AGAIN


def built(name: str, device):
    """A sharded model; that of the tests, where torchrun is what is tried, is a small one."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    if name == TOY:
        layers = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        return fully_shard(torch.nn.Sequential(*layers).to(device))
    from benchmarks.workloads import llama, shard

    return shard(llama(name, device))


def loss_of(model, tokens):
    import torch

    if isinstance(model, torch.nn.Sequential):
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return model(input_ids=tokens, labels=tokens).loss


def start(root: Path, model: str, ranks: int, restarts: int, struck: str = "kill"):
    """Run it under torchrun; the completed process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--standalone", "--max-restarts", str(restarts), "--shutdown-timeout", "20"]
    command += [__file__, "--job", str(root), "--model", model, "--struck", struck]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Or ranks that are started again read from torchrun's store where the ended ones were.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=250
    )


def times(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "times.jsonl").read_text().splitlines()]


def parts(root: Path) -> dict[str, float]:
    """Seconds of each part, by the slower rank."""
    noted = times(root)
    killed = next(line["time"] for line in noted if line["at"] == "killed")
    again = [line for line in noted if line["start"] == "1"]
    first_step = min(
        (line["at"] for line in again if line["at"].startswith("step")),
        key=lambda at: int(at.split()[1]),
    )
    ends = ["started", "imported", "joined", "built", "chosen", "loaded", first_step]
    at = [killed]
    for end in ends:
        at.append(max(line["time"] for line in again if line["at"] == end))
    spent = {part: b - a for part, a, b in zip(PARTS, at, at[1:], strict=False)}
    return spent | {"total_s": at[-1] - at[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, help="what torchrun starts")
    parser.add_argument("--struck", default="kill")
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="the result file")
    options = parser.parse_args()
    if options.job:
        sys.exit(train(options.job, options.model, options.struck))
    samples = []
    for _ in range(options.kills):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            done = start(Path(directory), options.model, options.ranks, restarts=1)
            if done.returncode:
                raise SystemExit(done.stderr)
            samples.append(parts(Path(directory)))
            print(json.dumps(samples[-1]), flush=True)
    if options.write:
        from faults import results

        medians = {part: statistics.median(s[part] for s in samples) for part in samples[0]}
        each = {part: [sample[part] for sample in samples] for part in samples[0]}
        row = {"name": "max-restarts", "model": options.model, **medians, "samples": each}
        row["ours"] = True
        workload = {"killed": "one rank, in a step, beside an upload"}
        results.write("restart", options.ranks, [row], workload)


if __name__ == "__main__":
    main()
