# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/trainers/__init__.py
"""The saves in other people's trainers. Each module needs its trainer: import it by name."""
