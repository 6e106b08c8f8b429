# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/fit.py
"""What of a checkpoint goes where in a job, and what does not fit."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from ..ranks import own_rank, world_size
from .state.alike import PER_RANK, RECIPES
from .state.contents import Contents, described, differences, spec_of, why_not_saved
from .state.differing import otherwise_here
from .state.optimizers import SavedGroup, wrong_groups
from .state.state import NOT_LOADED, TAKEN, TrainingState
from .state.trained import States
from .state.trees import Flattened, Path, in_parts, shard_of, unpack_flattened

_EXTRA = "_extra_state"  # the end of a module's name for it


@dataclass
class Entry:
    """A leaf of a checkpoint.

    Attributes:
        name: its name in the checkpoint.
        path: from the state on, such as ``("optim", "state", "0.weight", "exp_avg")``.
        stored: size and type of a tensor; None if it is no tensor.
    """

    name: str
    path: Path
    stored: TensorStorageMetadata | None


def entries_below(metadata: Metadata, key: str) -> list[Entry]:
    """What a checkpoint has of the state ``key``."""
    found = []
    for name, stored in metadata.state_dict_metadata.items():
        first, *path = metadata.planner_data[name]
        if first == key:
            is_tensor = isinstance(stored, TensorStorageMetadata)
            found.append(Entry(name, tuple(path), stored if is_tensor else None))
    return found


def lists_of(key: str, entries: list[Entry], metadata: Metadata) -> dict[str, object]:
    """What has to be read first: the list of contents, and the names in each group.

    Args:
        entries: below ``key``.
        metadata: of the whole checkpoint.

    Raises:
        ValueError: the checkpoint is none of a ``TrainingState``.
    """
    found: dict[str, object] = {}
    for entry in entries:
        is_list = entry.path in (("has_state",), (RECIPES,))
        is_group = entry.path[:2] == ("optim", "param_groups")
        if is_list or (is_group and entry.path[-1] == "params"):
            found[entry.name] = None
    if f"{key}.has_state" not in found:
        paths = metadata.planner_data.values()
        others = sorted(str(path[0]) for path in paths if path[1:] == ("has_state",))
        if others:
            raise ValueError(f"the checkpoint has its state under {', '.join(others)}, not {key}")
        raise ValueError(NOT_LOADED)
    return found


class Skip:
    """Names of what stays as it is here."""

    def __init__(self, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise TypeError(f"skip is a name, and would be taken for its letters: skip=[{names!r}]")
        self._names = set(names)

    def covers(self, name: str) -> bool:
        return any(name == each or name.startswith(f"{each}.") for each in self._names)

    def others(self, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that it does not cover."""
        return {name for name in names if not self.covers(name)}

    def unused(self, names: Iterable[str]) -> list[str]:
        """What covers none of ``names``."""
        found = []
        for each in sorted(self._names):
            if not any(name == each or name.startswith(f"{each}.") for name in names):
                found.append(each)
        return found


@dataclass
class Look:
    """What one look at a checkpoint has found.

    Attributes:
        rooms: by name in the checkpoint, what DCP fills.
        wanted: the entries of which these are.
        of_ranks: by name, which rank has saved it; all ranks want it, so one reads it for them.
        wrong: a line for each difference.
    """

    rooms: dict[str, object] = field(default_factory=dict)
    wanted: list[Entry] = field(default_factory=list)
    of_ranks: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def want(self, entry: Entry, own: object) -> None:
        """Read ``entry``, into ``own`` if that is a tensor of its kind."""
        self.wanted.append(entry)
        if entry.stored is None:
            self.rooms[entry.name] = None
        elif _is_like(own, entry.stored):
            self.rooms[entry.name] = own
        else:
            stored = entry.stored
            self.rooms[entry.name] = torch.empty(stored.size, dtype=stored.properties.dtype)

    def add(self, other: "Look") -> None:
        self.rooms.update(other.rooms)
        self.wanted.extend(other.wanted)
        self.of_ranks.update(other.of_ranks)
        self.wrong.extend(other.wrong)


