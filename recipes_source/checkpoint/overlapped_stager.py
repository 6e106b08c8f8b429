"""
Stage at the speed of the link: your own ``AsyncStager``
========================================================

This recipe writes a stager that copies each checkpoint to the host at the speed of the link and
leaves training undisturbed. The copy runs on a stream of its own beside the next forward and
backward, into pinned memory that is allocated once, and it holds the step it should.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * which four orderings a correct overlapped save needs, and what breaks without each
      * page-locked memory of exact size, allocated once, two sets of it
      * CPU ``DTensor`` objects that stay on the CPU
      * why an upload can wait for training, and how to stop that

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * host memory for two copies of each rank's shards
      * ``async_save.py``, the first recipe of this folder: model, state and comparison come from it

.. verification-badge::

The idea
--------

A GPU has copy engines that work beside its compute cores. Whether a save uses them is decided by
where the copy is queued (a stream of its own), what it waits for (an event, not the device) and
what it writes to (page-locked memory). What makes it *correct* is four orderings; two are drawn:

.. lanes:: Schematic. The copy of step 1 runs beside step 2; the write beside all that follows.

   compute:  0-6 step 1; 6-14 forward, backward; 14-16 step 2; 16-24 forward, backward; 24-26 step 3
   copy:     6-12 to buffers A ~; 26-32 to buffers B ~
   write:    12-28 write step 1 ~; 32-40 write step 3 ~
   @6 1: the copy waits for the step
   @14 2: the update waits for the copy

1. **Copy after step**: the copy stream waits for an event recorded behind ``optimizer.step()``.
2. **Update after copy**: the next ``optimizer.step()`` waits for the copy, on the GPU.
3. **Forward after snapshot**: buffers that forward itself changes cannot wait until then. They are
   small, so they are cloned on the compute stream, and the clone is copied.
4. **Refill after write**: a set of buffers is filled again only when the upload that reads it has
   ended.

The training thread never waits for the first three, and for the fourth only when the storage is
slower than two save intervals.
"""

# %%
# Imports
# -------
# The model, the application state and the bitwise comparison are those of ``async_save.py``.
# What is new here needs nothing beyond torch and the standard library.

import argparse
import mmap
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from copy import deepcopy
from itertools import accumulate
from pathlib import Path

import async_save as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

SAVES = 5  # more than the two buffer sets, so that both are used again
BUFFER_SETS = 2  # one being filled while the other is being written
ALIGNMENT = 64  # bytes; every tensor in the arena starts on a cache line

# %%
# Page-locked memory of exact size
# --------------------------------
# A copy to pageable memory stops the host, so the buffers must be page-locked. ``pin_memory=True``
# rounds each block up to a power of two; for a few gigabytes that can be gigabytes lost. One
# anonymous mapping, registered with the driver, has the size that is asked for. It must be
# unregistered before it is freed: an address that is still registered cannot be registered again.
#
# The tensors that divide the mapping come from ``torch.frombuffer``, which gives each a storage of
# its own size. Slices of one big tensor would share a storage, and the file writer clones every
# tensor whose storage is larger than the tensor.


class PinnedArena:
    """Host memory of ``nbytes`` bytes (more than 0), page-locked if ``device`` is a CUDA device.

    On the CPU nothing needs pinning. Other accelerators get pageable memory: correct, but their
    copies hold the host.

    Raises:
        RuntimeError: the driver refuses to lock that much memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))  # fewer to lock
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.pinned = device.type == "cuda"
        if self.pinned and int(torch.cuda.cudart().cudaHostRegister(self.address, nbytes, 0)):
            raise RuntimeError(f"cannot page-lock {nbytes} bytes: free memory, or raise ulimit -l")

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with the shape and dtype of ``like``, ``offset`` bytes into it."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    def close(self) -> None:
        """Unlock the pages. The memory itself lives as long as a tensor that uses it."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)


# %%
# A DTensor that stays on the CPU
# -------------------------------
# DCP needs DTensors to know which part of each parameter this rank holds. There is a trap:
# ``DTensor.from_local`` moves its local tensor to the device type of the mesh. Given the GPU mesh
# of the model, it copies what was just staged **back to the GPU**; the writer then fetches each
# tensor with a blocking copy on its thread's current stream, which is the compute stream, so that
# the upload advances by one tensor a training step.
#
# The cure is a mesh of device type ``cpu`` over the process groups that the model's mesh has
# already: no group is created, nothing is communicated.


def in_host_memory(tensor: torch.Tensor, local_copy: torch.Tensor) -> torch.Tensor:
    """``local_copy``, described as ``tensor`` is: a DTensor of the same shards, or itself."""
    if not isinstance(tensor, DTensor):
        return local_copy
    mesh, groups = tensor.device_mesh, tensor.device_mesh.get_all_groups()
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local_copy, mesh, tensor.placements, **shape)


