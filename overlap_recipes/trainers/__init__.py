# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/trainers/__init__.py
"""The saves, and FSDP2 in place, in other people's trainers.

Import a module by its name. Each needs its trainer, and raises ``ImportError`` without:

* ``lightning``: lightning
* ``torchtitan``, ``torchtitan_fsdp2``: torchtitan
* ``transformers``: transformers and accelerate
"""
