# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/contents.py
"""What a checkpoint says of itself: what a load compares, and what DCP's names do not tell."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache

import torch
from torch.distributed.tensor import DTensor

from .trees import by_number, holds_tensors, is_made_of_tensors, is_sparse, is_staged, shard_of

_INNER = (dict, list, torch.Tensor)  # what DCP gives a name of its own in a list
_FORMAT = 3  # of 0.3.0; 2 lacks ``frozen``, ``ties`` and ``kinds``, and digests are of another sum


@dataclass
class Contents:
    """What stands under ``has_state``, as JSON, equal on all ranks.

    Attributes:
        optim: of each parameter that an optimizer has, the names of its state.
        ranks: how many have saved.
        model: a description of each part of the model that is in the checkpoint.
        left_out: the same of parameters that it leaves out.
        digests: of those that it leaves out, by name.
        frozen: the parameters that required no gradient.
        buffers: what of the model is no parameter: it may differ between ranks.
        ties: the name of the parameter that it is, of each that has several names.
        kinds: what steps each group of the optimizers, under ``optim``; of what has a name, which
            of torch's schedulers it is, and how many are in a list.
        int_keys: paths of keys that are numbers.
        empty: paths of dicts that have nothing in them.
        format: which of these a checkpoint has.
    """

    optim: dict[str, list[str]]
    ranks: int | None = None
    model: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    frozen: list[str] | None = None
    buffers: list[str] = field(default_factory=list)
    ties: dict[str, str] | None = None
    kinds: dict[str, object] = field(default_factory=dict)
    int_keys: list[list] = field(default_factory=list)
    empty: list[list] = field(default_factory=list)
    format: int = _FORMAT

    def as_text(self) -> str:
        return json.dumps(vars(self), sort_keys=True)

    def parts(self) -> Iterator[tuple[str, str]]:
        """What it says of each name, for a message of what ranks have otherwise."""
        for name, what in (self.model | self.left_out).items():
            yield f"model.{name}", what
        for name, moments in self.optim.items():
            yield f"optim.state.{name}", str(moments)
        for name, kind in self.kinds.items():
            yield name, str(kind)
        for name in ("frozen", "ties", "digests", "int_keys", "empty"):
            yield f"has_state.{name}", json.dumps(getattr(self, name), sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> "Contents":
        """What ``as_text`` has written; before November 27 the keys of optimizers stood alone."""
        found = json.loads(text)
        if not isinstance(found.get("format"), int):
            return cls(optim=found, format=1)
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in known})


class Survey:
    """The paths in a state that DCP's names do not tell: of keys that are numbers, of empty dicts.

    Raises:
        TypeError: a key is neither a name nor a whole number.
    """

    def __init__(self) -> None:
        self.int_keys: list[list] = []
        self.empty: list[list] = []

    def look(self, tree: object, path: list) -> None:
        """Add those of ``tree``, which stands at ``path``."""
        if isinstance(tree, list):
            for number, value in enumerate(tree):
                if isinstance(value, (dict, list, tuple)):
                    self.look(value, [*path, number])
            return
        if holds_tensors(tree):
            tree = by_number(tree)
        if not isinstance(tree, dict):
            return
        if not tree:
            self.empty.append(path)
        for key, value in tree.items():
            if type(key) is int:
                self.int_keys.append([*path, str(key)])
            elif not isinstance(key, str):
                place = ".".join(map(str, path))
                raise TypeError(
                    f"a checkpoint keeps names and whole numbers as keys of a dict, not {key!r} "
                    f"(in {place})"
                )
            if isinstance(value, (dict, list, tuple)):
                self.look(value, [*path, str(key)])


def refuse_one_name(tree: dict, name: str) -> None:
    """Raise ``ValueError`` if two values below ``name`` would have one name in a checkpoint."""
    found: set[str] = set()
    _add_names(tree, name, found)


def _add_names(tree: object, name: str, found: set[str]) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _add_names(value, f"{name}.{key}", found)
    elif isinstance(tree, list) and any(isinstance(each, _INNER) for each in tree):
        for number, value in enumerate(tree):
            _add_names(value, f"{name}.{number}", found)
    elif name in found:
        raise ValueError(
            f"{name}: two values would have this one name in the checkpoint, since one key has a "
            f"dot, or one is a number: give it another key"
        )
    else:
        found.add(name)


def described(leaf: object) -> str:
    """What a load compares of a part of the model."""
    if not torch.is_tensor(leaf):
        return "no tensor"
    spec = spec_of(leaf.dtype, leaf.shape)
    if not is_made_of_tensors(leaf):
        return spec
    if is_sparse(shard_of(leaf)):
        return f"sparse {spec}"
    return f"{type(shard_of(leaf)).__name__} of {spec}"


def why_not_saved(leaf: object) -> str:
    """Why no load could give a part of the model its values, in words; "" if one can."""
    if isinstance(leaf, DTensor) and any(each.is_partial() for each in leaf.placements):
        return (
            "is a DTensor with Partial placements, whose values no rank has: "
            "redistribute it to Replicate or Shard"
        )
    own = shard_of(leaf)
    if is_staged(leaf) and 0 in own.stride():
        steps = zip(own.stride(), own.shape, strict=True)
        repeats = any(step == 0 and size > 1 for step, size in steps)
        if repeats and own.numel() > 0:
            return (
                "has elements that share memory, as expand() gives it, and cannot be loaded: "
                "register clone() of it, or persistent=False"
            )
    return ""


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


def in_words(kind: object) -> str:
    """A kind, for a message."""
    if kind is None:
        return "an object"
    if isinstance(kind, dict):
        ((name, inner),) = kind.items()
        return f"{name} of {in_words(inner)}"
    if isinstance(kind, list):
        return f"{len(kind)} ({', '.join(map(in_words, kind))})"
    return str(kind)


def is_same_kind(saved: object, here: object) -> bool:
    """Whether a state of the one may go into the other; what has no kind may be any."""
    if saved is None or here is None:
        return not isinstance(saved or here, list)
    if isinstance(saved, list) and isinstance(here, list):
        if len(saved) != len(here):
            return False
        return all(is_same_kind(one, other) for one, other in zip(saved, here, strict=True))
    return saved == here
