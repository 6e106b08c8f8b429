# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/__init__.py
"""Save checkpoints beside training, keep them, and resume from them.

``object_storage``, ``export``, ``hub_folder`` and ``two_hosts`` are modules of their own: import
them by name.
"""

from .digests import DamagedCheckpoint
from .durable import DurableSaves, committed_steps, faults, newest_step
from .loading import load
from .manager import CheckpointManager
from .names import name_of
from .preemption import AGAIN, TOO_LATE, Preemption
from .reader import Reader
from .restart import Run, resume
from .retention import RetainedSaves
from .saves import Saves
from .state import TrainingState

__all__ = [
    "AGAIN",
    "CheckpointManager",
    "DamagedCheckpoint",
    "DurableSaves",
    "Preemption",
    "Reader",
    "RetainedSaves",
    "Run",
    "Saves",
    "TOO_LATE",
    "TrainingState",
    "committed_steps",
    "faults",
    "load",
    "name_of",
    "newest_step",
    "resume",
]
