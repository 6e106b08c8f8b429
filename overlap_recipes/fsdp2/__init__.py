# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/__init__.py
"""FSDP2 whose gathers and reductions are copies between peers, straight to where they are used."""

from .in_place_gather import gather_in_place
from .in_place_reduce import reduce_in_place
from .peer_copies import PeerCopies, use_peer_copies

__all__ = ["PeerCopies", "gather_in_place", "reduce_in_place", "use_peer_copies"]
