# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/loading.py
"""Load a checkpoint into a job: what differs is listed before anything changes.

``dcp.load`` fills tensors that exist, so a new optimizer would have to make its state first. Here
the checkpoint's own list says what is made.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard

from ..ranks import on_all_ranks, own_rank, own_result, world_size
from .reader import Reader
from .shared_reads import SharedReads
from .state import (
    NOT_LOADED,
    OTHER_GROUPS,
    OTHER_KIND,
    PER_RANK,
    RECIPES,
    AppState,
    RandomNumbers,
    Recipe,
    TrainingState,
    described,
    differences,
    in_parts,
    lacking_settings,
    parse,
    shard_of,
    spec_of,
    survey,
    unpacked,
)

DIFFERS = (
    "%s does not fit this job: give TrainingState what it lacks, or leave names as they are here "
    "by skip=[...]\n%s"
)
USELESS = "  %s: to be skipped, but neither the job nor the checkpoint has it"
OTHER_RANKS = (
    "  %s: saved on %d ranks, here are %d: it needs a method load_state_dicts(states), which gets "
    "the states of all ranks"
)
EXTRA = "_extra_state"  # the end of a module's name for it
OLD_RANDOM = "random_of_rank_"  # keys of random numbers in checkpoints of earlier versions


@dataclass
class Entry:
    """A leaf of a checkpoint.

    Attributes:
        name: its name in the checkpoint.
        path: from the state on, such as ``("optim", "state", "0.weight", "exp_avg")``.
        stored: size and type of a tensor; None if it is no tensor.
    """

    name: str
    path: tuple[str | int, ...]
    stored: TensorStorageMetadata | None


def load(
    states: dict[str, object],
    source: Path | str | dcp.StorageReader,
    *,
    skip: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load a checkpoint into the objects of ``states``; all ranks call it.

    What several ranks hold, such as all of a model under DDP, is read once and broadcast, if there
    is a GiB of it on a device for which the group has a backend.

    Args:
        states: as at the save: ``{"app": TrainingState(...)}``. What is no ``AppState`` is loaded
            as ``dcp.load`` does it.
        source: the directory, or a reader of it.
        skip: names of what stays as it is here: modules, parameters or buffers, with what the
            optimizer has of them; items that are shared or of each rank.
        process_group: of all ranks that load; the default group.

    Raises:
        ValueError: the checkpoint does not fit. The message lists what differs, on all ranks;
            nothing has changed then. What an optimizer's own ``load_state_dict`` refuses is told
            behind the read: the weights are the checkpoint's then.
        DamagedCheckpoint: the list of contents is not as saved.
        OSError, RuntimeError: it is not there; it cannot be read.
        CheckpointException: a rank could not read its part: a file is missing, short, or not as
            saved. Raised on all ranks; what has been read till then stays.
    """
    reader = source if isinstance(source, dcp.StorageReader) else Reader(source)
    metadata = own_result(reader.read_metadata, process_group)
    fits = []
    for key, state in states.items():
        if isinstance(state, AppState):
            entries = entries_below(metadata, key)
            fits.append(Fit(key, state, entries, set(skip), process_group))
    lists: dict[str, object] = {}
    for fit in fits:
        lists.update(fit.lists())
    if lists:
        dcp.load(lists, storage_reader=reader, process_group=process_group)

    rooms: dict[str, object] = {}
    wrong: list[str] = []
    for fit in fits:
        fit.look(lists)
        rooms.update(fit.rooms)
        wrong.extend(fit.wrong)
    refuse_on_all_ranks(wrong, source, process_group)

    others = {}
    for key in sorted(states):  # on all ranks in one order, as dcp.load does it
        state = states[key]
        if not isinstance(state, AppState):
            others[key] = state.state_dict() if isinstance(state, Stateful) else state
    targets = rooms | others
    planner = SharedReads(process_group) if dist.is_initialized() else None
    dcp.load(targets, storage_reader=reader, planner=planner, process_group=process_group)
    if planner is not None:
        planner.send()
    for key in others:
        if isinstance(states[key], Stateful):
            states[key].load_state_dict(targets[key])
        else:
            states[key] = targets[key]
    for fit in fits:
        fit.finish(targets)


def entries_below(metadata: Metadata, key: str) -> list[Entry]:
    found = []
    for name, stored in metadata.state_dict_metadata.items():
        first, *path = metadata.planner_data[name]
        if first == key:
            is_tensor = isinstance(stored, TensorStorageMetadata)
            found.append(Entry(name, tuple(path), stored if is_tensor else None))
    return found


