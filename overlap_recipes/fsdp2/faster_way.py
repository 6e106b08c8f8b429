# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/faster_way.py
"""Peer copies or stock FSDP2: the first steps of a job tell which is faster there."""

import logging
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .in_place_gather import Gathers, InPlaceGather
from .in_place_reduce import InPlaceReduce, PushedGradients
from .shared_slots import versions

LOG = logging.getLogger(__name__)

WARM = 5  # steps of each way that are not counted
TIMED = 10  # and those that are
_MARGIN = 0.99  # of a step by peer copies: stock FSDP2 is kept where it takes less

# Private by name: what FSDP2 keeps of a parameter's full weight, and its lists of prefetches.
_OF_PARAMETERS = ("_unsharded_param", "all_gather_outputs", "free_unsharded_param")
_OF_STATES = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
_OF_GROUPS = ("slot", "sample", "large", "small_to", "small_from")


class FasterWay:
    """Times steps by peer copies and then as many by stock FSDP2, and keeps the faster way.

    A step begins with the first forward that has a graph after the weights of all units have
    changed. Then no earlier forward waits for its backward, which would need the way of that
    forward: where two optimizers take turns, one may step while the other's graph waits.
    """

    def __init__(self, model: FSDPModule, gathers: Gathers, pushed: PushedGradients | None) -> None:
        self.gathers = gathers
        self.pushed = pushed
        self.kinds = [_stock(type(group)) for group in gathers.groups]  # of the other way
        # Objects, with attributes by name as the other way has them; None: it has not made one yet.
        self.aside: list[tuple[object, dict]] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                self.aside.append((state, {name: vars(state)[name] for name in _OF_STATES}))
        for group in gathers.groups:
            for p in group.fsdp_params:
                fresh = dict.fromkeys(_OF_PARAMETERS) | {"all_gather_outputs": []}
                self.aside.append((p, fresh))
        self.versions: list | None = None  # of each unit, when the present step began
        self.begins: list = []  # of the present way's steps
        self.seconds: list[float] = []  # of a step: by peer copies, then by FSDP2
        self.hook = model.register_forward_pre_hook(self.begin_forward, prepend=True)

    @torch.compiler.disable
    def begin_forward(self, *_) -> None:
        if not torch.is_grad_enabled():
            return
        groups = self.gathers.groups
        found = [versions(group) for group in groups]
        if self.is_of_same_step(found):
            return
        self.versions = found
        if any(group.is_unsharded for group in groups):
            return  # what FSDP2 holds for later cannot be exchanged
        self.begins.append(self.now())
        if len(self.begins) > WARM + TIMED:
            self.seconds.append(self.median_step())
            self.begins = []
            self.go_on()

    def is_of_same_step(self, found: list) -> bool:
        """Whether a unit that is trained has not changed since the step began; or none is."""
        if self.versions is None:
            return False
        has_changed = False
        for number, group in enumerate(self.gathers.groups):
            if not any(p.sharded_param.requires_grad for p in group.fsdp_params):
                continue
            if found[number] == self.versions[number]:
                return True
            has_changed = True
        return not has_changed

    def now(self) -> object:
        """The present moment of the device, which may lie ahead; on a CPU that of the host."""
        if self.gathers.changes.noted.is_cpu:
            return time.perf_counter()
        event = self.gathers.streams.Event(enable_timing=True)
        event.record()
        return event

    def median_step(self) -> float:
        """Seconds, from the moments of this way's steps; waits for the last one."""
        begins = self.begins[WARM:]
        took = []
        for number, begin in enumerate(begins[1:]):
            if isinstance(begin, float):
                took.append(begin - begins[number])
            else:
                begin.synchronize()
                took.append(begins[number].elapsed_time(begin) / 1e3)
        return statistics.median(took)

    def go_on(self) -> None:
        """Take the other way for as many steps; at last the faster one of both, for good."""
        if len(self.seconds) == 1:
            if all(self.of_all_ranks(self.has_room()).values()):
                self.exchange()
            else:
                LOG.info("peer copies: too little memory is free to compare them with stock FSDP2")
                self.end()
            return
        said = self.of_all_ranks(self.seconds)
        by_peers = max(seconds[0] for seconds in said.values())
        by_stock = max(seconds[1] for seconds in said.values())
        keeps_stock = by_stock < _MARGIN * by_peers
        if keeps_stock:
            self.let_go()
        else:
            self.exchange()
        self.end()
        if dist.get_rank() == min(said):
            LOG.log(
                logging.WARNING if keeps_stock else logging.INFO,
                "a step takes %.4f s by peer copies and %.4f s by stock FSDP2: %s from here on",
                by_peers,
                by_stock,
                "stock FSDP2" if keeps_stock else "peer copies",
            )

    def has_room(self) -> bool:
        """Whether FSDP2's buffers fit beside the slots."""
        device = self.gathers.changes.noted.device
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        return free > 2 * sum(slot.nbytes() for slot in self.gathers.slots)

    def of_all_ranks(self, mine: object) -> dict[int, object]:
        """By rank, what each that has a part of the model says. Collective.

        These are all ranks of the mesh: with tensor parallelism more than those that gather.
        """
        meshes = []
        for group in self.gathers.groups:
            for p in group.fsdp_params:
                meshes.append(p.sharded_param.device_mesh)
        mesh = max(meshes, key=lambda mesh: mesh.ndim)
        said = {dist.get_rank(): mine}
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            answers: list = [None] * group.size()
            dist.all_gather_object(answers, said, group=group)
            for answer in answers:
                said = said | answer
        return said

    def exchange(self) -> None:
        """Let the other way gather and reduce; between steps, while no unit is full."""
        if self.gathers.in_use:
            self.gathers.changes.refuse()
            self.gathers.drop()
            self.gathers.begun = False
        self.gathers.in_use = not self.gathers.in_use
        for number, group in enumerate(self.gathers.groups):
            other = self.kinds[number]
            self.kinds[number] = type(group)
            group.__class__ = other
        for owner, others in self.aside:
            for name, other in others.items():
                others[name] = vars(owner).pop(name, None)
                if other is not None:
                    setattr(owner, name, other)

    def let_go(self) -> None:
        """Free the memory that peers read: all of them have come here."""
        for group in self.gathers.groups:
            for name in _OF_GROUPS:
                vars(group).pop(name, None)
            for p in group.fsdp_params:
                vars(p).pop("own", None)
        self.gathers.slots.clear()
        self.gathers.last = None
        if self.pushed is not None:
            self.pushed.slots.clear()
            self.pushed.retired.clear()
            self.pushed.plans.clear()

    def end(self) -> None:
        self.hook.remove()
        self.aside.clear()


def _stock(kind: type) -> type:
    """FSDP2's class of a group that has methods of ours."""
    return next(k for k in kind.__mro__ if not issubclass(k, (InPlaceGather, InPlaceReduce)))
