"""A job that torchrun starts on two ranks, which is struck beside an upload and goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY, STRUCK_BEHIND = 10, 2, 7
ENDS = "ends"


def train(root: Path, struck: str) -> int:
    """What torchrun starts; its exit code."""
    sys.path[:0] = [str(REPO / "recipes_source" / "checkpoint"), str(REPO), str(REPO / "tests")]
    import torch
    import torch.distributed as dist
    from _toys import start_rank
    from kept_saves import KeptSaves, resume
    from torch.distributed.fsdp import fully_shard

    from overlap_recipes.checkpoint import TrainingState, preemption

    leaving = preemption.Preemption(grace_s=60)
    device = start_rank()
    try:
        torch.manual_seed(0)
        layers = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        model = fully_shard(torch.nn.Sequential(*layers).to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
        run = TrainingState(model, optimizer, schedule=schedule)
        first_start = resume({"run": run}, root) == 0
        with leaving, KeptSaves(root, device, model.buffers(), keep_last=2) as saves:
            while run.step < STEPS:
                torch.manual_seed(run.step)
                tokens = torch.randint(256, (1, 32), device=device)
                scores = model(tokens).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(scores, tokens.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                run.step += 1
                if first_start and run.step == STRUCK_BEHIND and dist.get_rank() == 1:
                    strike(struck)
                leave = leaving.agreed()
                if leave or run.step % SAVE_EVERY == 0:
                    saves.save({"run": run}, run.step)
                if leave:
                    break
        if dist.get_rank() == 0:
            with (root / ENDS).open("a") as file:
                file.write(f"step {run.step}, loss {loss.item()!r}\n")
    finally:
        dist.destroy_process_group()
    return 0 if run.step == STEPS else preemption.AGAIN


def strike(struck: str) -> None:
    if struck == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1)  # torchrun passes it on


def start(root: Path, restarts: int, struck: str) -> subprocess.CompletedProcess:
    """Run it under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "--max-restarts", str(restarts), "--shutdown-timeout", "20"]
    command += [__file__, str(root), struck]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Or ranks that are started again read from torchrun's store where the ended ones were.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=250
    )


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), sys.argv[2]))
