# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/__init__.py
"""The state of a job: asked for, undone where asking changes training, and loaded.

``state`` has the class that users make. The other rooms know one thing each, and nothing of it.
"""

from .alike import (
    PASS_PER_RANK,
    PER_RANK,
    RECIPES,
    SMALL,
    DifferingRanks,
    differing_names,
    digest,
    digests_of_replicas,
    refuse_differing,
    shared_digests,
)
from .contents import described, differences, parse, spec_of, survey
from .optimizers import OTHER_GROUPS, OTHER_KIND, lacking_settings
from .random_numbers import RandomNumbers
from .state import (
    NOT_LOADED,
    REPLICAS_DIFFER,
    WRAPPERS,
    AppState,
    TrainingState,
    prefixes_of_ddp,
    read,
)
from .tensor_classes import Recipe, in_parts, is_made_of_tensors
from .trees import is_staged, memory_of, shard_of, unpacked, walk

__all__ = [
    "AppState",
    "DifferingRanks",
    "NOT_LOADED",
    "OTHER_GROUPS",
    "OTHER_KIND",
    "PASS_PER_RANK",
    "PER_RANK",
    "RECIPES",
    "REPLICAS_DIFFER",
    "RandomNumbers",
    "Recipe",
    "SMALL",
    "TrainingState",
    "WRAPPERS",
    "described",
    "differences",
    "differing_names",
    "digest",
    "digests_of_replicas",
    "in_parts",
    "is_made_of_tensors",
    "is_staged",
    "lacking_settings",
    "memory_of",
    "parse",
    "prefixes_of_ddp",
    "read",
    "refuse_differing",
    "shard_of",
    "shared_digests",
    "spec_of",
    "survey",
    "unpacked",
    "walk",
]