def refuse_on_all_ranks(
    wrong: list[str], source: object, process_group: dist.ProcessGroup | None
) -> None:
    lines: dict[str, None] = {}  # each once, in order
    for found in on_all_ranks(lambda: wrong, process_group):
        lines.update(dict.fromkeys(found))
    if lines:
        name = getattr(source, "checkpoint_id", source)
        raise ValueError(DIFFERS % (name, "\n".join(lines)))


class Fit:
    """What of a checkpoint goes where in a job.

    Attributes:
        rooms: what DCP fills, by the names of the checkpoint.
        wrong: a line for each difference.
    """

    def __init__(
        self,
        key: str,
        job: AppState,
        entries: list[Entry],
        skip: set[str],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.key = key
        self.job = job
        self.entries = entries
        self.skip = skip
        self.process_group = process_group
        self.skipped: set[str] = set()  # of ``skip``, what has been found
        self.wanted: list[Entry] = []
        self.rooms: dict[str, object] = {}
        self.wrong: list[str] = []

    def lists(self) -> dict[str, object]:
        """What has to be read first: the list of contents, and the names in each group."""
        found: dict[str, object] = {}
        for entry in self.entries:
            is_list = entry.path in (("has_state",), (RECIPES,))
            is_group = entry.path[:2] == ("optim", "param_groups")
            if is_list or (is_group and entry.path[-1] == "params"):
                found[entry.name] = None
        if f"{self.key}.has_state" not in found:
            raise ValueError(NOT_LOADED)
        return found

    def look(self, lists: dict[str, object]) -> None:
        """Compare the checkpoint with the job, and make room."""
        self.contents = parse(lists[f"{self.key}.has_state"])
        self.is_old = "ranks" not in self.contents
        packed_recipes = lists.get(f"{self.key}.{RECIPES}")
        self.recipes = {} if packed_recipes is None else unpacked(packed_recipes)
        self.packed_recipes = packed_recipes
        self.whole_model, self.optim = self.job.current()
        own_recipes: dict[tuple, tuple] = {}
        self.model = in_parts({**self.whole_model}, ("model",), own_recipes)
        self.optim = in_parts(self.optim, ("optim",), own_recipes)
        self.look_at_model()
        self.look_at_optimizers()
        self.look_at_groups(lists)
        self.look_at_counters()
        self.look_at_shared()
        self.look_at_ranks()
        for name in sorted(self.skip - self.skipped):
            self.wrong.append(USELESS % name)

    def is_skipped(self, name: str) -> bool:
        for prefix in self.skip:
            if name == prefix or name.startswith(f"{prefix}."):
                self.skipped.add(prefix)
                return True
        return False

    def below(self, *path: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.path[: len(path)] == path]

    def want(self, entry: Entry, own: object) -> None:
        """Read ``entry``, into ``own`` if that is a tensor of its kind."""
        self.wanted.append(entry)
        if entry.stored is None:
            self.rooms[entry.name] = None
        elif is_like(own, entry.stored):
            self.rooms[entry.name] = own
        else:
            stored = entry.stored
            self.rooms[entry.name] = torch.empty(stored.size, dtype=stored.properties.dtype)

    def look_at_model(self) -> None:
        saved: dict[str, str] = {}
        for entry in self.below("model"):
            name = str(entry.path[1])
            if self.is_skipped(name):
                continue
            own = element(self.model, entry.path[1:])
            saved[name] = self.contents.get("model", {}).get(name, "no tensor")
            if entry.stored is not None and len(entry.path) == 2:
                saved[name] = spec_of(entry.stored.properties.dtype, entry.stored.size)
            elif name.endswith(EXTRA):  # of any size: its module takes it
                pass
            elif entry.stored is not None and own is not None and not is_like(own, entry.stored):
                stored = spec_of(entry.stored.properties.dtype, entry.stored.size)
                self.wrong.append(f"  {'.'.join(map(str, entry.path[1:]))}: saved {stored}")
            self.want(entry, own)
        for name, spec in self.contents.get("left_out", {}).items():
            if not self.is_skipped(name):
                saved[name] = spec
        frozen = self.job.differing_frozen(self.contents, self.is_skipped, self.process_group)
        self.wrong.extend(frozen)
        here: dict[str, str] = {}
        for name, leaf in self.whole_model.items():
            is_empty = isinstance(leaf, dict) and not leaf  # no checkpoint has it
            if not self.is_skipped(name) and not is_empty:
                here[name] = described(leaf)
        self.wrong.extend(differences(saved, here))

    def look_at_optimizers(self) -> None:
        parameters = self.job.parameters_by_name()
        noted = self.contents["optim"]
        saved = {name: "" for name in noted if not self.is_skipped(name)}
        here = {name: "" for name in parameters if not self.is_skipped(name)}
        for line in differences(saved, here):
            self.wrong.append(f"{line}'s optimizers")
        for entry in self.below("optim", "state"):
            name = str(entry.path[2])
            if name in saved and name in here and str(entry.path[3]) in noted[name]:
                own = element(self.optim["state"], entry.path[2:])
                if entry.stored is not None and not is_like(own, entry.stored):
                    own = self.room_of_moment(entry, parameters[name])
                self.want(entry, own)

    def room_of_moment(self, entry: Entry, parameter: nn.Parameter) -> torch.Tensor | None:
        recipe = self.recipes.get(entry.path[:-1])
        is_step = entry.path[3] == "step"
        if recipe is None or not entry.stored.size:
            return room(entry.stored, parameter, is_step)
        recipe = Recipe(*recipe)
        if tuple(shard_of(parameter).shape) != recipe.shape:
            name = ".".join(map(str, entry.path))
            shards = f"shards of {recipe.shape} at the save"
            self.wrong.append(f"  {name}: {shards}: use as many ranks")
            return None
        if not recipe.is_dtensor or entry.stored.size == parameter.shape:
            return room(entry.stored, parameter, is_step)
        return room_of_part(entry.stored, parameter)

    def look_at_groups(self, lists: dict[str, object]) -> None:
        """Compare the optimizers' groups with those that were saved."""
        saved_names: dict[int, set[str]] = {}  # of the parameters, by the number of the group
        saved_settings: dict[int, set[str]] = {}  # their names
        for entry in self.below("optim", "param_groups"):
            self.want(entry, element(self.optim, entry.path[1:]))
            if len(entry.path) < 4:
                continue  # the list is empty
            number = int(entry.path[2])
            setting = str(entry.path[3])
            saved_settings.setdefault(number, set()).add(setting)
            if entry.path[-1] == "params":
                saved_names[number] = self.not_skipped(lists[entry.name])
        optimizers = []  # of each group
        for optimizer in self.job.optimizers:
            optimizers.extend([optimizer] * len(optimizer.param_groups))
        for optimizer, group in zip(optimizers, self.optim["param_groups"], strict=True):
            names = self.not_skipped(group["params"])
            if not names:
                continue
            numbers = [number for number in saved_names if saved_names[number] == names]
            if not numbers:
                self.wrong.append(f"  the group of {min(names)}: {OTHER_GROUPS}")
                continue
            lacking = lacking_settings(optimizer, group, saved_settings[numbers[0]])
            if lacking:
                kind = type(optimizer).__name__
                self.wrong.append("  " + OTHER_KIND % (kind, ", ".join(lacking)))

    def not_skipped(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if not self.is_skipped(name)}

    def look_at_counters(self) -> None:
        for name in self.job.COUNTERS:
            entries = self.below(name)
            if not entries and not self.is_old:
                self.wrong.append(f"  {name}: only in the job")
            for entry in entries:
                self.want(entry, None)

    def look_at_shared(self) -> None:
        shared = self.job.shared if isinstance(self.job, TrainingState) else {}
        self.shared = {name: item.state_dict() for name, item in shared.items()}
        if self.is_old:  # it does not tell
            survey(self.shared, [], self.contents["int_keys"], [])
        empty = {path[0] for path in self.contents["empty"]}
        for name in shared:
            if self.is_skipped(name):
                continue
            entries = self.below(name)
            if not entries and name not in empty:
                self.wrong.append(f"  {name}: only in the job")
            for entry in entries:
                self.want(entry, element(self.shared, entry.path))
        known = {"model", "optim", "has_state", PER_RANK, RECIPES, *self.job.COUNTERS, *shared}
        for name in sorted({str(entry.path[0]) for entry in self.entries} - known):
            is_old_random = name.startswith(OLD_RANDOM) and isinstance(self.job, TrainingState)
            if not is_old_random and not self.is_skipped(name):
                self.wrong.append(f"  {name}: only in the checkpoint")

    def look_at_ranks(self) -> None:
        """Want this rank's items, or those of all ranks where another number of them has saved."""
        saved = {str(entry.path[2]) for entry in self.below(PER_RANK)}
        of_this_rank = {str(entry.path[2]) for entry in self.below(PER_RANK, str(own_rank()))}
        items = self.job.per_rank if isinstance(self.job, TrainingState) else {}
        ranks = self.contents.get("ranks", world_size())
        for name, item in items.items():
            if self.is_skipped(name):
                continue
            may_lack = self.is_old and name == RandomNumbers.NAME
            there = of_this_rank if ranks == world_size() else saved
            if name not in there and not may_lack:
                self.wrong.append(f"  {name}, of each rank: only in the job")
            if ranks != world_size() and not hasattr(item, "load_state_dicts"):
                self.wrong.append(OTHER_RANKS % (name, ranks, world_size()))
        for name in sorted(saved - items.keys()):
            if not self.is_skipped(name) and items:
                self.wrong.append(f"  {name}, of each rank: only in the checkpoint")
        for entry in self.below(PER_RANK):
            if items and (ranks != world_size() or entry.path[1] == str(own_rank())):
                self.want(entry, None)
        if self.is_old:
            self.old_ranks = len({e.path[0] for e in self.entries if is_old_random(e)})
            for entry in self.below(f"{OLD_RANDOM}{own_rank()}"):
                self.want(entry, None)

    def finish(self, found: dict[str, object]) -> None:
        """Give the job what DCP has read."""
        tree: dict = {"model": {}, "optim": {"state": {}, "param_groups": []}}
        for entry in self.wanted:
            put(tree, entry.path, found[entry.name])
        for path in self.contents["empty"]:
            is_wanted = element(tree, path[:-1]) is not None
            if path[0] in self.shared:
                is_wanted = not self.is_skipped(path[0])
            if is_wanted:
                put(tree, tuple(path), {})
        if self.packed_recipes is not None:
            tree[RECIPES] = self.packed_recipes
        tree = with_numbers(tree, (), {tuple(path) for path in self.contents["int_keys"]})
        for name, own in self.shared.items():
            if name in tree:
                tree[name] = in_dicts_like(own, tree[name])
        for name, leaf in self.whole_model.items():
            tree["model"].setdefault(name, leaf)
        for name, moments in self.optim["state"].items():
            if self.is_skipped(name):
                tree["optim"]["state"][name] = moments
        if isinstance(self.job, TrainingState):
            self.take_random(tree)
        self.job.take(tree, self.contents, self.is_skipped)

    def take_random(self, tree: dict) -> None:
        """Of checkpoints of earlier versions, where they have any."""
        if not self.is_old or not self.old_ranks:
            return
        numbers = self.job.per_rank[RandomNumbers.NAME]
        own = tree.pop(f"{OLD_RANDOM}{own_rank()}", None)
        if self.old_ranks == world_size():
            numbers.load_state_dict(own)
        else:
            self.job.step = tree.get("step", 0)
            numbers.load_state_dicts([{}] * self.old_ranks)


def is_old_random(entry: Entry) -> bool:
    return str(entry.path[0]).startswith(OLD_RANDOM)


def is_like(own: object, stored: TensorStorageMetadata) -> bool:
    return (
        torch.is_tensor(own)
        and own.shape == stored.size
        and own.dtype == stored.properties.dtype
        and not own.is_meta
    )


def room(stored: TensorStorageMetadata, parameter: nn.Parameter, is_step: bool) -> torch.Tensor:
    """A tensor for a leaf of the state of ``parameter``, sharded as that is if it has its shape."""
    dtype = stored.properties.dtype
    if not isinstance(parameter, DTensor):
        device = "cpu" if is_step else parameter.device
        return torch.empty(stored.size, dtype=dtype, device=device)
    local = parameter._local_tensor
    if stored.size != parameter.shape:
        return torch.empty(stored.size, dtype=dtype, device="cpu" if is_step else local.device)
    shard = torch.empty(local.shape, dtype=dtype, device=local.device)
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    mesh = parameter.device_mesh
    return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, **layout)


