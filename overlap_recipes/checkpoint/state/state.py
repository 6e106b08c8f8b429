# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/state.py
"""``TrainingState``: all that a job needs to go on as if nothing had happened."""

import logging
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ...ranks import own_rank, world_size
from .alike import PER_RANK, RECIPES
from .contents import Contents, Survey, described, differences, refuse_one_name, why_not_saved
from .differing import differing_frozen, nothing, otherwise_here, warn_of_frozen
from .frozen import LeftOut
from .items import as_stateful, kind_of, refuse_taken
from .names import like
from .optimizers import in_one_list, kind_of_steps, saved_groups, wrong_groups
from .random_numbers import RandomNumbers
from .trained import States, Trained
from .trees import (
    has_parts,
    in_parts,
    is_staged,
    joined,
    pack_flattened,
    packed,
    unpack_flattened,
    unpacked,
    walk,
)

LOG = logging.getLogger(__name__)
TAKEN = {"model", "optim", "has_state", PER_RANK, RECIPES}  # keys of a state
NOT_LOADED = (
    "no 'has_state': this is no checkpoint of a TrainingState. dcp.load it into what "
    "get_state_dict(model, optimizer) gives, and call set_state_dict (a state in memory: load a "
    "deepcopy of it)"
)


class _Unfilled(str):
    """The text under ``has_state`` that no load has replaced; copied or pickled, it is plain."""

    def __reduce__(self) -> tuple:
        return str, (str(self),)


