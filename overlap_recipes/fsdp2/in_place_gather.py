# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/in_place_gather.py
"""FSDP2's gathers by peer copies, straight to where the unit computes."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from . import peer_memory, same_gradients, shared_slots, unseen_outputs

# FSDP2 calls these methods of a unit's private ``FSDPParamGroup``: around its forward ``unshard``
# (queue a gather, maybe ahead of the unit's turn), ``wait_for_unshard`` and ``reshard``, around its
# backward the same and ``post_backward``, at the end ``finalize_backward``. The first two are
# replaced here.

AHEAD = 2  # units that forward gathers before they are needed


class Gathers(shared_slots.Slots):
    """The slots of all units of one model, and the stream of their gathers."""

    def __init__(self, groups: Sequence, slots: int) -> None:
        shards = groups[0].mesh_info.shard_process_group
        device = groups[0].device
        super().__init__(peer_memory.PeerMemory(shards, device), max(slots, AHEAD + 1))
        self.groups = groups
        self.streams = torch.get_device_module(device)
        self.stream = self.streams.Stream()
        self.gathers = 0  # so far
        self.forwards = 0  # so far, of the model, with the one that runs
        self.in_use = True  # not while stock FSDP2 is tried, or kept
        self.in_forward = False  # the model's forward runs
        self.with_graph = False  # and a backward may follow it
        self.begun = False  # ``begin_next_forward`` was called
        self.trusts = False  # this forward takes what that has gathered, and no backward comes
        self.order: list | None = []  # of the groups, in the first forward
        self.first: list = []  # of them, those that each forward begins with
        self.changes = Changes(groups, device)

    def begin_next_forward(self) -> None:
        """Queue the next forward's first gathers; call it when no weight changes before that."""
        if not self.in_use:
            return
        self.drop()
        self.begun = True
        for group in self.first:
            group.unshard()
        if self.first:
            for group in self.first[0].then:
                group.unshard()

    @torch.compiler.disable
    def begin_forward(self, *_) -> None:
        if not self.in_use:
            return
        self.changes.refuse()
        if not self.begun:
            self.drop()
        self.trusts = self.begun and not torch.is_grad_enabled()
        self.begun = False
        self.in_forward = True
        self.with_graph = torch.is_grad_enabled()
        self.forwards += 1  # what an earlier one has left is not kept
        for group in self.first:  # they are on their way while the host gets to the first unit
            group.unshard()

    @torch.compiler.disable
    def end_forward(self, *_) -> None:
        if not self.in_use:
            return
        self.in_forward = False
        self.with_graph = False
        self.drop()
        self.changes.send()
        if self.trusts or self.changes.noted.is_cpu:
            self.changes.refuse()
        if self.order:  # of the first forward
            self.gather_in_order(list(dict.fromkeys(self.order)))
            self.order = None

    def gather_in_order(self, groups: list) -> None:
        """Have each forward gather its units ahead of their turn, which comes in this order."""
        if groups[0].embeds:  # its kernels are queued before the gathers that come next
            self.first = groups[: AHEAD - 1]
            groups[0].then = groups[1 : 1 + AHEAD]
            shared_slots.set_lists(groups, AHEAD, first=0)
        else:
            self.first = groups[:AHEAD]
            groups[0].then = []
            shared_slots.set_lists(groups, AHEAD, first=1)

    def drop(self) -> None:
        for group in self.groups:
            group.drop()

    def gather(self, group) -> None:
        """Queue the gather of a unit's full weights after all that the current stream does."""
        backward = group._training_state.name == "PRE_BACKWARD"
        if backward and torch.is_grad_enabled() and group.reshard_after_backward:
            raise RuntimeError(
                "create_graph needs the weights of all units until the last backward of the step: "
                "call model.set_reshard_after_backward(False) before the forward, and after that "
                "backward reshard() of each FSDPModule among model.modules(). Until then "
                "model.parameters() are whole weights without gradients, and the next forward "
                "would compute with them"
            )
        if group.slot is None:
            if backward:
                raise RuntimeError("a forward came before gather_in_place: call it between steps")
            self.give(group)
        slot = group.slot
        current = self.streams.current_stream()
        is_kept = backward and self.has_gathered(group)
        if is_kept and not shared_slots.outdated(group):
            event = current.record_event()  # nothing has taken its place since the forward
        else:
            self.stream.wait_stream(current)  # which may still compute with what the slot has
            if slot.stream and slot.stream != current:  # an evaluation's, or a branch's
                self.stream.wait_stream(slot.stream)
            if hasattr(group.comm_ctx, "all_gather_stream"):
                self.stream.wait_stream(group.comm_ctx.all_gather_stream)
            with self.streams.stream(self.stream):
                self.fill(group)
                event = self.stream.record_event()
            self.gathers += 1
        slot.of_forward = 0
        if self.with_graph and not backward:
            slot.of_forward = self.forwards
        group._all_gather_result = SimpleNamespace(all_gather_event=event, all_gather_work=None)

    def has_gathered(self, group) -> bool:
        """Whether the latest forward has gathered a unit, and its weights are in the slot still."""
        slot = group.slot
        return slot.group is group and self.forwards > 0 and slot.of_forward == self.forwards


