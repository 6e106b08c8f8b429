# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/staging_copies.py
"""
Copies that let a read through
==============================

Copy a checkpoint to host memory without delaying a training loop that reads scalars. Copies on a
stream of their own run beside training, until training reads a scalar in mid-step: a
``loss.item()`` there waits for **all** queued copies, and the save costs its whole copy time. This
recipe puts a few bytes in the other direction between the copies, so that a read waits for one piece
at most.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torch_checkpointing none
   :field: staging_cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

``overlapped_writer`` stages with this recipe. ``torch_checkpointing`` is a package that stages
in the background. ``none`` is the same measurement without a save: the noise.

**When not to bother:** nothing in your step reads from the device (no ``.item()``, no gradient
norm on the host, no branch on a tensor), or your state is a few megabytes. Then plain
copies are as good. For a whole checkpoint in one call, take :doc:`overlapped_stager`, which is
built on this.

.. code-block:: python

   import torch
   from staging_copies import CopyPlan, PinnedArena

   def tensors_now():
       moments = [x for state in optimizer.state.values() for x in state.values()]
       return [*model.parameters(), *model.buffers(), *moments]

   # Once, after the first optimizer step: before it, Adam has no state to copy
   plan = CopyPlan(tensors_now(), device, model.buffers())
   arena = PinnedArena(plan.nbytes, device)          # page-locked while arena lives
   copies = plan.copies(arena)                       # launches: CUDA graphs, with gaps
   hosts = plan.hosts(arena)                         # the same tensors, in host memory
   streams = torch.get_device_module(device)         # torch.cuda
   stream = streams.Stream()

   # At each save, after an optimizer step; overlapped_stager queues on a thread of its own
   assert plan.fits(tensors_now())                   # if not, make all of the above anew
   plan.take_snapshots()                             # small tensors, and what forward changes
   stream.wait_stream(streams.current_stream())
   *_, has_been_read, copied = plan.queue(copies, streams, stream)
   ...                                               # forward, backward, loss.item()
   streams.current_stream().wait_event(has_been_read)
   optimizer.step()
   copied.synchronize()   # on a thread of yours, which writes hosts; it must end before the next save

Your project needs this file alone; the others are for the proof. ``hosts`` are in the order of ``tensors_now()``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why a small read waits for gigabytes, and how a few bytes prevent that
      * how a few launches queue hundreds of copies, and how to notice that they no longer fit
      * page-locked memory of exact size that forks do not touch

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks
      * page-locked host memory for one copy of each rank's shards
      * for a gain, a CUDA GPU; ``device`` is a ``torch.device``

.. verification-badge::

The idea
--------

A *read* is a scalar that training fetches and waits for; *copies* are those of the save. One copy
engine serves each direction between device and host. It stays with a stream as long as the next
copy of that stream is ready. A read is on another stream, so it has to wait until the first stream
has nothing ready. Stream priorities do not change this. TorchRec met
the same problem (`4303 <https://github.com/meta-pytorch/torchrec/pull/4303>`__, `4339
<https://github.com/meta-pytorch/torchrec/pull/4339>`__).

The recipe cuts the copies into pieces of at most ``PIECE`` bytes; short ones share a piece.
Before each piece, the same stream copies a few bytes **to** the device: the *gap*. That is the work
of the other engine. So when a piece ends, its stream has no next piece ready, and the engine turns
to the other streams: the read is served.

After a read, the device idles until the training thread launches more kernels. Queueing hundreds
of copies one by one delays that by milliseconds, even from another thread. So pieces and gaps are
captured once, in CUDA graphs of ``LAUNCH`` pieces; a *launch* replays one. The first pieces are
smaller, for a forward that begins with a read.

.. lanes:: Schematic. A read in mid-step, with nothing between the copies (above) and with gaps (below).

   compute:     0-4 forward; 4-16 waits ~; 16-24 forward, backward
   copies:      1-16 all pieces ~
   read:        16-17 item
   compute:     26-30 forward; 30-32.8 waits ~; 32.8-43.8 forward, backward
   copies:      27-29.2 piece ~; 29.6-31.8 piece ~; 32.8-35 piece ~; 35.4-37.6 piece ~
   to device:   29.2-29.6 gap; 31.8-32.2 gap; 35-35.4 gap
   read:        31.8-32.8 item
"""