class Fit:
    """A checkpoint compared with a job.

    Attributes:
        found: what all looks have found.
    """

    def __init__(
        self, key: str, job: TrainingState, entries: list[Entry], skip: Skip, lists: dict
    ) -> None:
        self.job = job
        self.skip = skip
        self.contents = Contents.of_text(lists[f"{key}.has_state"])
        self._entries = entries
        self._packed = lists.get(f"{key}.{RECIPES}")
        self._flattened = unpack_flattened(self._packed)
        self._own: States = job.trained.current()
        own_flattened: dict[Path, Flattened] = {}
        shared = {name: item.state_dict() for name, item in job.shared.items()}
        self._shared = in_parts(shared, (), own_flattened)
        self._model = in_parts({**self._own.model}, ("model",), own_flattened)
        self._optim = in_parts(self._own.optim, ("optim",), own_flattened)
        self._parameters = job.trained.parameters_of_optimizers()
        self.found = self._look(lists)

    def _look(self, lists: dict) -> Look:
        found = Look()
        found.add(self._look_at_model())
        found.add(self._look_at_moments())
        found.add(self._look_at_groups(lists))
        found.add(self._look_at_counters())
        found.add(self._look_at_shared())
        found.add(self._look_at_ranks())
        for name in self.skip.unused(self._all_names()):
            found.wrong.append(
                f"  {name}: to be skipped, but neither the job nor the checkpoint has it"
            )
        return found

    def _below(self, *path: str) -> list[Entry]:
        return [entry for entry in self._entries if entry.path[: len(path)] == path]

    def _all_names(self) -> set[str]:
        """The names that may be skipped."""
        found = {*self._own.model, *self._parameters, *self._shared, *self.job.per_rank}
        found.update(self.job.COUNTERS)
        found.update(self.contents.optim)
        found.update(self.contents.left_out)
        for entry in self._entries:
            if entry.path[0] == "model":
                found.add(str(entry.path[1]))
            elif entry.path[0] == PER_RANK:
                found.add(str(entry.path[2]))
            else:
                found.add(str(entry.path[0]))
        return found - TAKEN

    # -- looks ------------------------------------------------------------------------------------

    def _look_at_model(self) -> Look:
        look = Look()
        saved = {**self.contents.left_out}
        for entry in self._below("model"):
            name = str(entry.path[1])
            if self.skip.covers(name):
                continue
            own = _element(self._model, entry.path[1:])
            look.want(entry, own)
            if entry.stored is not None and len(entry.path) == 2:  # a whole tensor
                saved[name] = _spec_stored(entry.stored)
                continue
            saved[name] = self.contents.model.get(name, "no tensor")
            if entry.stored is not None and self._is_other_part(entry, name, own):
                place = ".".join(map(str, entry.path[1:]))
                look.wrong.append(f"  {place}: saved {_spec_stored(entry.stored)}")
        here: dict[str, str] = {}
        for name, leaf in self._own.model.items():
            is_empty = isinstance(leaf, dict) and not leaf  # no checkpoint has it, or one of later
            if not is_empty or name in saved:
                here[name] = described(leaf)
                why = why_not_saved(leaf)
                if why and not self.skip.covers(name):
                    look.wrong.append(f"  {name} {why}")
        saved = {name: saved[name] for name in self.skip.others(saved)}
        here = {name: here[name] for name in self.skip.others(here)}
        look.wrong.extend(differences(saved, here))
        look.wrong.extend(
            otherwise_here(self.contents, self._own, self.job.kinds(), self.skip.covers)
        )
        return look

    def _is_other_part(self, entry: Entry, name: str, own: object) -> bool:
        """Whether ``own``, a part of what the model has as ``name``, has not the size of ``entry``.

        A part that is not here yet, as a scale of float8, is made by the load.
        """
        if own is None:
            return False
        if name.endswith(_EXTRA):
            return False  # its module takes any size
        joined_how = self._flattened.get(("model", name))
        if joined_how is not None and joined_how.is_sparse:
            return False  # its parts are as large as its content has it
        return not _is_like(own, entry.stored)

    def _look_at_moments(self) -> Look:
        look = Look()
        noted = self.contents.optim
        saved = self.skip.others(noted)
        here = self.skip.others(self._parameters)
        for line in differences(dict.fromkeys(saved, ""), dict.fromkeys(here, "")):
            look.wrong.append(f"{line}'s optimizers")
        for entry in self._below("optim", "state"):
            name = str(entry.path[2])
            if name not in saved & here or str(entry.path[3]) not in noted[name]:
                continue
            own = _element(self._optim["state"], entry.path[2:])
            if entry.stored is not None and not _is_like(own, entry.stored):
                parameter = self._parameters[name]
                wrong_shards = self._wrong_shards(entry, parameter)
                if wrong_shards is not None:
                    look.wrong.append(wrong_shards)
                    own = None
                else:
                    own = self._room_of_moment(entry, parameter)
            look.want(entry, own)
        return look

    def _part_of(self, entry: Entry) -> Flattened | None:
        """How the tensor is joined of which ``entry`` is a part; None if it is a number, or none.

        A number, such as a scale, is the same on all ranks, however the tensor is sharded.
        """
        if not entry.stored.size:
            return None
        return self._flattened.get(entry.path[:-1])

    def _wrong_shards(self, entry: Entry, parameter: nn.Parameter) -> str | None:
        """A line if ``entry`` is a part of a tensor whose shards were of another shape."""
        part_of = self._part_of(entry)
        if part_of is None or part_of.is_tuple:
            return None
        if part_of.shape == tuple(shard_of(parameter).shape):
            return None
        name = ".".join(map(str, entry.path))
        return f"  {name}: shards of {part_of.shape} at the save: use as many ranks"

    def _room_of_moment(self, entry: Entry, parameter: nn.Parameter) -> torch.Tensor:
        """A tensor that takes ``entry``, of the state of ``parameter``: sharded as that is."""
        part_of = self._part_of(entry)
        is_as_large = entry.stored.size == parameter.shape
        if part_of is None or not part_of.is_dtensor or is_as_large:
            return _room(entry.stored, parameter, is_step=entry.path[3] == "step")
        return _room_of_part(entry.stored, parameter)

    def _look_at_groups(self, lists: dict) -> Look:
        """Compare the optimizers' groups with those that were saved."""
        look = Look()
        kinds = self.contents.kinds.get("optim", [])
        saved: dict[int, SavedGroup] = {}
        for entry in self._below("optim", "param_groups"):
            look.want(entry, _element(self._optim, entry.path[1:]))
            if len(entry.path) < 4:
                continue  # the list is empty
            number = int(entry.path[2])
            if number not in saved:
                kind = kinds[number] if number < len(kinds) else None
                saved[number] = SavedGroup(set(), set(), kind)
            saved[number].settings.add(str(entry.path[3]))
            if entry.path[-1] == "params":
                saved[number].names = self.skip.others(lists[entry.name])
        own = self._own.optim["param_groups"]
        groups = list(saved.values())
        look.wrong.extend(wrong_groups(self.job.optimizers, own, groups, self.skip.covers))
        return look

    def _look_at_counters(self) -> Look:
        look = Look()
        for name in self.job.COUNTERS:
            entries = self._below(name)
            if not entries and not self.skip.covers(name):
                look.wrong.append(f"  {name}: only in the job")
            for entry in entries:
                look.want(entry, None)
        return look

    def _look_at_shared(self) -> Look:
        look = Look()
        empty = {path[0] for path in self.contents.empty}
        for name in self.skip.others(self._shared):
            entries = self._below(name)
            if not entries and name not in empty:
                look.wrong.append(f"  {name}: only in the job")
            for entry in entries:
                look.want(entry, _element(self._shared, entry.path))
        known = TAKEN | {*self.job.COUNTERS, *self._shared}
        there = {str(entry.path[0]) for entry in self._entries} - known
        for name in sorted(self.skip.others(there)):
            look.wrong.append(f"  {name}: only in the checkpoint")
        return look

    def _look_at_ranks(self) -> Look:
        """Want this rank's items, or those of all ranks where another number of them has saved."""
        look = Look()
        ranks = self.contents.ranks or world_size()
        is_as_saved = ranks == world_size()
        entries = self._below(PER_RANK)
        own_entries = self._below(PER_RANK, str(own_rank()))
        saved = {str(entry.path[2]) for entry in entries}
        there = {str(entry.path[2]) for entry in own_entries} if is_as_saved else saved
        items = self.job.per_rank
        for name in sorted(self.skip.others(items)):
            if name not in there:
                look.wrong.append(f"  {name}, of each rank: only in the job")
            if not is_as_saved and not hasattr(items[name], "load_state_dicts"):
                look.wrong.append(
                    f"  {name}: saved on {ranks} ranks, here are {world_size()}: it needs a method "
                    "load_state_dicts(states), which gets the states of all ranks"
                )
        for name in sorted(self.skip.others(saved - items.keys())):
            look.wrong.append(f"  {name}, of each rank: only in the checkpoint")
        for entry in own_entries if is_as_saved else entries:
            look.want(entry, None)
            if not is_as_saved:
                look.of_ranks[entry.name] = int(entry.path[1])
        return look

    # -- after the read ---------------------------------------------------------------------------

    def finish(self, read: dict[str, object]) -> None:
        """Give the job what DCP has read, in the form that its own state has."""
        tree: dict = {"model": {}, "optim": {"state": {}, "param_groups": []}}
        for entry in self.found.wanted:
            put(tree, entry.path, read[entry.name])
        self._put_empty_dicts(tree)
        if self._packed is not None:
            tree[RECIPES] = self._packed
        int_keys = {tuple(path) for path in self.contents.int_keys}
        tree = _with_numbers(tree, (), int_keys)
        for name, own in self._shared.items():
            if name in tree:
                tree[name] = _in_dicts_like(own, tree[name])
        for name, moments in self._own.optim["state"].items():  # whole tensors, not their parts
            if self.skip.covers(name):
                tree["optim"]["state"][name] = moments
        self.job.take(tree, self.contents, self._own, self.skip.covers)

    def _put_empty_dicts(self, tree: dict) -> None:
        """Put dicts that were empty at the save where ``tree`` has what they were in."""
        for path in self.contents.empty:
            if path[0] in self._shared:  # it may be nothing but empty dicts
                is_wanted = not self.skip.covers(path[0])
            else:
                is_wanted = _element(tree, path[:-1]) is not None
            if is_wanted:
                put(tree, tuple(path), {})


