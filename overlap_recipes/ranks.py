# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/ranks.py
"""How a script joins the ranks of its job: under torchrun, or alone."""

import os

import torch
import torch.distributed as dist


def start_rank(run: str = "") -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device.

    The group has one backend: the accelerator's, NCCL where there are GPUs, and gloo without one.

    Args:
        run: a name, where one torchrun starts several groups after each other: the keys that one
            that was killed has left in the store are not the next one's.
    """
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://"))
        if run:
            store = dist.PrefixStore(run, store)
    else:
        store, rank, ranks = dist.HashStore(), 0, 1
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = torch.device("cpu")
    else:
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(store=store, rank=rank, world_size=ranks)
    return device
