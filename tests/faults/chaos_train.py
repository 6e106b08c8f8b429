"""What ckpt-chaos crashes: ``chaos_train.py OUT`` on the ranks that RANK and WORLD_SIZE name.

It resumes from the newest checkpoint below OUT, saves every second step and keeps all saves.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import edits, job  # noqa: I001 (its import finds the recipes)

import durable_saves
import retention
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_to_save import build_app, start_rank, train_step

STEPS, SAVE_EVERY = 6, 2


def main(root: Path) -> None:
    device = start_rank()
    try:
        app = build_app(device)
        chosen = [durable_saves.newest_step(root, digests=True)]
        dist.broadcast_object_list(chosen)
        if chosen[0] is not None:
            dcp.load({"app": app}, checkpoint_id=root / f"step{chosen[0]}")
        print(f"resumed from step {chosen[0] or 0}", flush=True)
        with retention.RetainedSaves(root, device, app.model.buffers(), keep_last=100) as saves:
            while app.step < STEPS:
                train_step(app, device)
                if app.step % SAVE_EVERY == 0:
                    saves.save({"app": app}, root / f"step{app.step}")
        own = job.digest(app)
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, own)
        if dist.get_rank() == 0:
            (root / "final").write_text("\n".join(digests))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if edit := os.environ.get("FAULTS_EDIT"):
        edits.BY_KILL[edit].apply()
    main(Path(sys.argv[1]))
