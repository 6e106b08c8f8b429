# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/__init__.py
"""The state of a job: asked for, undone where asking changes training, and loaded.

``state`` has the class that users make, and tells what of it is copied after a save's call.
``trained`` asks model and optimizers; ``items``, ``loaders`` and ``random_numbers`` have the rest;
``contents`` is what a checkpoint says of itself. ``alike`` and ``replicas`` compare
what ranks share.
"""

from .alike import (
    PASS_PER_RANK,
    DifferingRanks,
    differing_names,
    digest,
    parts_of_contents,
    refuse_differing,
    shared_digests,
)
from .names import WRAPPERS, prefixes_of_ddp
from .replicas import REPLICAS_DIFFER, SMALL, Replicas, names_of_buffers
from .state import TrainingState, read
from .trees import is_made_of_tensors, is_staged, shard_of, walk

__all__ = [
    "PASS_PER_RANK",
    "REPLICAS_DIFFER",
    "SMALL",
    "WRAPPERS",
    "DifferingRanks",
    "Replicas",
    "TrainingState",
    "differing_names",
    "digest",
    "is_made_of_tensors",
    "is_staged",
    "names_of_buffers",
    "parts_of_contents",
    "prefixes_of_ddp",
    "read",
    "refuse_differing",
    "shard_of",
    "shared_digests",
    "walk",
]
