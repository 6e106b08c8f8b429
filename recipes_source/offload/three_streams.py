# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, offload/three_streams.py
"""
Three streams: copy in, compute and copy out at once
====================================================

Hide the copies between host and device behind compute. Give copies in, compute and copies out a
stream each, and all three happen **at the same time on one device**.

**When not to bother:** the data fits the device; or one of the three takes much longer than the
others together.

**Scope.** Chunks of one shape and dtype in page-locked host memory, and a computation that reads one
chunk and writes one of the same shape: here, a product with a matrix on the device. Chunks do not
depend on each other. ``Pipeline`` raises ``ValueError`` for other chunks, for pageable memory, and for
a device that is not the current one. Layers of a model, whose gradients go out while weights come in:
:doc:`weight_streaming`.

.. result-gain:: three_streams
   :rows: three_streams one_stream pinned_blocking pageable
   :field: step_s

This is a run of the pipeline:

.. literalinclude:: three_streams.py
   :pyobject: multiply

Copy the first block of code below: ``Slot`` and ``Pipeline``. It needs torch alone. Put your computation
in place of ``torch.mm``: it reads ``slot.input`` and must write into ``slot.output``. Chunks have the shape
of ``weight``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what ``non_blocking=True`` does, and what it does not do
      * what a copy blocks: the host, the device, both or neither
      * which events make three streams correct, and why ``record_stream`` is not needed

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; each works on its own device
      * a CUDA device to see the overlap; on the CPU the order of all accesses is proved

.. verification-badge::

The idea
--------

A copy can block the host, the device, both or neither. A blocked host queues no operation. A
blocked device starts no kernel.

* **Pageable memory blocks the host**, even with ``non_blocking=True``: the driver copies the data
  through page-locked memory of its own.
* **Page-locked ("pinned") memory** is read by the device itself. ``non_blocking=True`` then returns
  at once. Without it PyTorch waits right after the copy: the ``cudaStreamSynchronize`` in your
  trace.
* **One stream blocks the device**: a copy on the stream of the kernels runs between two of them.
* **Three streams block neither.** A GPU has copy engines for each direction, apart from its compute
  cores. Give each direction a stream, and say by events what must wait for what.

.. lanes:: Schematic. Three chunks in two slots of device memory: A holds the first and the third, B the second.

   H2D:      0-3 chunk 1 to A ~; 3-6 chunk 2 to B ~; 7-10 chunk 3 to A ~
   compute:  3-7 chunk 1; 7-11 chunk 2; 11-15 chunk 3
   D2H:      7-10 chunk 1 ~; 11-14 chunk 2 ~; 15-18 chunk 3 ~
   @3 ready
   @7 done
   @10 free
"""

# %%
# The block to copy
# -----------------
# A slot is device memory for one chunk: as it comes in, and as it goes out. Slots are used in turn,
# so device memory does not grow with the number of chunks. Three events, one for each hand-over:
#
# * ``ready``: the input has arrived. Compute may read it.
# * ``done``: compute has read the input and written the output. The input may be overwritten, and
#   the output may be copied out.
# * ``free``: the output has left. Compute may overwrite it.
#
# A wait for an event that was never recorded ends at once, so the first round needs no special
# case.
#
# The caching allocator orders memory by the stream that is current when a tensor is *allocated*:
# what it hands out may still be in use by earlier work of that stream, and only of that stream.
# Therefore each half of a slot is allocated on the stream that will write it.
#
# Nothing in the loop waits: the host queues every chunk and goes on. ``a.wait_event(e)`` makes the
# *stream* ``a`` wait, on the device. Read the loop as three programs, one for each stream, that run
# at the same time and wait only for events.
#
# Slots are never freed, so they need no ``record_stream``. With it, the allocator gets memory back
# only when it checks for it, and a host that runs ahead allocates all its chunks before that.
#
# Two mistakes would make this wrong or slow without an error, so they are refused. Streams and
# events belong to the device that is **current** when they are made: work on another device would
# be ordered by none of them. And a copy of memory that is pageable, or not contiguous, blocks the
# host.

import torch

SLOTS = 2  # chunks on the device at a time: one is computed with, one comes in


