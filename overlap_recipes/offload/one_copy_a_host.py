# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/one_copy_a_host.py
"""One copy of weights and Adam's state a host, shared by its ranks."""

import mmap
import os
import time
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from ..ranks import on_all_ranks
from . import host_adam as adam
from . import streamed_model as streaming
from .host_layers import HostBuffer
from .streamable import refuse_unfit

FAILED = -1  # in place of the number of updates
_POLL_S = 1e-4  # seconds between two looks at what other ranks have done


class Host:
    """The ranks of this host. Every rank of the job must make one; its methods are collectives."""

    def __init__(self) -> None:
        if dist.get_world_size() > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
            raise ValueError("set LOCAL_WORLD_SIZE to the number of ranks on this host")
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.group, _ = dist.new_subgroups(size, backend="gloo")
        self.everyone = dist.new_group(backend="gloo")
        self.rank, self.ranks = dist.get_rank(self.group), size

    def barrier(self) -> None:
        dist.barrier(self.group)

    def memory(self, nbytes: int) -> mmap.mmap:
        """The same memory on all ranks of the host."""
        file = os.memfd_create("one_copy_a_host") if self.rank == 0 else -1
        where = [f"/proc/{os.getpid()}/fd/{file}"]
        dist.broadcast_object_list(where, group=self.group, group_src=0)
        file = file if self.rank == 0 else os.open(where[0], os.O_RDWR)
        os.ftruncate(file, nbytes)
        memory = mmap.mmap(file, nbytes)
        self.barrier()  # the first rank keeps the file open until here
        os.close(file)
        return memory


class SharedModel(streaming.StreamedModel):
    """A streamed model of which a host holds one copy.

    Args:
        model, layers, device, settings: as for ``StreamedModel``; weights become those of rank 0.
        host: its ranks. ``model.load_state_dict`` must be called by all of them, or by none.
    """

    def __init__(self, model, layers: Iterable, device, host: Host, **settings) -> None:
        layers = list(layers)
        on_all_ranks(partial(refuse_unfit, model, layers), host.everyone)
        self.host = host
        self.group = host.everyone
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0, host.everyone if parameter.is_cpu else None)
        super().__init__(model, layers, device, **settings)
        try:
            self.share_weights(device)
        except BaseException:
            self.give_back()
            raise
        self.hooks += [
            model.register_load_state_dict_pre_hook(lambda *_: self.wait_for_all()),
            model.register_load_state_dict_post_hook(lambda *_: host.barrier()),
        ]

    def share_weights(self, device: torch.device) -> None:
        """Let the layers' weights be in memory of all ranks of the host."""
        for layer in self.layers:
            for number, own in enumerate(layer.weights):
                shared = HostBuffer(own.views, own.flat.dtype, device, self.host.memory)
                shared.flat.copy_(own.flat)
                named = dict(layer.module.named_parameters())
                for name, view in shared.views.items():
                    named[name].data = view
                layer.weights[number] = shared
                own.close()
            self.host.barrier()  # every rank has filled them, all with the same values

    def updates(self, group_of: dict, threads: int | None = None) -> "SharedUpdates":
        """What updates its layers, for ``HostAdamW``."""
        return SharedUpdates(self, group_of, threads)

    def wait_for_all(self) -> None:
        """Wait until no rank of the host reads or writes shared memory."""
        self.wait()
        self.host.barrier()


class SharedUpdates(adam.HostUpdates):
    """Updates this rank's blocks of each layer, in memory of all ranks of the host."""

    def __init__(self, streamed: SharedModel, group_of: dict, threads: int | None = None) -> None:
        self.host = streamed.host
        layers = len(streamed.layers)
        super().__init__(streamed, group_of, threads, self.host.memory)
        memory = self.host.memory(8 * max(1, layers) * self.host.ranks)
        self.host.barrier()  # every rank has filled masters and moments, all with the same values
        self.blocks = [blocks[self.host.rank :: self.host.ranks] for blocks in self.blocks]
        self.done = torch.frombuffer(memory, dtype=torch.int64).view(-1, self.host.ranks)
        self.announced = [0] * layers

    def ranks_of_copy(self, streamed) -> int:
        return streamed.host.ranks

    def announce(self, layers: Iterable[int], settings: list[dict]) -> dict:
        announced = super().announce(layers, settings)
        for layer, update in announced.items():
            self.announced[layer] += 1
            update.number = self.announced[layer]
        return announced

    def end(self, layer: int, update, error: BaseException | None = None) -> None:
        if not update.ended.done():
            self.done[layer, self.host.rank] = FAILED if error else update.number
        super().end(layer, update, error)

    # The training thread

    def await_others(self, layer: int) -> None:
        """Wait until every rank of the host has updated its part of a layer."""
        while (self.done[layer] < self.announced[layer]).any():
            if (self.done[layer] == FAILED).any():
                raise RuntimeError(f"a rank of this host could not update layer {layer}")
            time.sleep(_POLL_S)

    def may_load(self, layer: int) -> bool:
        return super().may_load(layer) and bool((self.done[layer] >= self.announced[layer]).all())

    def before_load(self, layer: int) -> None:
        super().before_load(layer)
        self.await_others(layer)

    def before_host(self, raises: bool) -> None:
        super().before_host(raises)
        for layer in self.updates:
            self.await_others(layer)

    def begin_load(self) -> None:
        """All ranks of a host load a state, or none."""
        self.streamed.wait_for_all()

    def end_load(self) -> None:
        super().end_load()
        self.host.barrier()