# %%
# Imports
# -------
# This file needs torch and the standard library alone.

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from weakref import finalize

import torch
from torch.distributed.tensor import DTensor

PIECE = 64 << 20  # bytes of copies in a row: a read of the training waits for one piece at most
FIRST_PIECE = 16 << 20  # bytes, of tensors of the first launch: forward may begin with a read
LAUNCH = 32  # pieces in one CUDA graph, each after its gap; launched in under a millisecond
SMALL = 1 << 20  # bytes; smaller tensors travel together
ALIGNMENT = 64  # bytes; where a tensor or a pack may start


# %%
# Page-locked memory of exact size
# --------------------------------
# A copy to pageable memory stops the host, so the memory must be page-locked. ``pin_memory=True``
# rounds each block up to a power of two (`pytorch#150517
# <https://github.com/pytorch/pytorch/issues/150517>`__). ``PinnedArena`` instead makes one
# anonymous mapping and registers it with the driver, so it has exactly the size that you ask for:
#
# * Huge pages make locking several times faster. Shared memory does not use them by default.
# * ``MADV_DONTFORK`` keeps the pages out of forked children, such as the workers of a
#   ``DataLoader``.
# * ``finalize`` unlocks the memory before it is freed.
#
# Each tensor comes from ``torch.frombuffer`` and so has a storage of its own. DCP's file writer
# clones tensors that share a larger storage.