class TrainingState(Stateful):
    """The state of a job: model, optimizers, scheduler, step, random numbers, position in the data.

    ``step`` is saved and loaded, and set by the caller or by ``CheckpointManager``. The random
    numbers of each rank are always in it: of Python, NumPy (if it was imported), torch, and this
    rank's accelerator.

    Args:
        model: the model.
        optimizers: one, several, a list of them, or none.
        per_rank: what is at another place on each rank, by name: ``{"data": loader}``. Each rank
            saves its own and loads its own. A pass of a loader that goes on after a load has the
            order of its samples, and draws none of the job's random numbers; those of its workers
            begin again, from the same seeds. As long as this object lives, such a loader is of a
            subclass of its class, which tells when a pass begins; copies of it, and what is
            pickled, are of the class itself. An ``epoch`` and generators in its samplers and its
            stream come back; what they count or draw otherwise needs a ``state_dict`` of theirs. A
            batch counts as trained when the loop takes it: what a look-ahead or a thread has taken
            is lost. The first pass after a load is what was left of one: count steps, not batches
            of a pass. On another number of ranks, an object with a method ``load_state_dicts`` gets
            the list of what all ranks have saved; for any other the load raises.
        trainable_only: leave out parameters without ``requires_grad``, as of LoRA's base; never
            buffers, nor what an optimizer has state for, nor what a checkpoint of this run has had
            before it was frozen. The checkpoint has names, shapes and digests of what is left out,
            and a load raises if the base that is here is another one: load the base first. To make
            the digests, the first save reads all that is left out once, and waits for all ranks. A
            save fails if what is left out has changed since. Writes that PyTorch does not count,
            through ``.data`` or in ``torch._foreach_*`` over DTensors, are lost without a word: so
            is an average in the model that is frozen and written that way, and what peft's
            ``merge_adapter`` and ``unmerge_adapter`` round. Keep an average outside the model.
        shared: what is equal on all ranks, by name: ``scheduler=scheduler``, or a list of them. A
            save fails if it is not, as it does where parameters or the optimizers' states differ:
            of tensors, each save compares 512 bytes or a few more, the next one others, so that a
            difference in a small part of a large one is seen late or never. Buffers, and tensors
            here of up to 1 MiB, are those of rank 0: a warning names once what differs, at the
            first save among DTensors that several ranks hold, too.

    Objects in ``per_rank`` and ``shared`` have ``state_dict`` and ``load_state_dict``, or are
    generators of torch, Python or NumPy, or are dicts of values, which a load changes in place:
    ``progress={"epoch": 0, "best": 0.0}``. PyTorch's own ``dcp.load`` loads on as many ranks as
    have saved; on more it misses the keys of ``per_rank``.

    Raises:
        TypeError: an argument is not what it stands for; an optimizer keeps its state in another
            one or besides PyTorch's, or plain tensors of a shard, or trains a ``FlatParameter``.
        ValueError: a name is taken; two optimizers share a parameter; a checkpoint does not fit.
    """

    COUNTERS = ("step",)  # attributes that are saved and loaded

    def __init__(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
        per_rank: dict[str, object] | None = None,
        trainable_only: bool = False,
        **shared: object,
    ) -> None:
        refuse_taken(shared, TAKEN | {*self.COUNTERS})
        refuse_taken(per_rank or {}, {RandomNumbers.NAME})
        self.model = model
        self.optimizers = in_one_list(optimizers)
        self.step = 0
        self.trained = Trained(model, self.optimizers)
        self.left_out = LeftOut() if trainable_only else None
        self.shared = {name: as_stateful(name, item) for name, item in shared.items()}
        self.per_rank = {RandomNumbers.NAME: RandomNumbers(self)}
        for name, item in (per_rank or {}).items():
            self.per_rank[name] = as_stateful(name, item)

    def has_flat_parameters(self) -> bool:
        return self.trained.has_flat_parameters()

    # -- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """What a checkpoint holds, and what ``dcp.load`` fills."""
        return self._state(keep_vars=False)

    def state_in_place(self) -> dict:
        """The same, with the parameters themselves: DTensors take long to be detached."""
        return self._state(keep_vars=True)

    def _state(self, keep_vars: bool) -> dict:
        states = self.trained.states(keep_vars)
        left_out = self._leave_out(states)
        model = states.model
        if left_out:
            kept = {name: leaf for name, leaf in model.items() if name not in left_out}
            model = like(kept, states.model)
        state = {"model": model, "optim": states.optim}
        for name, item in self.shared.items():
            state[name] = item.state_dict()
            refuse_one_name(state[name], name)
        state[PER_RANK] = {str(own_rank()): self._of_this_rank()}
        for name in self.COUNTERS:
            state[name] = getattr(self, name)
        contents = self._contents(state, states, left_out)
        state["has_state"] = _Unfilled(contents.as_text())  # equal on all ranks
        _take_apart(state)
        return state

    def _leave_out(self, states: States) -> set[str]:
        """The names of the frozen weights that this checkpoint leaves out.

        Their digests, which ranks make together, are in ``self.left_out`` from here on, and what a
        checkpoint has had once stays in all that follow.
        """
        if self.left_out is None:
            return set()
        parameters = self.trained.parameters_of_model()
        in_state = {name: p for name, p in parameters.items() if name in states.model}
        return self.left_out.choose(in_state, states.real)

    def _of_this_rank(self) -> dict[str, bytes]:
        states = {}
        for name, item in self._random_last():
            states[name] = packed(item.state_dict())
        return states

    def _random_last(self) -> list[tuple[str, Stateful]]:
        """What each rank has for itself; others may draw random numbers as they save or load."""
        others = []
        numbers = []
        for name, item in self.per_rank.items():
            if name == RandomNumbers.NAME:
                numbers.append((name, item))
            else:
                others.append((name, item))
        return others + numbers

    def _contents(self, state: dict, states: States, left_out: set[str]) -> Contents:
        """What a load compares, and what DCP's names do not tell."""
        survey = Survey()
        for key in state.keys() - {"model", PER_RANK}:
            survey.look(state[key], [key])
        of_model = {}
        of_left_out = {}
        for name, leaf in states.model.items():
            if name in left_out:
                of_left_out[name] = described(leaf)
            else:
                why = why_not_saved(leaf)
                if why:
                    raise ValueError(f"{name} {why}")
                of_model[name] = described(leaf)
        return Contents(
            optim=states.real,
            ranks=world_size(),
            left_out=of_left_out,
            model=of_model,
            digests={} if self.left_out is None else self.left_out.digests,
            frozen=states.frozen,
            buffers=states.buffers,
            ties=states.ties,
            kinds=self.kinds(),
            int_keys=sorted(survey.int_keys, key=repr),
            empty=sorted(survey.empty, key=repr),
        )

    def kinds(self) -> dict[str, object]:
        """As ``Contents.kinds``."""
        kinds: dict[str, object] = {}
        for name, item in (self.shared | self.per_rank).items():
            kinds[name] = kind_of(item)
        of_groups = []
        for optimizer in self.optimizers:
            of_groups.extend([kind_of_steps(optimizer)] * len(optimizer.param_groups))
        kinds["optim"] = of_groups
        return kinds

    # -- loading ----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict) -> None:
        """Take what ``dcp.load`` has filled; ``overlap_recipes.checkpoint.load`` takes more."""
        text = state_dict.get("has_state")
        if text is None or isinstance(text, _Unfilled):
            raise ValueError(NOT_LOADED)
        contents = Contents.of_text(text)
        own = self.trained.current()
        optim = self._fitting(state_dict, contents, own)
        self.take({**state_dict, "optim": optim}, contents, own)

    def _fitting(self, state: dict, contents: Contents, own: States) -> dict:
        """Of the optimizers' ``state`` what the checkpoint has; raises if it does not fit."""
        if contents.model:
            here = {name: described(leaf) for name, leaf in own.model.items()}
            wrong = differences(contents.model | contents.left_out, here)
            wrong += otherwise_here(contents, own, self.kinds())
            wrong += differing_frozen(self.trained, contents)
            if wrong:
                raise ValueError("the checkpoint does not fit this model:\n" + "\n".join(wrong))
        there = state["optim"]["state"]
        room = {}
        for group in own.optim["param_groups"]:
            for name in group["params"]:
                room[name] = {str(key) for key in there.get(name, ())}
        lost = []
        for name, keys in contents.optim.items():
            if name not in room or not room[name].issuperset(keys):
                lost.append(name)
        if lost:
            raise ValueError(
                f"no room here for the checkpoint's state of {lost}: frozen, left out, or added "
                "later? overlap_recipes.checkpoint.load makes room"
            )
        unknown = sorted(room.keys() - contents.optim.keys())
        if unknown:
            raise ValueError(
                f"the checkpoint knows no {unknown}: add what is new after the load; all ranks "
                "need the same names"
            )
        saved = saved_groups(state["optim"]["param_groups"], contents.kinds.get("optim", []))
        wrong = wrong_groups(self.optimizers, own.optim["param_groups"], saved, nothing)
        if wrong:
            raise ValueError("the checkpoint does not fit the optimizers:\n" + "\n".join(wrong))
        kept = {}
        for name, keys in contents.optim.items():
            if keys:
                kept[name] = {k: v for k, v in there[name].items() if str(k) in keys}
        return {"state": kept, "param_groups": state["optim"]["param_groups"]}

    def take(
        self,
        state: dict,
        contents: Contents,
        own: States,
        is_skipped: Callable[[str], bool] = nothing,
    ) -> None:
        """Load a state that has been compared with this job.

        Args:
            contents: what its ``has_state`` says.
            own: what the job has; what ``state`` has not of the model stays as it is.
            is_skipped: whether what has this name stays as it is; its own is in ``state``.
        """
        warn_of_frozen(self.trained, contents, own)
        flattened = unpack_flattened(state.get(RECIPES))
        if flattened:
            self.trained.make_parts(state["model"], flattened)
            state = {key: joined(value, (key,), flattened) for key, value in state.items()}
        self.trained.load_optimizers(state["optim"], is_skipped)
        self.trained.load_model(like({**own.model, **state["model"]}, own.model))
        for name in self.COUNTERS:
            if name in state:
                setattr(self, name, state[name])
        if self.left_out is not None:
            self.left_out.in_checkpoints.update(contents.model)
        for name, item in self.shared.items():
            if not is_skipped(name):
                item.load_state_dict(state[name])
        of_ranks = state.get(PER_RANK, {})
        for name, item in self._random_last():
            if of_ranks and not is_skipped(name):
                _take_of_ranks(name, item, of_ranks, contents.ranks)