# %%
# One set of buffers
# ------------------
# A set is laid out for the tensors of the first state it sees and used for every save after that.
# Four small functions read the state: ``local`` is what this rank holds of a tensor,
# ``storage_of`` finds out whether two tensors share memory, ``layout`` is what must not change
# between saves, ``map_leaves`` copies the nesting.


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def layout(tensors: list[torch.Tensor]) -> list[tuple]:
    return [(t.shape, local(t).shape, t.dtype, getattr(t, "placements", None)) for t in tensors]


def map_leaves(tree: object, function: Callable[[object], object]) -> object:
    if isinstance(tree, dict):
        return {key: map_leaves(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(value, function) for value in tree)
    return function(tree)


class BufferSet:
    """Host tensors for one staged state, in one arena of ``nbytes`` bytes."""

    def __init__(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        sizes = [-(-local(tensor).nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        *offsets, self.nbytes = accumulate(sizes, initial=0)
        self.arena = PinnedArena(max(self.nbytes, ALIGNMENT), device)  # a rank may hold nothing
        self.local = list(map(self.arena.tensor, offsets, map(local, tensors)))
        self.staged = list(map(in_host_memory, tensors, self.local))


# %%
# The stager
# ----------
# ``async_save`` calls ``stage`` on the training thread and gives the future that it returns to the
# upload thread. What ``stage`` does is queued, not awaited:
#
# * clones of the buffers that forward changes go on the compute stream (ordering 3);
# * an event is recorded behind them, and the copy stream waits for it (ordering 1);
# * the copies are queued on the copy stream, and an event behind them;
# * ``before_update``, called by a hook of the optimizer, makes the compute stream wait for that
#   event (ordering 2): by then the copy has had a whole forward and backward to finish.
#
# ``in_use_until`` takes the upload's future, which ``stage`` cannot know. With it the stager knows
# when a set of buffers is free again (ordering 4), and lets the uploads take turns: two at once on
# one process group would mix their messages. ``await_uploads`` is the only place where their
# errors come out, those of the earlier saves too: the future of the last save knows its own alone.
#
# The thread that waits for copies is told which device is meant. A new thread takes the first one,
# and to wait for an event there is to open a context on it: half a gigabyte of the first GPU for
# each rank of the node.
#
# ``staged`` is a future of the stager's own: when staging has already failed by the time
# ``async_save`` looks at it, ``AsyncSaveResponse.staging_completion`` reports success.


class OverlappedStager(AsyncStager):
    """Stage states for ``async_save`` beside training, in two sets of persistent pinned buffers.

    Args:
        device: where the state's tensors live.
        changed_by_forward: tensors that forward changes in place, such as ``model.buffers()``.

    The first ``stage`` allocates and locks the memory, which takes seconds for gigabytes. Every
    later state must have the same tensors in the same order. ``staged`` is the future of the latest
    copy: its seconds on the device, or None on the CPU.
    """

    def __init__(self, device: torch.device, changed_by_forward: Iterable[torch.Tensor] = ()):
        self.device = device
        self.streams = torch.get_device_module(device)
        self.copy_stream = self.streams.Stream()
        self.changed_by_forward = list(changed_by_forward)
        self.sets: list[BufferSet] = []
        self.saves = 0
        self.uploads: list[Future | None] = []  # not awaited, in order; None: not known yet
        self.copied = None  # event behind the latest copies
        on_this_device = (self.streams.set_device, (self.streams.current_device(),))
        self.thread = ThreadPoolExecutor(1, "stager", *on_this_device)

    def stage(self, state_dict: dict) -> Future[dict]:
        """Queue the copy of ``state_dict``; return the future of its copy in host memory.

        Holds the caller only while these buffers' previous upload is unfinished.

        Raises:
            ValueError: the tensors differ from the first state's in number, shape or sharding.
            RuntimeError, BaseException: those of :meth:`await_uploads`; nothing is staged.
        """
        tensors: list[torch.Tensor] = []
        map_leaves(state_dict, lambda x: tensors.append(x) if torch.is_tensor(x) else None)
        buffers = self.free_buffers(tensors)

        changing = {storage_of(tensor) for tensor in self.changed_by_forward}
        sources = [local(t).clone() if storage_of(t) in changing else local(t) for t in tensors]
        ready, started, self.copied = self.new_event(), self.new_event(), self.new_event()
        ready.record(self.streams.current_stream())
        with self.streams.stream(self.copy_stream):
            self.copy_stream.wait_event(ready)
            started.record(self.copy_stream)
            for host, source in zip(buffers.local, sources, strict=True):
                host.copy_(source, non_blocking=True)
        self.copied.record(self.copy_stream)

        hosts = iter(buffers.staged)
        state = map_leaves(state_dict, lambda x: next(hosts) if torch.is_tensor(x) else deepcopy(x))
        self.saves += 1
        self.uploads.append(None)
        self.staged = self.thread.submit(self.finish_copy, started, self.copied, sources)
        return self.thread.submit(self.take_turn, self.staged, self.uploads[:-1], state)

    def free_buffers(self, tensors: list[torch.Tensor]) -> BufferSet:
        """The next set of buffers, once no upload reads it."""
        if not self.sets:
            self.sets = [BufferSet(tensors, self.device) for _ in range(BUFFER_SETS)]
        buffers = self.sets[self.saves % BUFFER_SETS]
        if layout(tensors) != layout(buffers.staged):
            raise ValueError("these tensors do not match those staged first: build a new stager")
        self.await_uploads(keep=BUFFER_SETS - 1)
        return buffers

    def await_uploads(self, keep: int = 0) -> None:
        """Return when all uploads but the latest ``keep`` have ended.

        Raises:
            RuntimeError: the latest save was not passed to ``in_use_until``.
            BaseException: what made the earliest upload fail, ``CheckpointException`` for one. Call
                again to await the later ones.
        """
        if None in self.uploads:
            raise RuntimeError("call in_use_until(response.upload_completion) after async_save")
        while len(self.uploads) > keep:
            self.uploads[0].exception()  # waits; if that is interrupted, the upload stays first
            self.uploads.pop(0).result()

    def in_use_until(self, upload: Future) -> None:
        """Keep the buffers of the latest ``stage`` until ``upload`` is done."""
        self.uploads[-1] = upload

    def new_event(self):
        """An event that can be timed, except on the CPU, which has nothing to time."""
        return self.streams.Event(**({} if self.device.type == "cpu" else {"enable_timing": True}))

    def before_update(self) -> None:
        """Make the current stream wait until the latest copy has read the state."""
        if self.copied is not None:
            self.streams.current_stream().wait_event(self.copied)

    def finish_copy(self, started, copied, sources: list[torch.Tensor]) -> float | None:
        """Wait for the copies, keeping ``sources`` alive; return the seconds, if timed."""
        copied.synchronize()
        return started.elapsed_time(copied) / 1e3 if self.device.type != "cpu" else None

    def take_turn(self, staged: Future, earlier: list[Future], state: dict) -> dict:
        """Give ``state`` to its upload once it is copied and the ``earlier`` uploads have ended."""
        staged.result()
        wait(earlier)
        return state

    def close(self) -> None:
        """Unlock the buffers when no copy or upload uses them. Call ``await_uploads`` before: the
        errors of the uploads do not come out here.
        """
        wait([upload for upload in self.uploads if upload])
        self.thread.shutdown(wait=True)
        for buffers in self.sets:
            buffers.arena.close()
        self.sets.clear()


# %%
# Run it, and prove it
# --------------------
# The loop is the one of ``async_save.py`` with two additions: a hook before ``optimizer.step()``
# and a line after ``async_save``. Nothing in it waits for the device.
#
# The writer is told not to copy ahead (``per_thread_copy_ahead=0``). By default it overlaps copies
# from the device with writing and, to do so, synchronises its thread's current stream: the compute
# stream, although every tensor is in host memory already. Each such wait lasts until training has
# run out of queued work.


def train_and_save(app: basic.AppState, stager: OverlappedStager, root: Path) -> dict[int, dict]:
    """Save every few steps to ``root/step<N>``; return the bits that each checkpoint must hold."""
    app.optimizer.register_step_pre_hook(lambda *_: stager.before_update())
    group = dist.new_group(backend="gloo")
    expected = {}
    for _ in range(SAVES):
        for _ in range(basic.SAVE_EVERY):
            basic.train_step(app, stager.device)
        expected[app.step] = basic.snapshot(app)
        directory = root / f"step{app.step}"
        writer = dcp.FileSystemWriter(directory, overwrite=False, per_thread_copy_ahead=0)
        response = dcp.async_save(
            {"app": app}, storage_writer=writer, process_group=group, async_stager=stager
        )
        stager.in_use_until(response.upload_completion)
    basic.train_step(app, stager.device)
    stager.await_uploads()
    dist.destroy_process_group(group)
    return expected


# %%
# The proof: every checkpoint gives back the bits of its own step, although training went on at
# once; the buffers are as large as the state, up to alignment, and locked where there is a device.


def prove(app: basic.AppState, stager: OverlappedStager, root: Path, expected: dict) -> None:
    for step, bits in expected.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", stager.device), bits)
    print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")

    for buffers in stager.sets:
        assert 0 <= buffers.nbytes - basic.staged_bytes(app) < ALIGNMENT * len(buffers.local)
        assert not buffers.arena.pinned or all(host.is_pinned() for host in buffers.local)
    print(f"{BUFFER_SETS} sets of {buffers.nbytes / 1e6:.2f} MB, filled {stager.saves} times")


def main(directory: Path) -> None:
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)
        app = basic.build_app(device)
        with closing(OverlappedStager(device, app.model.buffers())) as stager:
            expected = train_and_save(app, stager, root)
            prove(app, stager, root, expected)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# A dashed line, ``Bound``, is the state's bytes over the rate of the link, measured in the same
# run beside training (rows of several runs have several): about what ``Staged after`` is here. On
# two GPUs of one host, the copy shares its way out of the GPU with the collectives of training, so
# both rates are given: the link's alone and beside training. The stall can be zero where a step is
# longer than the copy. ``short`` steps are not: nothing hides the rest, and the optimizer waits for
# it. ``disk`` lengthens the upload, not the stall. (The other columns: :doc:`async_save`; the
# peers: :doc:`process_checkpointer`.)
#
# A stall this small is less than steps differ from each other: after a rest, a GPU's clocks swing
# for seconds and step times with them. So for ``overlapped`` the benchmark compares windows of
# steps with and without a save, place by place, many times, and the table says how well the stall
# is known: with 95 % confidence the true one lies between the columns ``95 % from`` and ``to``. For
# ``long`` steps the interval holds zero, on one GPU and on two, and reaches no further than about
# one per cent of a step; the sign of such a stall means nothing, and one of zero or less has no
# bar. Row ``none`` is what this method reads without a save. Rows without an interval have too few
# samples for one, or a stall so large that the steps before the save serve as comparison.
#
# .. result-figure:: checkpoint_stall
#    :rows: dcp_save pinned default_stager_as_published default_stager_ordered overlapped torch_checkpointing nvidia-resiliency-ext
#    :where: storage=memory
#
# .. result-table:: checkpoint_stall
#    :rows: none dcp_save pinned default_stager_as_published default_stager_ordered overlapped torch_checkpointing nvidia-resiliency-ext
#
# .. timeline:: checkpoint_stall dcp_save default_stager_ordered overlapped
#
# While the upload runs, training shares with it the interpreter's lock and the host's memory.
# With ``long`` steps, few large tensors and a training thread that works ahead of the GPU hide
# that, for every way of saving in the table. ``short`` steps leave the training thread less room
# and become slower (``Step time during upload`` of ``pinned``); over all steps beside an upload
# that can cost more than the stall. Thousands of small tensors take the lock more often (see
# :doc:`process_checkpointer`). The upload of ``default_stager_as_published`` is long for another
# reason: its writer waits for the compute stream once a tensor, which slows the upload and not the
# training. None of the others that write beside training copies ahead.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. CPU streams do nothing, so the bits come out
# right even without the events; a recorder of stream order finds what no event orders. On a CUDA
# device the same edits save another step, or tear the checkpoint, with work queued before the save.
#
# .. recipe-controls::
#
# Memory
# ------
# Pinned host memory, from the first save until ``close()``:
#
# .. math::
#
#    2 \sum_{t\,\in\,\text{state}} \left\lceil \text{bytes of this rank's shard of } t
#    \right\rceil_{64}
#
# One set would do where saves are so rare that every upload has ended before the next begins: set
# ``BUFFER_SETS = 1``, and the second save waits for the first. On the device, the clones of
# the changing buffers live until the copy ends.
#
# When it is not worth it
# -----------------------
# * A few megabytes of state, or a save an hour: :doc:`async_save` costs next to nothing then.
# * The host cannot spare two copies of the shards. Take one set, or :doc:`pinned_staging`.
# * Torch is 2.13 or later and your state keeps its layout: a ``DefaultStager`` that is ordered after
#   the step and reused (:doc:`default_stager`) needs less code of your own. It still holds the host
#   before ``optimizer.step()``, where this one makes only the GPU wait.
#
# Known limits
# ------------
# * The state must keep its layout. Save first when the optimizer has state, which is after its
#   first step, and build a new stager when a layer is added.
# * The hook orders ``optimizer.step()``. Whatever else changes weights (an average of weights,
#   clipping in place, loading) must call ``before_update()`` first.
# * The tensors of ``changed_by_forward`` are found by their memory: call ``to_empty`` and whatever
#   else gives them new memory before the stager is built.
# * A ``NamedTuple`` in the state raises ``TypeError``.
# * An exception from ``async_save`` on one rank alone must end the job, as in :doc:`async_save`.
# * A tensor that is not contiguous is copied through a temporary one on the device.
# * Accelerators other than CUDA get pageable buffers: the bits are right, the copy holds the host.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__:
#   ``AsyncStager``, the protocol that this class follows
# * `CUDA semantics: use pinned memory buffers
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers>`__
# * `Pinned blocks are rounded up to a power of two
#   <https://github.com/pytorch/pytorch/issues/150517>`__, the reason for the arena
