# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, trainers/torchtitan_fsdp2.py
"""
FSDP2 in place in torchtitan
============================

With one call around your model's ``ModelSpec``, torchtitan's FSDP2 gathers weights and reduces
gradients without the copies around them. :doc:`/recipes/sharding/peer_copies` shows what you
gain, and when.

.. result-gain:: fsdp_overlap
   :rows: fsdp2_in_place fsdp2
   :field: efficiency
   :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no

   Measured without torchtitan. 100 % is a run that sends nothing.

**When not to bother:** your ranks are on several hosts. torchtitan then trains as before, after a
warning that says so.

In your ``config_registry.py``:

.. code-block:: python

   from torchtitan.models.llama3 import model_registry
   from overlap_recipes.trainers.torchtitan_fsdp2 import in_place

   config.model_spec = in_place(model_registry("8B"))

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``.

.. verification-badge::
"""

# %%
# .. literalinclude:: /overlap_recipes/trainers/torchtitan_fsdp2.py
#    :language: python
#    :pyobject: in_place
#
# Why there
# ---------
# torchtitan calls ``parallelize_fn`` with a model without memory (on the device ``meta``). That
# function wraps blocks for checkpointing, compiles them, and ends in ``apply_fsdp_to_decoder``.
# This one calls ``fully_shard`` for the embedding, for each block, and for norm and head as one
# unit of two modules; where head and embedding share weights, the embedding is in that unit. After
# it, all groups of parameters exist. The weights get their memory later (``to_empty``,
# ``init_weights``). That does not matter: ``gather_in_place`` reads FSDP2's shards at each gather,
# wherever they lie.
#
# torchtitan divides by its own count of tokens, so it asks FSDP2 for sums of gradients and not for
# means (``disable_fsdp_gradient_division``). ``reduce_in_place`` makes such sums as well.
#
# Something to train
# ------------------
# torchtitan's own models need Triton, and its ``Trainer`` needs a GPU. So the proof has a decoder
# with the parts that ``apply_fsdp_to_decoder`` looks for, under their names, with its head's
# weights shared or not, and writes the loop out.
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.protocols.model_spec import ModelSpec

from overlap_recipes.trainers.torchtitan_fsdp2 import in_place

WIDTH, LAYERS, VOCABULARY = 24, 5, 67  # 67 rows divide by none of 2, 3 and 4 ranks
STEPS, SAMPLES, LENGTH = 4, 2, 16  # samples of a rank and step, tokens of a sample


class Decoder(nn.Module):
    """Logits for (samples, length) token ids; blocks are residual, without attention."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.enable_weight_tying = tied
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(n): self.block() for n in range(LAYERS)})
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def block(self) -> nn.Sequential:
        wide = 3 * WIDTH
        return nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, wide), nn.SiLU(), nn.Linear(wide, WIDTH)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.lm_head(self.norm(x))


def parallelize(model: Decoder, *, mesh: DeviceMesh) -> Decoder:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    apply_fsdp_to_decoder(model, mesh, **dtypes, pp_enabled=False)
    for unit in (m for m in model.modules() if isinstance(m, FSDPModule)):
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
    return model


def build(spec: ModelSpec, tied: bool, device: torch.device) -> FSDPModule:
    """What torchtitan's ``Trainer`` does with ``spec``: shard on ``meta``, then fill."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        model = Decoder(tied)
    model = spec.parallelize_fn(model, mesh=mesh)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    return model.train()


def train(model: FSDPModule, device: torch.device) -> list[torch.Tensor]:
    """Losses, norms of gradients and this rank's final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for number in range(STEPS):
        torch.manual_seed(1000 * number + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), device=device)
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
# On one and two ranks every loss, norm and weight has the same bits as with unchanged torchtitan.
# More ranks add in another order.


def prove(tied: bool, device: torch.device) -> None:
    none = dict.fromkeys(["model", "pipelining_fn", "post_optimizer_build_fn"])
    spec = ModelSpec(
        "decoder", "small", **none, parallelize_fn=parallelize, state_dict_adapter=None
    )
    expected = train(build(spec, tied, device), device)
    model = build(in_place(spec), tied, device)
    found = train(model, device)
    assert found[0] > found[2 * STEPS - 2], "nothing was learned"
    for tensor, of_torchtitan in zip(found, expected, strict=True):
        if dist.get_world_size() <= 2:
            assert torch.equal(tensor, of_torchtitan), "not the bits of torchtitan"
        torch.testing.assert_close(tensor, of_torchtitan, rtol=0.05, atol=0.01)
    if dist.get_world_size() > 1:
        gathers, pushes = model.in_place
        assert gathers.gathers and pushes.calls, "FSDP2 communicated by itself"
    print(f"tied {tied}: {len(found)} tensors are those of torchtitan's FSDP2")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if "RANK" in os.environ else alone))
    try:
        for tied in (False, True):
            prove(tied, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory and known limits
# -----------------------
# * Memory, and what a program may do: :doc:`/recipes/sharding/peer_copies`.
# * Not tried: pipeline parallelism, whose microbatches keep all units full; experts over a mesh of
#   their own; torchtitan's ``Trainer`` on a GPU with this recipe.
# * ``enable_fsdp_symm_mem`` of torchtitan puts NCCL's buffers into symmetric memory: leave it off.
#
# Further reading
# ---------------
# * torchtitan: `FSDP <https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md>`__