# -- rooms ------------------------------------------------------------------------------------


def _spec_stored(stored: TensorStorageMetadata) -> str:
    return spec_of(stored.properties.dtype, stored.size)


def _is_like(own: object, stored: TensorStorageMetadata) -> bool:
    if not torch.is_tensor(own) or own.is_meta:
        return False
    return own.shape == stored.size and own.dtype == stored.properties.dtype


def _room(stored: TensorStorageMetadata, parameter: nn.Parameter, is_step: bool) -> torch.Tensor:
    """A tensor for a leaf of the state of ``parameter``, sharded as that is if it has its shape."""
    dtype = stored.properties.dtype
    local = shard_of(parameter)
    if not isinstance(parameter, DTensor) or stored.size != parameter.shape:
        device = "cpu" if is_step else local.device
        return torch.empty(stored.size, dtype=dtype, device=device)
    shard = torch.empty(local.shape, dtype=dtype, device=local.device)
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    mesh = parameter.device_mesh
    return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, **layout)


def _room_of_part(stored: TensorStorageMetadata, parameter: DTensor) -> torch.Tensor:
    """A tensor for one of those that a state of ``parameter`` is made of, of another size."""
    ranks = 1
    for dim, placement in enumerate(parameter.placements):
        if placement == Shard(0):
            ranks *= parameter.device_mesh.size(dim)
    shape = (stored.size[0] // ranks, *stored.size[1:])
    device = parameter._local_tensor.device
    part = torch.empty(shape, dtype=stored.properties.dtype, device=device)
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)


