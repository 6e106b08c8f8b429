"""Train on hosts that come and go; what a rank computes does not depend on their number.

``two_hosts_train.py DIRECTORY WAY``: ``own``, to a disk of this host; ``shared``, to one of all.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes_source" / "checkpoint"))
import _toys as basic  # noqa: E402

from overlap_recipes.checkpoint import saves as saves_module  # noqa: E402
from overlap_recipes.checkpoint.restart import choose  # noqa: E402
from overlap_recipes.checkpoint.retention import RetainedSaves  # noqa: E402
from overlap_recipes.checkpoint.two_hosts import PartnerSaves, gather  # noqa: E402

STEPS, WAIT_AT, SAVE_EVERY = 120, 60, 5  # it goes on from the second when it is told
PACE_S = 0.2
DEADLINE_S = 12  # for the other ranks
local, way = Path(sys.argv[1]), sys.argv[2]
HURRY = local.parent / "hurry"


def pause(seconds: float) -> None:
    if not HURRY.exists():
        time.sleep(seconds)


class SlowPartnerSaves(PartnerSaves):
    """Each save takes half a second, so that something can happen in it."""

    def exchange(self, directory: Path, files: list[dict[str, int]]) -> None:
        pause(0.5)
        super().exchange(directory, files)


class SlowRetainedSaves(RetainedSaves):
    def write(self, state: dict, directory: Path) -> None:
        super().write(state, directory)
        pause(0.5)


def say(text: str) -> None:
    print(f"{time.monotonic():.1f} {os.environ['HOST']}: {text}", flush=True)


if __name__ == "__main__":
    basic.HIDDEN = 64
    saves_module.DEADLINE_S = DEADLINE_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    device = torch.device("cpu")
    app = basic.build_app(device)
    if way == "own":
        saves = SlowPartnerSaves(device, app.model.buffers())
    else:
        saves = SlowRetainedSaves(local, device, app.model.buffers(), keep_last=2)
    with saves:
        step = gather(local) if way == "own" else choose(local)
        if step is not None:
            dcp.load({"app": app}, checkpoint_id=local / f"step{step}")
        say(f"resumed {step or 0} on {dist.get_world_size()} ranks")
        while app.step < STEPS:
            torch.manual_seed(app.step)  # the same batch on every rank
            batch = torch.randn(8, basic.WIDTH)
            app.model(batch).square().mean().backward()
            app.optimizer.step()
            app.optimizer.zero_grad()
            app.step += 1
            if app.step % SAVE_EVERY == 0:
                saves.save({"app": app}, local / f"step{app.step}")
            pause(PACE_S)
            while app.step == WAIT_AT and not HURRY.exists():
                time.sleep(0.1)
    bits = [getattr(p, "full_tensor", p.detach)().sum().item() for p in app.model.parameters()]
    say(f"ended with {[bit.hex() for bit in bits]}")
    # Else gloo's thread may drop tensors of the last collective while Python ends: that aborts.
    dist.barrier()
    dist.destroy_process_group()
