# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/__init__.py
"""Save checkpoints during training, keep them, and resume from them.

``export`` and ``hub_folder`` are modules of their own: import them by name.
"""

from .checked_files import DamagedCheckpoint
from .loading import load
from .manager import CheckpointManager
from .preemption import AGAIN
from .reader import Reader
from .saves import Saves
from .state import TrainingState

__all__ = [
    "AGAIN",
    "CheckpointManager",
    "DamagedCheckpoint",
    "Reader",
    "Saves",
    "TrainingState",
    "load",
]
