# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/__init__.py
"""FSDP2 whose gathers and reductions are copies between peers, straight to where they are used."""

from .peer_copies import use_peer_copies

__all__ = ["use_peer_copies"]
