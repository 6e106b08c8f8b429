# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/alike.py
"""What ranks must agree on, since a checkpoint has it once."""

import copyreg
import ctypes
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from .contents import Contents
from .trees import is_staged

PER_RANK = "per_rank"
MAY_DIFFER = "what may differ"
RECIPES = "made_of_tensors"  # how tensors of classes of their own are joined
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
PASS_PER_RANK = (
    "give TrainingState the same on all ranks, and weights that are equal when they are saved, as "
    "DDP keeps them; pass what is of each rank, as its experts or its stage of a pipeline with its "
    "optimizer, as TrainingState(model, per_rank={name: object}), on all ranks, where model may be "
    "nn.Module()"
)
_OF_OWN_LOSS = "prev_loss"  # of L-BFGS: the last loss of this rank
_TOLD = 5  # names in a message
Part = tuple[str, str, str]  # what it belongs to, its name, and which part of a tensor it is


class DifferingRanks(RuntimeError):
    """Ranks share what differs between them: all would resume with the state of one."""


def refuse_differing(
    together: Callable,
    look: Callable[[], dict[str, str]],
    look_closer: Callable[[list[str]], dict[Part, str]],
    advice: str = PASS_PER_RANK,
) -> bool:
    """Raise ``DifferingRanks`` on all ranks if they have something otherwise; all call it.

    Returns whether they differ in what may differ.

    Args:
        together: calls a function on all ranks, and returns what it has returned on each.
        look: returns digests of what must be equal, by name.
        look_closer: returns those of parts of some names; called if these differ.
    """
    differing = differing_names(together(look))
    if set(differing) <= {MAY_DIFFER}:
        return bool(differing)
    parts = _differing_parts(together(look_closer, differing))
    told: list[str] = []
    for name in differing:
        told.extend(parts.get(name, [name]))
    shown = ", ".join(told[:_TOLD])
    if len(told) > _TOLD:
        shown += f" and {len(told) - _TOLD} more"
    raise DifferingRanks(
        f"ranks differ in {shown}, and all would resume with the state of one: {advice}"
    )


def differing_names(of_ranks: list[dict]) -> list:
    """The names that have several digests."""
    names: set = set()
    for digests in of_ranks:
        names |= digests.keys()
    differing = []
    for name in sorted(names):
        if len({digests[name] for digests in of_ranks if name in digests}) > 1:
            differing.append(name)
    return differing


def _differing_parts(of_ranks: list[dict[Part, str]]) -> dict[str, list[str]]:
    """What to tell of each name: its parts that differ, and those that only some ranks have."""
    ranks_of: dict[Part, list[str]] = {}
    for rank, digests in enumerate(of_ranks):
        for part in digests:
            ranks_of.setdefault(part, []).append(str(rank))
    differing = set(differing_names(of_ranks))
    found: dict[str, list[str]] = {}
    for part in sorted(ranks_of):
        whole, name, place = part
        ranks = ranks_of[part]
        is_alone = len(ranks) < len(of_ranks) and not place
        if part in differing:
            found.setdefault(whole, []).append(name)
        elif is_alone:
            which = "rank" if len(ranks) == 1 else "ranks"
            found.setdefault(whole, []).append(f"{name} (on {which} {', '.join(ranks)} alone)")
    return found


# -- what is no tensor


def shared_digests(tree: dict) -> dict[str, str]:
    """Digests of what ``tree`` shares between ranks, by name: of all that is no tensor.

    Args:
        tree: what ``read`` has returned. Of its entries, those of a ``TrainingState`` count.

    Raises:
        TypeError: an object has a DTensor inside.
    """
    digests = {}
    for key, state in training_states(tree):
        for name in state.keys() - {"model", "optim", PER_RANK, RECIPES}:
            digests[f"{key}.{name}"] = digest(state[name])
        for name, leaf in state["model"].items():
            if not torch.is_tensor(leaf):  # of ``get_extra_state``
                digests[f"{key}.model.{name}"] = digest(leaf)
        settings = [{**group, "params": None} for group in state["optim"]["param_groups"]]
        digests[f"{key}.optim.param_groups"] = digest(settings)
        others = {}
        for name, moments in state["optim"]["state"].items():
            for kind, value in moments.items():
                if kind != _OF_OWN_LOSS and not torch.is_tensor(value):
                    others[f"{name}.{kind}"] = value
        digests[f"{key}.optim.state"] = digest(others)
    return digests


