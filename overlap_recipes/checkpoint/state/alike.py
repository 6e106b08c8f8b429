# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/alike.py
"""What ranks must agree on, since a checkpoint has it once."""

import ctypes
import hashlib

import torch
from torch.distributed.tensor import DTensor

from .trees import is_staged

PER_RANK = "per_rank"
RECIPES = "made_of_tensors"  # how tensors of classes of their own are joined
SMALL = 1 << 20  # bytes of a tensor that rank 0 writes if all ranks have it
REPLICAS_DIFFER = (
    "ranks differ in %s: the checkpoint has those of rank 0, and all resume with them. "
    "SyncBatchNorm keeps buffers alike that forward changes; what is of each rank goes to per_rank"
)
PASS_PER_RANK = "pass what is of each rank as TrainingState(..., per_rank={name: object})"


def shared_digests(tree: dict) -> dict[str, str]:
    """Digests of what ``tree`` shares between ranks, by name: of all that is no tensor.

    Args:
        tree: what ``read`` has returned. Of its entries, those of a ``TrainingState`` count.
    """
    digests = {}
    for key, state in tree.items():
        if not isinstance(state, dict) or "has_state" not in state:
            continue
        for name in state.keys() - {"model", "optim", PER_RANK, RECIPES}:
            digests[f"{key}.{name}"] = digest(state[name])
        settings = [{**group, "params": None} for group in state["optim"]["param_groups"]]
        digests[f"{key}.optim.param_groups"] = digest(settings)
    return digests


class DifferingRanks(RuntimeError):
    """Ranks share what differs between them: all would resume with the state of one."""


def refuse_differing(of_ranks: list[dict[str, str]], advice: str = PASS_PER_RANK) -> None:
    """Raise ``DifferingRanks`` if a name has several digests."""
    differing = differing_names(of_ranks)
    if differing:
        raise DifferingRanks(
            f"ranks differ in {', '.join(differing)}, and all would resume with the state of one: "
            f"{advice}"
        )


def differing_names(of_ranks: list[dict[str, str]]) -> list[str]:
    """The names that have several digests."""
    names: set[str] = set()
    for digests in of_ranks:
        names |= digests.keys()
    differing = []
    for name in sorted(names):
        if len({digests[name] for digests in of_ranks if name in digests}) > 1:
            differing.append(name)
    return differing


def digests_of_replicas(tree: dict) -> dict[str, str]:
    """Digests of small tensors that are no shards, of the model and of what is shared, by name.

    Args:
        tree: as of ``shared_digests``; its tensors lie in host memory.
    """
    digests: dict[str, str] = {}
    for key, state in tree.items():
        if isinstance(state, dict) and "has_state" in state:
            for name in state.keys() - {"optim", PER_RANK, RECIPES}:
                _add_digests_of_replicas(state[name], f"{key}.{name}", digests)
    return digests


def _add_digests_of_replicas(tree: object, name: str, digests: dict[str, str]) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _add_digests_of_replicas(value, f"{name}.{key}", digests)
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            _add_digests_of_replicas(value, f"{name}.{number}", digests)
    elif is_staged(tree) and not isinstance(tree, DTensor) and tree.nbytes <= SMALL:
        content = ctypes.string_at(tree.data_ptr(), tree.nbytes)
        digests[name] = hashlib.sha256(content).hexdigest()


def digest(tree: object) -> str:
    found = hashlib.blake2b(digest_size=16)
    _add_to_digest(tree, found)
    return found.hexdigest()


def _add_to_digest(tree: object, found: "hashlib._Hash") -> None:
    """Equal values have equal digests, in any process; tensors do not count."""
    if torch.is_tensor(tree):
        return
    found.update(type(tree).__name__.encode())
    if isinstance(tree, dict):
        for key in sorted(tree, key=repr):
            found.update(repr(key).encode())
            _add_to_digest(tree[key], found)
    elif isinstance(tree, (list, tuple)):
        found.update(str(len(tree)).encode())
        for value in tree:
            _add_to_digest(value, found)
    elif isinstance(tree, (set, frozenset)):
        found.update(repr(sorted(tree, key=repr)).encode())
    elif hasattr(tree, "tobytes"):  # an array of NumPy
        found.update(f"{tree.dtype} {tree.shape}".encode() + tree.tobytes())
    elif isinstance(tree, bytes):
        found.update(tree)
    elif type(tree).__repr__ is not object.__repr__:
        found.update(repr(tree).encode())
    else:
        _add_to_digest(getattr(tree, "__dict__", None), found)
