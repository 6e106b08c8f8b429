# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/__init__.py
"""Data movement during compute, for PyTorch training.

* ``overlap_recipes.checkpoint``: saves during training, retention, resume, preemption
* ``overlap_recipes.offload``: weights, optimizer and activations in host memory
* ``overlap_recipes.fsdp2``: FSDP2 whose gathers and reductions are peer copies
* ``overlap_recipes.trainers``: the saves in torchtitan, transformers and Lightning
"""

from .version import __version__

__all__ = ["__version__"]