def training_states(tree: dict) -> Iterator[tuple[str, dict]]:
    for key, state in tree.items():
        if isinstance(state, dict) and "has_state" in state:
            yield key, state


def parts_of_contents(tree: dict, names: list[str]) -> dict[Part, str]:
    """What the list of contents of a ``TrainingState`` has, and its step, if among ``names``."""
    found: dict[Part, str] = {}
    for key, state in training_states(tree):
        step = f"{key}.step"
        if step in names:
            found[step, f"{step} = {state['step']}", ""] = ""
        whole = f"{key}.has_state"
        if whole in names:
            for name, what in Contents.of_text(state["has_state"]).parts():
                found[whole, f"{key}.{name}", ""] = what
    return found


def digest(value: object) -> str:
    """Equal values have equal digests, in any process; tensors count inside of objects alone."""
    found = hashlib.blake2b(digest_size=16)
    _add(value, found, [], "")
    return found.hexdigest()


def _add(value: object, found: "hashlib._Hash", around: list[int], inside: str) -> None:
    """Add ``value``.

    Args:
        around: ids of what it is in.
        inside: the class of the object that it is in; "" in dicts and lists alone.
    """
    if torch.is_tensor(value):
        if inside:
            _add_tensor(value, found, inside)
        return
    kind = type(value)
    found.update(f"{kind.__module__}.{kind.__qualname__}:".encode())
    if isinstance(value, (str, int, float, complex, type(None))):
        found.update(repr(value).encode())
    elif isinstance(value, (bytes, bytearray)):
        found.update(value)
    elif isinstance(value, _BY_NAME):
        found.update(f"{value.__module__}.{value.__qualname__}".encode())
    elif id(value) in around:
        found.update(str(around.index(id(value))).encode())
    elif isinstance(value, (set, frozenset)):
        found.update(" ".join(sorted(map(digest, value))).encode())
    else:
        around = [*around, id(value)]
        for part in _parts(value):
            found.update(b",")
            is_object = not isinstance(value, (dict, list, tuple))
            _add(part, found, around, kind.__name__ if is_object else inside)


def _parts(value: object) -> Iterable[object]:
    """What makes ``value``: of an object, what pickle would write."""
    if isinstance(value, dict):
        items: list[object] = []
        for key in sorted(value, key=digest):
            items.append(key)
            items.append(value[key])
        return items
    if isinstance(value, (list, tuple)):
        return value
    dtype = getattr(value, "dtype", None)
    if hasattr(value, "tobytes") and dtype is not None and not dtype.hasobject:  # of NumPy
        return [str(dtype), value.shape, value.tobytes()]
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled, as the write will say
        return []
    if isinstance(reduced, str):
        return [reduced]
    how, arguments, *state = reduced
    parts = [how, arguments]
    for each in state:
        is_iterator = hasattr(each, "__next__")  # over the items of a list or a dict
        parts.append(list(each) if is_iterator else each)
    return parts


def _add_tensor(tensor: torch.Tensor, found: "hashlib._Hash", inside: str) -> None:
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"there is a DTensor inside a {inside}: a checkpoint has such an object once, and all "
            f"ranks would resume with one rank's shard. Keep it in a dict, a list or a tuple"
        )
    found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
    if is_staged(tensor):
        found.update(bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg()))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Those of a tensor in host memory."""
    whole = tensor.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)