class Slot:
    """Device memory for one chunk, of the shape and dtype of ``like`` (on the device)."""

    def __init__(self, like: torch.Tensor, streams, load) -> None:
        with streams.stream(load):
            self.input = torch.empty_like(like)
        self.output = torch.empty_like(like)
        self.ready = streams.Event()
        self.done = streams.Event()
        self.free = streams.Event()


class Pipeline:
    """Multiply chunks from the host by ``weight``, ``(side, side)`` on the device, overlapped.

    Raises:
        ValueError: the weight is not on the current device.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        at = weight.device
        if at.type != "cpu" and at.index != torch.accelerator.current_device_index():
            raise ValueError(f"make {at} current first: torch.accelerator.set_device_index")
        self.weight = weight
        self.streams = torch.get_device_module(weight.device)
        self.load = self.streams.Stream()
        self.store = self.streams.Stream()
        self.slots = [Slot(weight, self.streams, self.load) for _ in range(SLOTS)]

    def run(self, sources: list[torch.Tensor], results: list[torch.Tensor]):
        """Queue ``source @ weight`` into each result; return the event after the last copy.

        The sources must be complete when this is called. Until the event has been synchronised
        with, keep the pipeline, do not read results, and change or free neither these nor sources.

        Raises:
            ValueError: host memory that is not pinned or not contiguous, a chunk that does not
                fit the slots, or not as many results as sources.
        """
        if len(sources) != len(results):
            raise ValueError(f"{len(sources)} sources, {len(results)} results")
        for number, host in enumerate(sources + results):
            problem = problem_of(host, self.weight)
            if problem:
                raise ValueError(f"tensor {number} of sources and results: {problem}")
        compute = self.streams.current_stream()
        for number, source in enumerate(sources):
            slot = self.slots[number % SLOTS]
            with self.streams.stream(self.load):
                self.load.wait_event(slot.done)
                slot.input.copy_(source, non_blocking=True)
                slot.ready.record(self.load)

            compute.wait_event(slot.ready)
            compute.wait_event(slot.free)
            torch.mm(slot.input, self.weight, out=slot.output)
            slot.done.record(compute)

            with self.streams.stream(self.store):
                self.store.wait_event(slot.done)
                results[number].copy_(slot.output, non_blocking=True)
                slot.free.record(self.store)
        finished = self.streams.Event()
        finished.record(self.store)
        return finished


def problem_of(host: torch.Tensor, weight: torch.Tensor) -> str:
    """Why a source or a result cannot be copied asynchronously; empty if it can."""
    if host.device.type != "cpu":
        return f"it is on {host.device}, not on the host"
    if weight.is_cuda and not host.is_pinned():
        return "a pageable copy holds the host: allocate with pin_memory=True"
    if host.shape != weight.shape or host.dtype != weight.dtype:
        wanted = f"{tuple(weight.shape)} of {weight.dtype}"
        return f"slots hold {wanted}, not {tuple(host.shape)} of {host.dtype}"
    if not host.is_contiguous():
        return "it is not contiguous"
    return ""


# %%
# The way everybody begins, and the proof
# ---------------------------------------
# One stream, and copies that are written as part of the computation. The result of a non-blocking
# copy to the host is complete only when the *device* has run the copy. Python does not wait for it:
# if you read ``result`` right after this function returns, you get garbage, without an error.
#
# The results must be those of one stream, bit by bit, three times. On a GPU, events with a clock
# time both ways, both from pinned memory: only the number of streams differs.
#
# On a device the chunks are large, since a copy must take much longer than its launch.

import os

CHUNKS = 8
SIDE = 2048  # rows and columns of a chunk of float32, 16 MiB
SIDE_ON_CPU = 64


def one_stream(
    sources: list[torch.Tensor],
    results: list[torch.Tensor],
    weight: torch.Tensor,
    non_blocking: bool = False,
) -> None:
    """Write ``source @ weight`` to each result; sources and results are on the host."""
    for source, result in zip(sources, results, strict=True):
        chunk = source.to(weight.device, non_blocking=non_blocking)
        result.copy_(chunk @ weight, non_blocking=non_blocking)


def multiply(
    pipeline: Pipeline, sources: list[torch.Tensor], results: list[torch.Tensor]
) -> list[torch.Tensor]:
    finished = pipeline.run(sources, results)
    # Here the host goes on: it may do anything that touches neither sources nor results.
    finished.synchronize()
    return results


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    for mine, other in zip(ours, theirs, strict=True):
        if not torch.equal(mine.view(torch.int32), other.view(torch.int32)):
            return False
    return True


def milliseconds(streams, queue, *arguments) -> float:
    """What the device takes for what ``queue`` queues, all streams, by events."""
    begin = streams.Event(enable_timing=True)
    end = streams.Event(enable_timing=True)
    streams.synchronize()
    begin.record()
    last = queue(*arguments)
    if last is not None:
        streams.current_stream().wait_event(last)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    on_device = device.type != "cpu"
    if on_device:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    side = SIDE if on_device else SIDE_ON_CPU
    torch.manual_seed(0)
    weight = torch.randn(side, side, device=device)
    sources = [torch.randn(side, side, pin_memory=on_device) for _ in range(CHUNKS)]
    results = [torch.zeros(side, side, pin_memory=on_device) for _ in range(CHUNKS)]
    expected = [torch.empty(side, side) for _ in range(CHUNKS)]
    one_stream(sources, expected, weight)

    pipeline = Pipeline(weight)
    pipeline.streams.synchronize()  # the sources are complete, whoever wrote them
    for _ in range(3):
        for result in results:
            result.zero_()
        assert same_bits(multiply(pipeline, sources, results), expected), "other bits"
    print(f"{CHUNKS} chunks through {SLOTS} slots, three times: bits of one stream")

    try:
        pipeline.run(sources, [result.t() for result in results])
        raise AssertionError("a copy that holds the host was queued")
    except ValueError as error:
        print("refused:", error)

    if on_device:
        serial = milliseconds(pipeline.streams, one_stream, sources, results, weight, True)
        at_once = milliseconds(pipeline.streams, pipeline.run, sources, results)
        print(f"three streams take {at_once / serial:.0%} of the time of one stream")
        assert at_once < 0.9 * serial, "nothing ran at the same time"


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# The same chunks, from pageable memory on one stream to pinned memory on three. *Call* is the time
# until the call returned. *Bound* is what the link and the kernels allow: the slowest of the three
# lanes, plus the first copy in and the last one out; its rates were measured apart.
# ``record_stream`` is the pipeline with new device tensors for every chunk.
#
# .. result-figure:: three_streams
#    :rows: pageable pageable_non_blocking pinned_blocking one_stream three_streams
#
# .. result-table:: three_streams
#    :rows: pageable pageable_non_blocking pinned_blocking one_stream three_streams record_stream
#
# From a profile of one call; the lane ``host`` shows when a copy or a wait blocks the Python
# thread:
#
# .. timeline:: three_streams pageable one_stream three_streams
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. CPU streams do nothing, so the bits come out
# right even without the events; a recorder of stream order finds what no event orders.
#
# .. recipe-controls::
#
# Memory
# ------
# On the device, whatever the number of chunks:
#
# .. math::
#
#    \text{slots} \cdot (\text{bytes of an input} + \text{bytes of an output})
#
# On the host, all sources and results are pinned, each rounded up to a power of two.
#
# Known limits
# ------------
# * **Results that are read before the event are garbage, without an error.** So are sources that
#   another stream is still writing when ``run`` is called.
# * Small chunks: a copy costs its launch. Pack several tensors into one.
# * The pipeline pins nothing by itself: pinning takes longer than copying, so do it once.
# * Where the device reads all host memory by itself (NVIDIA Grace Hopper), pageable memory behaves
#   differently.
#
# Further reading
# ---------------
# * `A guide on good usage of non_blocking and pin_memory
#   <https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html>`__
# * `CUDA semantics: streams
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams>`__
# * `CUDA: API synchronization behavior
#   <https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html>`__
# * `record_stream keeps memory longer than needed
#   <https://github.com/pytorch/pytorch/issues/147168>`__
# * `Pinned blocks are rounded up to a power of two
#   <https://github.com/pytorch/pytorch/issues/150517>`__
