# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/replicas.py
"""Tensors that several ranks have, of which a checkpoint has one: whether they are equal."""

import hashlib
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from .alike import MAY_DIFFER, PER_RANK, RECIPES, Part, bytes_of, training_states
from .contents import Contents
from .trees import is_staged, shard_of

SMALL = 1 << 20  # bytes of a tensor that rank 0 writes if all ranks have it
REPLICAS_DIFFER = (
    "ranks differ in %s: the checkpoint has those of rank 0 (of a DTensor, of one rank), and all "
    "resume with them. "
    "SyncBatchNorm keeps buffers alike that forward changes; what is of each rank goes to per_rank"
)
_MUST_AGREE = "parameters or optimizer state"
_SAMPLE = 512  # bytes of a tensor that a save compares; the next save takes others
_SPREAD = 0x9E3779B1


@dataclass(slots=True)
class _Replica:
    """This rank's part of a tensor, of which others have the same part.

    Attributes:
        part: its name, and which part it is: "" for all of it.
        content: its bytes.
        must_agree: a save fails if it does not.
    """

    part: Part
    content: torch.Tensor
    must_agree: bool


class Replicas:
    """What several ranks have of a state that lies in host memory, and how they compare it.

    Each save compares some bytes of each tensor, another time others.

    Args:
        tree: as of ``shared_digests``.
        hosts: its tensors, for which this is made.
    """

    def __init__(self, tree: dict, hosts: list[torch.Tensor]) -> None:
        self.hosts = hosts
        self._found: list[_Replica] = []
        self._places: dict[tuple, str | None] = {}
        for key, state in training_states(tree):
            buffers = names_of_buffers({f"{key}.has_state": state["has_state"]})
            for part in state.keys() - {PER_RANK, RECIPES}:
                self._look(state[part], f"{key}.{part}", part, buffers)
        self._found.sort(key=lambda each: each.part)

    def _look(self, tree: object, name: str, part: str, buffers: set[str]) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                self._look(value, f"{name}.{key}", part, buffers)
        elif isinstance(tree, (list, tuple)):
            for number, value in enumerate(tree):
                self._look(value, f"{name}.{number}", part, buffers)
        elif is_staged(tree) and shard_of(tree).numel():
            place = self._place(tree)
            if place is not None:
                content = shard_of(tree).detach().reshape(-1).view(torch.uint8)
                of_part = (_MUST_AGREE, name, place)
                must_agree = _has_to_agree(tree, name, part, buffers)
                self._found.append(_Replica(of_part, content, must_agree))

    def _place(self, tensor: torch.Tensor) -> str | None:
        """Which part this rank has; None if no other rank has it."""
        if not isinstance(tensor, DTensor):
            return ""
        how = tensor.device_mesh, tensor.placements
        if how not in self._places:
            self._places[how] = _place_of(tensor)
        return self._places[how]

    def digest(self, number: int, told: set[str]) -> dict[str, str]:
        """Two digests at the save of this number: of all that must agree, and of what may differ.

        The latter of whole tensors alone, and not of those that are ``told``.
        """
        must: list[torch.Tensor] = []
        may: list[torch.Tensor] = []
        for each in self._found:
            if each.must_agree:
                must.append(_sample(each, number))
            elif not each.part[2] and each.part[1] not in told:
                may.append(_sample(each, number))
        found = {}
        for name, samples in ((_MUST_AGREE, must), (MAY_DIFFER, may)):
            if samples:
                found[name] = _digest_of(torch.cat(samples))
        return found

    def parts(self, number: int, must_agree: bool) -> dict[Part, str]:
        """A digest of each tensor that must agree, or of each that need not."""
        found = {}
        for each in self._found:
            if each.must_agree == must_agree:
                found[each.part] = _digest_of(_sample(each, number))
        return found

    def parts_among(self, number: int, names: list[str]) -> dict[Part, str]:
        return self.parts(number, must_agree=True) if _MUST_AGREE in names else {}


def names_of_buffers(leaves: dict[str, object]) -> set[str]:
    """The names in a checkpoint of what is no parameter, as those of ``has_state`` say."""
    found = set()
    for name, text in leaves.items():
        key, _, last = name.rpartition(".")
        if last == "has_state":
            found.update(f"{key}.model.{buffer}" for buffer in Contents.of_text(text).buffers)
    return found


def _has_to_agree(tensor: torch.Tensor, name: str, part: str, buffers: set[str]) -> bool:
    """Whether a save fails where ranks have ``tensor`` otherwise; of the rest a warning says so."""
    if isinstance(tensor, DTensor):
        return False
    if part == "model":
        return name not in buffers
    return part == "optim" or tensor.nbytes > SMALL


def _place_of(tensor: DTensor) -> str | None:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    has_copies = False
    own = []
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            has_copies = has_copies or mesh.size(dim) > 1
        else:
            own.append((dim, coordinate[dim]))
    return f"{mesh.mesh.tolist()} {own}" if has_copies else None


def _sample(replica: _Replica, number: int) -> torch.Tensor:
    """Bytes at equal distances; an odd distance takes all bytes of the elements in turn."""
    distance = replica.content.numel() // _SAMPLE | 1
    begin = number * _SPREAD % distance
    return replica.content[begin::distance]


def _digest_of(sample: torch.Tensor) -> str:
    return hashlib.blake2b(bytes_of(sample), digest_size=16).hexdigest()
