# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/ranks_agree.py
"""What ranks that train one model together must have alike: weights, layers, places in a step."""

import hashlib
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..ranks import on_all_ranks, world_size

_SAMPLE = 256  # elements of each parameter that are compared between ranks
PATIENCE = timedelta(days=1)  # the job's own group ends a rank that hangs


class RanksAgree:
    """The ranks of a job. Every rank must make one; its methods are collectives."""

    def __init__(self) -> None:
        self.words = None  # a group for words: no device waits for it
        if world_size() > 1:
            self.words = dist.new_group(backend="gloo", timeout=PATIENCE)

    def heard(self, where: str, work: Callable[[], object]) -> list:
        """What ``work`` has returned on each rank, by rank; all must be at the same place.

        Raises:
            RuntimeError: on all ranks, where they are at different places.
            Exception: on all ranks, what ``work`` has raised on one.
        """
        if self.words is None:
            return [work()]
        said = on_all_ranks(lambda: (where, work()), self.words)
        for rank, (place, _) in enumerate(said):
            if place != said[0][0]:
                raise RuntimeError(
                    f"rank 0 is in {said[0][0]}, rank {rank} in {place}: "
                    "run every layer on every rank, as often"
                )
        return [value for _, value in said]

    def refuse_other_weights(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Raise on every rank if ranks begin with different weights; reads a sample.

        Raises:
            RuntimeError: they differ.
        """
        if self.words is None:
            return
        own = hashlib.blake2b(digest_size=16)
        for parameter in parameters:
            sample = parameter.detach().reshape(-1)[:_SAMPLE].contiguous().cpu()
            own.update(sample.view(torch.uint8).numpy().tobytes())
        if len(set(self.heard("its first backward", own.hexdigest))) > 1:
            raise RuntimeError(
                "ranks begin with different weights: seed them alike before the model is made, "
                "or load the same checkpoint on all"
            )

    @staticmethod
    def refuse_other_layers(where: str, layers: list[list[int]]) -> None:
        """Raise where ranks, which average gradients layer by layer, have not run the same ones.

        Raises:
            RuntimeError: which layers each rank has run.
        """
        for rank, theirs in enumerate(layers):
            if theirs != layers[0]:
                raise RuntimeError(
                    f"in {where} rank 0 has layers {layers[0]}, rank {rank} {theirs}, and ranks "
                    "average their gradients together: run every layer on every rank, as often and "
                    "in the same order"
                )