def _take_apart(state: dict) -> None:
    """Put the tensors of which others are made in their place, and how to join them."""
    if not has_parts(state):
        return
    flattened = {}
    for key in state.keys() - {PER_RANK}:
        state[key] = in_parts(state[key], (key,), flattened)
    if flattened:
        state[RECIPES] = pack_flattened(flattened)


def _take_of_ranks(name: str, item: Stateful, of_ranks: dict[str, dict], ranks: int) -> None:
    """Give ``item`` its own state, or those of all ``ranks`` if there are others now."""
    if ranks == world_size():
        item.load_state_dict(unpacked(of_ranks[str(own_rank())][name]))
    elif not hasattr(item, "load_state_dicts"):
        raise ValueError(
            f"{name} of {ranks} ranks for {world_size()}: it needs a method load_state_dicts, "
            "which gets the states of all ranks"
        )
    elif len(of_ranks) == ranks:
        item.load_state_dicts([unpacked(of_ranks[str(rank)][name]) for rank in range(ranks)])
    else:
        raise ValueError(
            f"saved on {ranks} ranks, loaded on {world_size()}: use overlap_recipes.checkpoint.load"
        )


def read(tree: object, tensors: list[torch.Tensor]) -> object:
    """Copy ``tree`` as it is now, except what will be staged: add that to ``tensors``."""

    def read_leaf(leaf: object) -> object:
        if torch.is_tensor(leaf) and not is_staged(leaf):
            leaf = leaf.detach()  # a subclass of Parameter becomes a tensor
        if is_staged(leaf):
            tensors.append(leaf)
            return leaf
        if isinstance(leaf, DTensor):
            raise TypeError(f"save the plain tensor in a DTensor of {type(leaf._local_tensor)}")
        if torch.is_tensor(leaf):
            return leaf.clone().to("cpu")
        return deepcopy(leaf)

    if is_staged(tree):
        tensors.append(tree)
        return tree
    if isinstance(tree, TrainingState):
        tree = tree.state_in_place()
    elif hasattr(tree, "state_dict"):
        tree = tree.state_dict()
    if isinstance(tree, dict):
        return {key: read(value, tensors) for key, value in tree.items()}
    return walk(tree, read_leaf)