# -- what stands at a path


def _element(tree: object, path: Iterable[str | int]) -> object:
    """What is at ``path``, whose names may be of numbers; None if there is nothing."""
    for key in path:
        if isinstance(tree, dict):
            names = {str(own): own for own in tree} if key not in tree else {key: key}
            if key not in names:
                return None
            tree = tree[names[key]]
        elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def put(tree: object, path: tuple[str | int, ...], value: object) -> None:
    """Set what is at ``path``; dicts are made for names and lists for numbers."""
    for key, following in zip(path, path[1:], strict=False):
        fresh: dict | list = [] if isinstance(following, int) else {}
        if isinstance(tree, list):
            while len(tree) <= key:
                tree.append(None)
            if tree[key] is None:
                tree[key] = fresh
        else:
            tree.setdefault(key, fresh)
        tree = tree[key]
    last = path[-1]
    if isinstance(tree, list):
        while len(tree) <= last:
            tree.append(None)
    tree[last] = value


def _with_numbers(tree: object, path: tuple, numbers: set[tuple]) -> object:
    """``tree`` with the keys at the paths ``numbers`` as numbers."""
    if isinstance(tree, dict):
        found = {}
        for key, value in tree.items():
            here = (*path, key)
            inner = _with_numbers(value, here, numbers)
            found[int(key) if here in numbers else key] = inner
        return found
    if isinstance(tree, list) and numbers:
        return [_with_numbers(value, (*path, n), numbers) for n, value in enumerate(tree)]
    return tree


def _in_dicts_like(own: object, tree: object) -> object:
    """``tree`` with its dicts of the classes that they have in ``own``."""
    if not isinstance(tree, dict) or not isinstance(own, dict):
        return tree
    found = {key: _in_dicts_like(own.get(key), value) for key, value in tree.items()}
    if type(own) is dict:
        return found
    like_own = copy(own)
    like_own.clear()
    like_own.update(found)
    return like_own