class PinnedArena:
    """``nbytes`` > 0 of host memory, page-locked where ``device`` is a CUDA device.

    Raises:
        RuntimeError: the driver refuses to lock that much memory.
    """

    @torch.inference_mode(False)
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8).zero_()
        if device.type == "cuda":
            cuda, address = torch.cuda.cudart(), self.bytes.data_ptr()
            if error := int(cuda.cudaHostRegister(address, nbytes, 0)):
                with suppress(RuntimeError):
                    torch.ones((), device=device)  # takes the error in place of your next kernel
                raise RuntimeError(f"cannot lock {nbytes} bytes of host memory: CUDA error {error}")
            finalize(self, cuda.cudaHostUnregister, address)

    def tensor(self, offset: int | None, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with the shape and dtype of ``like``, ``offset`` bytes into it."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)


# %%
# A DTensor that stays on the CPU
# -------------------------------
# DCP needs DTensors to know which part of each parameter a rank holds. ``DTensor.from_local``
# moves its local tensor to the device of the mesh. With the model's mesh it would copy the staged
# bytes back to the GPU. So the recipe makes a mesh of type ``cpu`` over the process groups that
# exist already.


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    return getattr(tensor, "_local_tensor", tensor)


def in_host_memory(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """``host`` as a DTensor of the same shards if ``tensor`` is a DTensor, else ``host`` itself."""
    if not isinstance(tensor, DTensor):
        return host
    if tensor.device_mesh.get_coordinate() is None:  # this rank holds none of it; DCP leaves it out
        return tensor
    mesh, groups = tensor.device_mesh, tensor.device_mesh.get_all_groups()
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    mesh = mesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(host, mesh, tensor.placements, **shape)


# %%
# The plan
# --------
# ``CopyPlan`` prepares once what does not change: which bytes go where. It copies tied weights
# once. At the save, ``torch.cat`` gathers the small tensors: step counts, BatchNorm's statistics, a
# learning rate that the schedule changes in place. They travel to the host as one *pack*.
#
# Large tensors are copied beside training. Of some a *snapshot* is copied, made on their own device at
# the save:
#
# * tensors that forward changes,
# * tensors that are not contiguous, and views that conjugate or negate,
# * with ``snapshot_bytes``, as many others as fit. It is meant for steps shorter than the copy: see
#   the rows of short steps in :doc:`overlapped_writer` before you use it.
#
# Tensors on another device, such as step counts on the CPU, are copied to the arena at the save.
#
# Optimizers, loads, resized storages and ``p.data = ...`` may give a tensor other memory, or another
# shape over the same memory, or conjugate it. So call ``fits`` at every save. It is fast for objects
# that the plan knows, as those of :doc:`kept_state`: ``kinds`` and ``is_set_to`` suffice. Where one
# differs, ``layout`` decides.
#
# ``one_launch`` captures a CUDA graph. A replay does not repeat what ``work`` does on the host, such
# as copying a tensor on the CPU. With ``thread_local``, other threads may allocate meanwhile.
#
# Private by name: ``torch._foreach_copy_``, ``_local_tensor`` and ``_spec`` of DTensors, ``_cdata`` of
# storages.


def identity(x: torch.Tensor) -> tuple:
    """A key that is equal for two shards of the same memory, as tied weights have."""
    memory = x.untyped_storage()._cdata, x.data_ptr()
    return memory, x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def layout(x: torch.Tensor) -> tuple:
    return identity(shard_of(x)), getattr(x, "_spec", None)


def kinds(tensors: list[torch.Tensor], shards: list[torch.Tensor]) -> list:
    """What ``is_set_to`` does not compare: addresses (a resized storage moves), flags, dtypes."""
    asked = torch.Tensor.data_ptr, torch.Tensor.is_conj, torch.Tensor.is_neg
    values = [x for ask in asked for x in map(ask, shards)] + [x.dtype for x in shards]
    return [id(getattr(x, "_spec", x)) for x in tensors] + values


def take(snapshots: list[tuple], small: list[torch.Tensor], pack: torch.Tensor) -> None:
    """Copy shards to their snapshots, and the bytes of small tensors into their pack."""
    if snapshots:
        torch._foreach_copy_(*zip(*snapshots, strict=True))
    torch.cat(small, out=pack)


capture_stream = cache(torch.cuda.Stream)  # cached: one for each device


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copy_rows(rows: list[list[tuple]]) -> None:
    torch._foreach_copy_(*zip(*chain(*rows), strict=True), non_blocking=True)


def one_launch(work: Callable[[], object], like: torch.Tensor) -> Callable[[], object]:
    """Return what launches the kernels and copies of ``work`` on the current stream.

    On CUDA, ``work`` is captured: what it does on the host is done here alone.
    """
    if not like.is_cuda:
        return work
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(like.device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    graph.work = work  # has the tensors: they must live as long
    return graph.replay


class CopyPlan:
    """Which bytes of ``tensors`` go where, prepared once and right as long as ``fits`` says so.

    Args:
        tensors: dense tensors or DTensors, anywhere.
        device: the device whose copies run beside training. ``queue`` copies tensors elsewhere itself.
        changed_by_forward: tensors that forward changes in place: snapshots are copied.
        snapshot_bytes: device memory for snapshots; the update need not wait for their copies.

    ``offsets`` are bytes in an arena, by identity. ``snapshots`` are pairs (snapshot, shard).
    ``in_place`` are pairs (offset, bytes of a tensor itself), ``from_copies`` the same of snapshots
    and of the pack of small tensors. ``elsewhere`` are on another device. A copy to ``gap``, 64 bytes
    on the device, makes the stream wait for the other copy engine.
    """

    @torch.inference_mode(False)
    def __init__(self, tensors, device, changed_by_forward=(), snapshot_bytes: int = 0) -> None:
        self.tensors, self.shards = tensors, [shard_of(x).detach() for x in tensors]
        self.layouts, self.known = [*map(layout, tensors)], kinds(tensors, self.shards)
        self.gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self.nbytes, self.offsets, large, small = ALIGNMENT, {}, [], []
        self.snapshots, self.elsewhere, self.in_place = [], [], []

        changing = [shard_of(x) for x in changed_by_forward if x.layout == torch.strided]
        changing = {shard.untyped_storage().data_ptr() for shard in changing}
        unique = {identity(shard): shard for shard in self.shards if shard.numel()}
        for shard in sorted(unique.values(), key=torch.Tensor.element_size, reverse=True):
            if shard.device != self.gap.device:
                self.elsewhere.append(shard)
                self.offsets[identity(shard)] = self.place(shard.nbytes)
                continue
            source, is_large = shard, shard.nbytes >= SMALL
            within_budget = is_large and shard.nbytes <= snapshot_bytes
            is_changing = is_large and shard.untyped_storage().data_ptr() in changing
            is_view = not shard.is_contiguous() or shard.is_conj() or shard.is_neg()
            snapshot_bytes -= shard.nbytes if within_budget else 0
            if within_budget or is_changing or is_view:
                source = shard.new_empty(shard.shape)
                self.snapshots.append((source, shard))
            (large if is_large else small).append((shard, source))

        # the gap: cat needs an input
        in_pack = [self.gap, *(x.unsqueeze(-1).view(torch.uint8).view(-1) for _, x in small)]
        pack = torch.cat(in_pack)
        self.from_copies = [(offset := self.place(pack.nbytes), pack)]
        for (shard, _), before in zip(small, in_pack, strict=False):  # widest elements first
            self.offsets[identity(shard)] = offset = offset + before.nbytes
        for shard, source in sorted(large, key=lambda pair: pair[0].nbytes, reverse=True):
            self.offsets[identity(shard)] = offset = self.place(shard.nbytes)
            sources = self.in_place if source is shard else self.from_copies
            sources.append((offset, source.view(-1).view(torch.uint8)))
        take_all = partial(take, self.snapshots, in_pack, pack)
        take_all()  # loads kernels, which a capture must not
        self.take_snapshots = one_launch(take_all, self.gap)

    def place(self, nbytes: int) -> int:
        """Reserve room; return its offset."""
        offset, self.nbytes = self.nbytes, self.nbytes + nbytes + -nbytes % ALIGNMENT
        return offset

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors of the plan, or others of the same memory and layout."""
        shards = [*map(shard_of, tensors)]
        same = kinds(tensors, shards) == self.known
        same = same and all(map(torch.Tensor.is_set_to, shards, self.shards))
        return same or [*map(layout, tensors)] == self.layouts

    def hosts(self, arena: PinnedArena) -> list[torch.Tensor]:
        """The tensors of the plan as they will lie in ``arena``; tied ones share their memory."""
        hosts = {identity(x): arena.tensor(self.offsets.get(identity(x)), x) for x in self.shards}
        return list(map(in_host_memory, self.tensors, [hosts[identity(x)] for x in self.shards]))

    def copies(self, arena: PinnedArena) -> list[list[Callable[[], object]]]:
        """Lists of launches: of what lies elsewhere (no graph), of tensors in place, of copies of them.

        The third list reads snapshots and the pack: the state may change when the second has ended.
        """
        # (target, source)
        gap = self.gap, arena.bytes.narrow(0, 0, self.gap.nbytes)
        hosts = [arena.tensor(self.offsets[identity(x)], x) for x in self.elsewhere]
        copies = [[partial(copy_each, hosts, self.elsewhere)]]
        for sources in (self.in_place, self.from_copies):
            # rows: each a gap and the copies of one piece; parts: the rows of one launch
            rows, in_a_row = [[gap]], 0
            for offset, source in sources:
                most = PIECE if len(rows) > LAUNCH else FIRST_PIECE
                for piece in source.split(most):
                    in_a_row += piece.nbytes
                    if in_a_row > most:
                        rows, in_a_row = [*rows, [gap]], piece.nbytes
                    rows[-1].append((arena.bytes.narrow(0, offset, piece.nbytes), piece))
                    offset += piece.nbytes
            parts = [rows[start : start + LAUNCH] for start in range(0, len(rows), LAUNCH)]
            copies.append([one_launch(partial(copy_rows, part), self.gap) for part in parts])
        return copies

    def queue(self, copies: list[list], streams, stream) -> list:
        """Launch ``copies`` on ``stream``, after what it waits for; return an event after each list."""
        events = [streams.Event() for _ in copies]
        with streams.stream(stream):
            for launches, event in zip(copies, events, strict=True):
                for launch in launches:
                    launch()
                event.record(stream)
        return events


# %%
# Run it, and prove it
# --------------------
# The proof queues the copies, runs a forward and a backward beside them, and makes the update wait
# for the event after which all tensors have been read. It does so three times on every rank. Each
# time, every host tensor must hold the bits of the save, whatever the step has written since.


def main() -> None:
    import async_save as basic
    from app_state import read

    device, tensors = basic.start_rank(), []
    streams, app = torch.get_device_module(device), basic.build_app(device)
    basic.train_step(app, device)
    read({"app": app}, tensors)
    tensors.append(tensors[0])  # as if it were tied
    plan = CopyPlan(tensors, device, changed_by_forward=app.model.buffers())
    arena = PinnedArena(plan.nbytes, device)
    copies, hosts, stream = plan.copies(arena), plan.hosts(arena), streams.Stream()
    for _ in range(3):
        expected = [shard_of(tensor).detach().cpu().clone() for tensor in tensors]
        plan.take_snapshots()
        stream.wait_stream(streams.current_stream())
        *_, has_been_read, copied = plan.queue(copies, streams, stream)
        basic.forward_backward(app, device)
        streams.current_stream().wait_event(has_been_read)
        app.optimizer.step()
        copied.synchronize()
        assert all(map(torch.equal, map(shard_of, hosts), expected)), "a copy holds other bits"
    assert hosts[-1].data_ptr() == hosts[0].data_ptr(), "a tied tensor was copied twice"
    print(f"{len(tensors)} tensors, copied beside three steps: every bit as it was at the save")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# The figure at the top is of whole saves. The rows below are copies alone, in the same loop. A stock
# Llama reads one scalar in every forward when you call it without a cache. *Staging costs* is what
# the save adds to training (:doc:`/guide/measured`). *Staged after* is when the last copy has
# arrived; *Bound* the earliest possible.
#
# .. result-table:: staging_copies
#    :rows: none cure_at_once cure_gaps cure_tiny_kernel cure_paced cure_turns
#
# .. timeline:: staging_copies cure_at_once cure_gaps
#
# ``cure_at_once`` is the problem, ``cure_gaps`` this recipe. The other rows are other cures:
#
# * ``cure_turns`` alternates the pieces between two streams: each waits for an event after the piece
#   before it. The copies arrive as soon, but a thread runs Python for every piece.
# * ``cure_paced`` is a thread that queues a piece when the one before has ended. The copies take
#   far longer. Where they still fit into the step, as on two GPUs, that is no loss.
# * ``cure_tiny_kernel`` has a kernel between the pieces. The kernel waits for room on the device,
#   so the copies take nearly as long as the paced ones. Take it on a GPU with a single copy engine,
#   where gaps do nothing.
#
# Two costs are left. After a read, the device idles until ``queue`` returns. And copies and kernels
# share the device's memory: both get slower. The copies of ``cure_at_once`` arrive earlier because training
# stands still.
#
# What breaks if you remove a line
# --------------------------------
# .. recipe-controls::
#
# Memory
# ------
# Page-locked host memory: the bytes of this rank's shards, each large one rounded up to
# ``ALIGNMENT``. On the device: the small tensors once more, and all snapshots (``channels_last``
# weights, say).
#
# Known limits
# ------------
# * Sparse and quantized tensors raise.
# * ``queue`` copies tensors on another device itself: with Adam's state on the CPU, that takes long.
# * A plan waits for the device and empties the allocator's cache, as the capture of a CUDA graph does.
#   Make none while you capture a graph of your own.
# * Without CUDA, memory is pageable, and ``queue`` returns when all is copied.