def room_of_part(stored: TensorStorageMetadata, parameter: DTensor) -> torch.Tensor:
    """A tensor for one of those that a state of ``parameter`` is made of, of another size."""
    ranks = 1
    for dim, placement in enumerate(parameter.placements):
        if placement == Shard(0):
            ranks *= parameter.device_mesh.size(dim)
    shape = (stored.size[0] // ranks, *stored.size[1:])
    device = parameter._local_tensor.device
    part = torch.empty(shape, dtype=stored.properties.dtype, device=device)
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)


def element(tree: object, path: Iterable[str | int]) -> object:
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


def with_numbers(tree: object, path: tuple, numbers: set[tuple]) -> object:
    """``tree`` with the keys at the paths ``numbers`` as numbers."""
    if isinstance(tree, dict):
        found = {}
        for key, value in tree.items():
            here = (*path, key)
            inner = with_numbers(value, here, numbers)
            found[int(key) if here in numbers else key] = inner
        return found
    if isinstance(tree, list) and numbers:
        return [with_numbers(value, (*path, n), numbers) for n, value in enumerate(tree)]
    return tree


def in_dicts_like(own: object, tree: object) -> object:
    """``tree`` with its dicts of the classes that they have in ``own``."""
    if not isinstance(tree, dict) or not isinstance(own, dict):
        return tree
    found = {key: in_dicts_like(own.get(key), value) for key, value in tree.items()}
    if type(own) is dict:
        return found
    like_own = copy(own)
    like_own.clear()
    like_own.update(found)
    return like_own
