# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/trainers/torchtitan_fsdp2.py
"""torchtitan's own sharding, with FSDP2's gathers and reductions by peer copies."""

from dataclasses import replace

from torch import nn
from torchtitan.protocols.model_spec import ModelSpec

from ..fsdp2.in_place_gather import gather_in_place
from ..fsdp2.in_place_reduce import reduce_in_place


def in_place(spec: ModelSpec) -> ModelSpec:
    """``spec``, whose models gather and reduce in place."""
    parallelize = spec.parallelize_fn

    def then_in_place(model: nn.Module, **options) -> nn.Module:
        model = parallelize(model, **options)
        model.in_place = gather_in_place(model), reduce_in_place(model)
        return model

    return replace(spec, parallelize_fn=then_in_place)
