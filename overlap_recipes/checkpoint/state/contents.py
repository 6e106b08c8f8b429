# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/contents.py
"""What a checkpoint says of itself: what a load compares, and what DCP's names do not tell."""

import json
from functools import cache

import torch

from .tensor_classes import is_made_of_tensors
from .trees import shard_of

FORMAT = 2  # of ``has_state``; the first was the optimizers' keys alone
KEY = "a checkpoint keeps names and whole numbers as keys of a dict, not %r (in %s)"


def survey(tree: object, path: list, int_keys: list[list], empty: list[list]) -> None:
    """List the paths that DCP's names do not tell: of keys that are numbers, and of empty dicts."""
    if isinstance(tree, list):
        for number, value in enumerate(tree):
            if isinstance(value, (dict, list)):
                survey(value, [*path, number], int_keys, empty)
        return
    if not tree:
        empty.append(path)
    for key, value in tree.items():
        if type(key) is int:
            int_keys.append([*path, str(key)])
        elif not isinstance(key, str):
            raise TypeError(KEY % (key, ".".join(map(str, path))))
        if isinstance(value, (dict, list)):
            survey(value, [*path, str(key)], int_keys, empty)


def described(leaf: object) -> str:
    """What a load compares of a part of the model."""
    if not torch.is_tensor(leaf):
        return "no tensor"
    spec = spec_of(leaf.dtype, leaf.shape)
    if is_made_of_tensors(leaf):
        return f"{type(shard_of(leaf)).__name__} of {spec}"
    return spec


@cache
def spec_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {[*shape]}"


def differences(saved: dict[str, str], here: dict[str, str]) -> list[str]:
    """A line for each part of a model that the checkpoint has otherwise."""
    found = []
    for name in sorted(saved.keys() | here.keys()):
        if name not in here:
            found.append(f"  {name}: only in the checkpoint")
        elif name not in saved:
            found.append(f"  {name}: only in the model")
        elif saved[name] != here[name]:
            found.append(f"  {name}: {here[name]}, saved {saved[name]}")
    return found


def parse(has_state: str) -> dict:
    """What ``contents`` gave; of an old checkpoint, the optimizers' keys alone."""
    contents = json.loads(has_state)
    if isinstance(contents.get("format"), int):
        return contents
    return {"optim": contents, "int_keys": [], "empty": []}
