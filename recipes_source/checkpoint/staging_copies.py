# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/staging_copies.py
"""
Copies that let a read through
==============================

Copy a checkpoint to host memory without delaying a training loop that reads scalars. Copies on a
stream of their own run beside training, until training reads a scalar in mid-step: a
``loss.item()`` there waits for **all** queued copies, and the save costs its whole copy time. This
recipe puts four bytes in the other direction between the copies, so that a read waits for one piece
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
   from staging_copies import CopyPlan, PinnedArena, read

   # Once, after the first optimizer step: before it, Adam has no state to copy
   tensors = []
   read({"model": model, "optimizer": optimizer}, tensors)          # lists the tensors
   plan = CopyPlan(tensors, device, model.buffers())
   arena = PinnedArena(plan.nbytes, device)          # page-locked
   copies = plan.copies(arena)                       # what goes where, with gaps
   hosts = plan.hosts(arena)                         # the same tensors, in host memory
   streams = torch.get_device_module(device)         # torch.cuda
   stream = streams.Stream()

   # At each save, after an optimizer step
   now = []
   read({"model": model, "optimizer": optimizer}, now)
   assert plan.fits(now)                             # if not, make all of the above anew
   plan.take_snapshots()                             # small tensors, and what forward changes
   stream.wait_stream(streams.current_stream())
   *_, has_been_read, copied = plan.queue(copies, streams, stream)
   ...                                               # forward, backward, loss.item()
   streams.current_stream().wait_event(has_been_read)
   optimizer.step()
   copied.synchronize()           # on a thread that writes: write hosts before the next save begins

Your project needs this file alone. The block only copies: ``hosts`` has no names.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why a small read waits for gigabytes, and how four bytes prevent that
      * page-locked memory of exact size that stays in place when the process forks
      * what to prepare once, and how to notice that the preparation no longer fits

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

The recipe cuts the copies into pieces of at most ``PIECE`` bytes; smaller copies share a piece.
Before each piece, the same stream copies four bytes **to** the device: the *gap*. That is the work
of the other engine. So when a piece ends, its stream has no next piece ready, and the engine turns
to the other streams: the read is served.

Pieces and gaps are in lists, made once. Torch queues a list in one call, without Python's
interpreter lock. That matters: right after a save the training thread launches the first kernels of
a forward, and the device has nothing else to do. A Python loop over the pieces would compete for
the lock. The event after the last piece exists when the call returns: no thread has to pace the
copies.

.. lanes:: Schematic. The read in the second step, with nothing between the copies (above) and with gaps (below).

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
from copy import deepcopy
from weakref import finalize

import torch
from torch.distributed.tensor import DTensor

PIECE = 64 << 20  # bytes of copies in a row: a read of the training waits for one piece at most
FIRST = LAST = 16  # pieces: the save queues the first, its write is prepared beside the last
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
# What is copied beside training
# ------------------------------
# ``read`` leaves dense tensors and DTensors to the plan below. It copies everything else (Python
# numbers, sparse tensors) at once. A dict with an attribute ``kept_tensors`` promises not to change,
# so ``read`` does not walk it again (:doc:`kept_state` makes such dicts).


def is_staged(leaf: object) -> bool:
    """Whether ``leaf`` is a dense tensor or a DTensor of one: a ``CopyPlan`` copies those."""
    x = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    is_dense = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided
    return is_dense and not x.is_quantized


def walk(tree: object, function: Callable[[object], object]) -> object:
    """A copy of nested dicts, lists and tuples, with ``function`` applied to all else but names."""
    if isinstance(tree, dict):
        return {key: walk(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [walk(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree if isinstance(tree, str) else function(tree)


def read(tree: object, tensors: list[torch.Tensor]) -> object:
    """Copy ``tree`` as it is now, except what will be staged: add that to ``tensors``."""

    def read_leaf(leaf: object) -> object:
        leaf = leaf.detach() if torch.is_tensor(leaf) and not is_staged(leaf) else leaf
        if is_staged(leaf):
            tensors.append(leaf)
            return leaf
        if isinstance(leaf, DTensor):
            raise TypeError(f"save the plain tensor in a DTensor of {type(leaf._local_tensor)}")
        return leaf.clone().to("cpu") if torch.is_tensor(leaf) else deepcopy(leaf)

    tree = tree.state_dict() if hasattr(tree, "state_dict") else tree
    if hasattr(tree, "kept_tensors"):  # see kept_state.py: a dict that does not change
        tensors += tree.kept_tensors
        return tree
    if isinstance(tree, dict):
        return {key: read(value, tensors) for key, value in tree.items()}
    return walk(tree, read_leaf)


# %%
# The plan
# --------
# ``CopyPlan`` prepares once what does not change: which bytes go where. It copies tied weights
# once. At the save, ``torch.cat`` gathers the small tensors: step counts, BatchNorm's statistics, a
# learning rate that the schedule changes in place. They travel to the host as one.
#
# Large tensors are read beside training. Some are copied at the save first, on their own device, as
# *snapshots*:
#
# * tensors that forward changes,
# * tensors that are not contiguous, and views that conjugate or negate,
# * tensors on another device (copied on the host),
# * with ``snapshot_bytes``, as many others as fit. It is meant for steps shorter than the copy: see
#   the rows of short steps in :doc:`overlapped_writer` before you use it.
#
# Optimizers, loads and ``p.data = ...`` may give a tensor other memory, or another shape over the
# same memory, or conjugate it. So every save compares all of these with what they were. For objects
# that the plan knows, as those of :doc:`kept_state`, ``is_set_to`` does most of it. Where it finds
# a difference, ``layout`` decides.
#
# :doc:`overlapped_stager` queues all but the ``FIRST`` pieces on a thread, which can wait
# milliseconds for the lock.
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
    """What ``is_set_to`` does not compare."""
    views = [*map(torch.Tensor.is_conj, shards), *map(torch.Tensor.is_neg, shards)]
    return [id(getattr(x, "_spec", x)) for x in tensors] + [x.dtype for x in shards] + views


class CopyPlan:
    """Which bytes of ``tensors`` go where, prepared once and right as long as ``fits`` says so.

    Args:
        tensors: dense tensors or DTensors, anywhere.
        device: the device whose copies run beside training. Other tensors are read at the save.
        changed_by_forward: tensors that forward changes in place: read at the save.
        snapshot_bytes: device memory for snapshots; the update need not wait for their copies.

    ``offsets`` are bytes in an arena, by identity. ``snapshots`` are pairs (copy, shard), ``packs``
    pairs (tensor of bytes, bytes of many small tensors). ``in_place`` are pairs (offset, piece of a
    tensor itself), ``from_copies`` the same with pieces of a snapshot or a pack. ``gap`` is a pair
    that makes the stream wait for the other copy engine.
    """

    @torch.inference_mode(False)
    def __init__(self, tensors, device, changed_by_forward=(), snapshot_bytes: int = 0) -> None:
        self.tensors, self.shards = tensors, [shard_of(x).detach() for x in tensors]
        self.layouts, self.known = [*map(layout, tensors)], kinds(tensors, self.shards)
        gap = torch.zeros(1, device=device)
        device, self.gap = gap.device, (gap, torch.zeros(1, device="cpu", pin_memory=gap.is_cuda))
        self.nbytes, self.offsets, large, small = ALIGNMENT, {}, [], {}
        self.snapshots, self.packs, self.in_place, self.from_copies = [], [], [], []

        changing = [shard_of(x) for x in changed_by_forward if x.layout == torch.strided]
        changing = {shard.untyped_storage().data_ptr() for shard in changing}
        unique = {identity(shard): shard for shard in self.shards if shard.numel()}
        for shard in sorted(unique.values(), key=torch.Tensor.element_size, reverse=True):
            source, is_large, elsewhere = shard, shard.nbytes >= SMALL, shard.device != device
            within_budget = is_large and shard.nbytes <= snapshot_bytes
            read_at_save = elsewhere or is_large and shard.untyped_storage().data_ptr() in changing
            is_view = not shard.is_contiguous() or shard.is_conj() or shard.is_neg()
            snapshot_bytes -= shard.nbytes if within_budget else 0
            if within_budget or read_at_save or is_view:
                source = shard.new_empty(shard.shape, device="cpu" if elsewhere else device)
                self.snapshots.append((source, shard))
            (large if is_large else small.setdefault(source.device, [])).append((shard, source))

        for group in small.values():
            sources = [source.unsqueeze(-1).view(torch.uint8).view(-1) for _, source in group]
            self.packs.append((torch.cat(sources), sources))
            offset = self.place(self.packs[-1][0], self.from_copies)
            for shard, _ in group:  # widest elements first: each lies at a multiple of its size
                self.offsets[identity(shard)] = offset
                offset += shard.nbytes
        for shard, source in sorted(large, key=lambda pair: pair[0].nbytes, reverse=True):
            pieces = self.in_place if source is shard else self.from_copies
            self.offsets[identity(shard)] = self.place(source.view(-1).view(torch.uint8), pieces)

    def place(self, source: torch.Tensor, pieces: list[tuple]) -> int:
        """Reserve room for the bytes of ``source``, cut it into ``pieces``; return its offset."""
        offset = self.nbytes
        self.nbytes += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        pieces += [(offset + s, source[s : s + PIECE]) for s in range(0, source.nbytes, PIECE)]
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

    def take_snapshots(self) -> None:
        """Queue on the current stream: snapshots of what cannot wait, packs of small tensors."""
        if self.snapshots:
            torch._foreach_copy_(*zip(*self.snapshots, strict=True))  # pairs (copy, shard)
        for pack, small in self.packs:
            torch.cat(small, out=pack)

    def copies(self, arena: PinnedArena) -> list[tuple[tuple, tuple]]:
        """Targets and sources, four lists: pieces in place in three, snapshots and packs."""
        first, rest, lists = self.in_place[:FIRST], self.in_place[FIRST:], []
        for pieces in (first, rest[:-LAST], rest[-LAST:], self.from_copies):
            pairs, in_a_row = [self.gap], 0
            for offset, piece in pieces:
                in_a_row += piece.nbytes
                if in_a_row > PIECE:
                    pairs, in_a_row = [*pairs, self.gap], piece.nbytes
                pairs.append((arena.bytes.narrow(0, offset, piece.nbytes), piece))
            lists.append(tuple(zip(*pairs, strict=True)))
        return lists

    def queue(self, copies: list[tuple[tuple, tuple]], streams, stream) -> list:
        """Queue ``copies`` on ``stream``, after what it waits for; return an event behind each."""
        events = [streams.Event() for _ in copies]
        with streams.stream(stream):
            for (targets, sources), event in zip(copies, events, strict=True):
                torch._foreach_copy_(targets, sources, non_blocking=True)
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
# arrived.
#
# .. result-table:: staging_copies
#    :rows: none cure_at_once cure_gaps cure_tiny_kernel cure_paced cure_turns
#
# .. timeline:: staging_copies cure_at_once cure_gaps
#
# ``cure_at_once`` is the problem: nothing stands between the pieces. ``cure_gaps`` is this recipe.
# The other rows are other ways to solve it.
#
# * ``cure_turns`` alternates the pieces between two streams: each piece waits for an event after
#   the piece before it, on the other stream. The copies arrive almost as soon as those of
#   ``cure_at_once``, but a thread runs Python for every piece, beside the launch of the forward.
# * ``cure_paced`` is a thread that queues a piece when the one before has ended. The copies take
#   far longer.
# * ``cure_tiny_kernel`` has a kernel between the pieces. The kernel waits for room on the device,
#   so the copies take nearly as long as the paced ones. Take it on a GPU with a single copy engine,
#   where gaps do nothing.
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
# * A tensor of another library's subclass, a sparse or a quantized one is cloned at once; a
#   DTensor of such is a ``TypeError``.
# * Thousands of copies take long to queue. Until they are, other threads launch kernels more slowly
#   (seen on an H200): a host-bound loop notices.
# * Without CUDA, memory is pageable: right, slower, and a save waits for its first pieces.
