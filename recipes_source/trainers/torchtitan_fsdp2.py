# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, trainers/torchtitan_fsdp2.py
"""
FSDP2 in place in torchtitan
============================

One call around your model's ``ModelSpec``, and torchtitan's FSDP2 gathers weights and reduces
gradients without the copies around them. Put this file beside ``peer_memory.py``,
``shared_slots.py``, ``in_place_gather.py`` and ``in_place_reduce.py``; in your
``config_registry.py``:

.. code-block:: python

   config.model_spec = in_place(model_registry("8B"))

:doc:`/recipes/sharding/in_place_gather` has what it gains and when. Do not bother with ranks on
several hosts: torchtitan then trains as before, after a warning that says so.

.. verification-badge::
"""

import sys
from dataclasses import replace
from pathlib import Path

from torch import nn
from torchtitan.protocols.model_spec import ModelSpec

sys.path.append(str(Path(__file__).resolve().parents[1] / "sharding"))  # where they lie here
from in_place_gather import gather_in_place
from in_place_reduce import reduce_in_place


def in_place(spec: ModelSpec) -> ModelSpec:
    """``spec``, whose models gather and reduce in place."""
    parallelize = spec.parallelize_fn

    def then_in_place(model: nn.Module, **options) -> nn.Module:
        model = parallelize(model, **options)
        gather_in_place(model)
        reduce_in_place(model)
        return model

    return replace(spec, parallelize_fn=then_in_place)


# %%
# Why there
# ---------
# torchtitan calls ``parallelize_fn`` with a model without memory (``meta``). It wraps blocks for
# checkpointing, compiles them, and ends in ``apply_fsdp_to_decoder``, which calls ``fully_shard``:
# for the embedding, for each block, and for norm and head as one unit of two modules. All groups of
# parameters are there then. The weights get their memory later (``to_empty``, ``init_weights``);
# in place reads FSDP2's shards at each gather, wherever they lie.
#
# torchtitan divides by its own count of tokens, so it asks FSDP2 for sums of gradients and not for
# means (``disable_fsdp_gradient_division``): such sums are pushed as well.
#
# Something to train
# ------------------
# torchtitan's own Llama 3 of its ``debugmodel``, parallelized by torchtitan; the loop is written out,
# since its ``Trainer`` needs a GPU.

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.models.llama3 import model_registry

STEPS, SAMPLES, LENGTH = 3, 2, 16  # samples of a rank and step, tokens of a sample


def build(spec: ModelSpec, device: torch.device) -> FSDPModule:
    """What torchtitan's ``Trainer`` does with ``spec``: shard on ``meta``, then fill."""
    ranks = dist.get_world_size()
    sizes = {"dp_replicate": 1, "dp_shard": ranks, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims(**sizes, world_size=ranks),
        training=TrainingConfig(),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    disable_fsdp_gradient_division(model)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    return model.train()


def train(model: FSDPModule, device: torch.device) -> list[torch.Tensor]:
    """Losses, norms of gradients and this rank's final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for number in range(STEPS):
        torch.manual_seed(1000 * number + dist.get_rank())
        tokens = torch.randint(2048, (SAMPLES, LENGTH), device=device)
        logits = model(tokens).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens.flatten()) / dist.get_world_size()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), norm.full_tensor()]
    return found + [p.to_local().detach() for p in model.parameters()]


# %%
# Run it, and prove it
# --------------------
# On one and two ranks every loss, norm and weight has the bits of torchtitan as it comes; more ranks
# add in another order.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention", default="sdpa", help="of torchtitan's model_registry")
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if "RANK" in os.environ else alone))
    try:
        spec = model_registry("debugmodel", attn_backend=arguments.attention)
        expected = train(build(spec, device), device)
        model = build(in_place(spec), device)
        found = train(model, device)
        for tensor, of_torchtitan in zip(found, expected, strict=True):
            if dist.get_world_size() <= 2:
                assert torch.equal(tensor, of_torchtitan), "not the bits of torchtitan"
            torch.testing.assert_close(tensor, of_torchtitan, rtol=1e-2, atol=1e-3)
        print(f"{len(found)} tensors as torchtitan's; loss {found[-1].sum():.4f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
