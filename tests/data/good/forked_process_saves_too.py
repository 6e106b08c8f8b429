import multiprocessing
import os

import torch
import torch.distributed.checkpoint as dcp


def save(value: float, directory: str) -> None:
    dcp.save({"weight": torch.full((4,), value)}, checkpoint_id=directory, no_dist=True)


if __name__ == "__main__":
    own = f"rank{os.environ['RANK']}"
    child = multiprocessing.get_context("fork").Process(target=save, args=(1.0, f"{own}/step1"))
    child.start()
    child.join()
    save(2.0, f"{own}/step2")