class Changes:
    """Units that have run with weights that are not those of their shards any more.

    A device notes them where a unit is used, the host reads that a forward later: nothing waits.
    """

    @torch.inference_mode(False)
    def __init__(self, groups: Sequence, device: torch.device) -> None:
        self.groups = groups
        self.noted = torch.zeros(len(groups), dtype=torch.bool, device=device)
        self.copy = torch.zeros(len(groups), dtype=torch.bool, pin_memory=device.type == "cuda")
        self.arrived = torch.get_device_module(device).Event()

    def of(self, group) -> torch.Tensor:
        """Whether it is one of them."""
        return self.noted[self.groups.index(group)]

    @torch.no_grad()
    def send(self) -> None:
        """Queue the copy to the host of what was noted."""
        self.copy.copy_(self.noted, non_blocking=True)
        self.arrived.record()

    def refuse(self) -> None:
        """Raise for what was sent last.

        Raises:
            RuntimeError: names the units.
        """
        self.arrived.synchronize()
        found = [g for g, changed in zip(self.groups, self.copy.tolist(), strict=True) if changed]
        if not found:
            return
        self.noted.zero_()
        self.copy.zero_()
        names = ", ".join(same_gradients.title(group) for group in found)
        raise RuntimeError(
            f"{names} ran with other weights than its shards have: these were changed after the "
            "gather, in a way that PyTorch does not count (.data, dcp.load, a collective), so what "
            "was computed since is wrong. Make such changes between steps and before "
            "begin_next_forward(), or have them counted, on all ranks: "
            "torch.autograd.graph.increment_version(parameters)"
        )


class InPlaceGather:
    """Methods of an FSDP2 group of parameters, in place of its own."""

    _all_gather_comm = peer_memory.settled("_all_gather_comm")
    slot: shared_slots.Slot | None = None
    in_graph = False  # a backward may come that has views of the slot
    refused = False  # a prefetch found the slot in use, or came for a unit that has none
    then: Sequence = ()  # groups to gather when its forward is queued
    full_versions: tuple = ()  # of its full weights, as autograd counts changes
    versions_in_use: tuple = ()  # the same, when its modules began to use them
    sample: shared_slots.Sample | None = None  # of its shards

    def unshard(self, async_op: bool = False) -> None:
        if not self.all.in_forward and torch._C._current_graph_task_id() == -1:
            self.drop()  # between steps: weights may have changed since
        backward = self._training_state.name == "PRE_BACKWARD"
        if backward and self.embeds:
            return  # its backward reads no weights
        if self._all_gather_result is not None or self.is_unsharded:
            return
        self.refused = self.slot.busy() if self.slot else backward
        if not self.refused:
            self.all.gather(self)

    def wait_for_unshard(self) -> None:
        if self.refused or (self._all_gather_result and shared_slots.outdated(self)):
            self.drop()
            if self.slot and self.slot.busy():
                self.all.make_room(self)
            self.all.gather(self)
        current = self.copied()
        if current is not None:
            self.slot.stream = current
            self._to_unsharded()
            shared_slots.allow_reading(self)
            self.all.note_changes(self, self.changed)
        if self._training_state.name == "FORWARD" and torch.is_grad_enabled():
            self.in_graph = True

    def _to_sharded(self) -> None:
        if self.is_unsharded:
            shared_slots.forbid_reading(self)
        super()._to_sharded()

    def _to_sharded_post_forward(self) -> None:
        if self.is_unsharded:
            shared_slots.forbid_reading(self)
        super()._to_sharded_post_forward()

    def pre_forward(self, module, args, kwargs):
        if self._training_state.name != "FORWARD":
            self.first_node = torch.autograd._get_sequence_nr()
        if self.all.in_forward and self.all.order is not None:
            self.all.order.append(self)
        if self.may_stay_full() and not _requires_grad((args, kwargs)):
            self.drop()
            self.all.give(self, exclusive=True)  # full until the end of backward
        return super().pre_forward(module, args, kwargs)

    def may_stay_full(self) -> bool:
        """Whether it is in a slot that others take, and a graph begins to use it."""
        if not torch.is_grad_enabled() or self.embeds or self.in_graph:
            return False
        has_own_slot = self.slot is not None and self.slot.exclusive
        return self.is_sharded and not has_own_slot

    def post_forward(self, *arguments):
        output = super().post_forward(*arguments)
        if not self.is_unsharded:
            shared_slots.refuse_returned(self, output)
        unseen_outputs.gather_before(self, output)
        if self.all.in_forward:
            for group in self.then:
                group.unshard()
        return output

    def finalize_backward(self) -> None:
        self.drop()
        self.in_graph = False
        if self.slot:
            self.slot.of_forward = 0
        super().finalize_backward()

    def drop(self) -> None:
        """Forget what was gathered and not used."""
        self.copied()
        self.refused = False

    def copied(self):
        """The current stream, which now waits for the gather under way; None if there was none."""
        result = self._all_gather_result
        self._all_gather_result = None
        if result is None:
            return None
        current = self.all.streams.current_stream()
        current.wait_event(result.all_gather_event)
        return current


def _requires_grad(inputs: object) -> bool:
    """Whether a gradient goes to an input: then FSDP2 hears when a unit's backward has ended."""
    return any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(inputs))


def gather_in_place(model: FSDPModule, slots: int = 4) -> Gathers | None:
    """Have every unit of ``model`` gather by peer copies, from its next forward on. Collective.

    Args:
        model: the module that the training loop calls.
        slots: that equal units take turns in; there are three at least. The more, the
            fewer gathers in backward.

    Returns:
        The slots; None if FSDP2 gathers all units as before. A warning says for which reason it
        gathers some or all.

    Raises:
        RuntimeError: nothing is sharded, this PyTorch's FSDP2 is another one, or it was called for
            one of the units before.
    """
    chosen = peer_memory.copying_groups(model)
    if not chosen:
        return None
    gathers = Gathers(chosen, slots)
    peer_memory.become(chosen, InPlaceGather)
    for group in chosen:
        group.all = gathers
        group.embeds = shared_slots.embeds(group)
        group.changed = gathers.changes.of(group)
        group.keepers = unseen_outputs.own_modules(group)
    shared_slots.counted().update(chosen)
    model.register_forward_pre_hook(gathers.begin_forward, prepend=True)
    model.register_forward_hook(gathers.end_forward, always_call=True)
    return gathers
