# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/three_streams.py
"""
Three streams: copy in, compute and copy out at once
====================================================

Hide the copies between host and device behind compute. Give copies in, compute and copies out a
stream each, and all three happen **at the same time on one device**. This recipe builds that
pipeline. It also has a function to call on a step of your own: from a profile, it tells whether
your copies are asynchronous.

**When not to bother:** the data fits the device; or one of the three takes much longer than the
others together.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what ``non_blocking=True`` does, and what it does not do
      * who is held by a copy: the host, the device, both or nobody
      * which events make three streams correct, and why ``record_stream`` is not needed

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; each works on its own device
      * a CUDA device to see the overlap; on the CPU the order of all accesses is proved

.. verification-badge::

The idea
--------

A copy can hold the host, the device, both or nobody. A host that is held queues no next operation.
A device that is held runs no next kernel.

* **Pageable memory holds the host**, whatever ``non_blocking`` says: the driver copies the data
  through page-locked memory of its own.
* **Page-locked ("pinned") memory** is read by the device itself. ``non_blocking=True`` then returns
  at once. Without it PyTorch waits right after the copy: the ``cudaStreamSynchronize`` in your
  trace.
* **One stream holds the device**: a copy on the stream of the kernels runs between two kernels,
  never beside one.
* **Three streams hold nobody.** A GPU has copy engines for each direction, beside its compute
  cores. Give each direction a stream of its own, and say by events what must wait for what.

.. lanes:: Schematic. Three chunks in two slots of device memory: A holds the first and the third, B the second.

   H2D:      0-3 chunk 1 to A ~; 3-6 chunk 2 to B ~; 7-10 chunk 3 to A ~
   compute:  3-7 chunk 1; 7-11 chunk 2; 11-15 chunk 3
   D2H:      7-10 chunk 1 ~; 11-14 chunk 2 ~; 15-18 chunk 3 ~
   @3 ready
   @7 done
   @10 free
"""

# %%
# Imports and sizes
# -----------------
# On the CPU the chunks are tiny. On a device, a copy must take much longer than its launch.

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

CHUNKS = 8
SLOTS = 2  # chunks on the device at a time: one is computed with, one comes in
SIDE = 2048  # rows and columns of a chunk of float32, 16 MiB
SIDE_ON_CPU = 64

# %%
# The way everybody begins
# ------------------------
# One stream, and copies that are written as part of the computation. The result of a non-blocking
# copy to the host is there when the *device* has come that far. Python does not know: reading
# ``result`` right after this function returns garbage, without an error.


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


# %%
# A slot and its three events
# ---------------------------
# A slot is device memory for one chunk: as it comes in, and as it goes out. Slots are used in turn,
# so device memory does not grow with the number of chunks. Three events, one for each hand-over:
#
# * ``ready``: the input has arrived. Compute may read it.
# * ``done``: compute has read the input and written the output. The input may be overwritten, and
#   the output may be copied out.
# * ``free``: the output has left. Compute may overwrite it.
#
# An event that was never recorded holds nobody, so the first round needs no special case.
#
# The caching allocator orders memory by the stream that is current when a tensor is *allocated*:
# what it hands out may still be in use by earlier work of that stream, and only of that stream.
# Therefore each half of a slot is allocated on the stream that will write it.


class Slot:
    """Device memory for one chunk, of the shape and dtype of ``like`` (on the device)."""

    def __init__(self, like: torch.Tensor, streams, load) -> None:
        with streams.stream(load):
            self.input = torch.empty_like(like)
        self.output = torch.empty_like(like)
        self.ready, self.done, self.free = (streams.Event() for _ in range(3))


# %%
# The pipeline
# ------------
# Nothing in the loop waits: the host queues every chunk and goes on. ``a.wait_event(e)`` makes the
# *stream* ``a`` wait, on the device. Read the loop as three programs that run at the same time, one
# a stream, held by events alone.
#
# With ``record_stream`` a tensor may be freed while another stream uses it, and its memory comes
# back when the allocator next asks. A host that runs ahead allocates all its chunks before that:
# right results, and device memory that depends on timing. Slots are never freed, so they need no
# ``record_stream``.
#
# Streams and events belong to the device that is **current** when they are made, whatever device
# the tensors are on. Work on another device would be ordered by none of them, so a weight on
# another device is refused.


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
        self.load, self.store = self.streams.Stream(), self.streams.Stream()
        self.slots = [Slot(weight, self.streams, self.load) for _ in range(SLOTS)]

    def run(self, sources: list[torch.Tensor], results: list[torch.Tensor]):
        """Queue ``source @ weight`` into each result; return the event behind the last copy.

        The sources must be complete when this is called. Until the event has been synchronised
        with, keep the pipeline, do not read results, and change or free neither these nor sources.

        Raises:
            ValueError: host memory that is not pinned, or a chunk that does not fit the slots.
        """
        for host in (*sources, *results):
            if self.weight.is_cuda and not host.is_pinned():
                raise ValueError("a pageable copy holds the host: allocate with pin_memory=True")
            if host.shape != self.weight.shape or host.dtype != self.weight.dtype:
                raise ValueError(f"slots hold {tuple(self.weight.shape)}, not {tuple(host.shape)}")
        compute = self.streams.current_stream()
        for i, (source, result) in enumerate(zip(sources, results, strict=True)):
            slot = self.slots[i % SLOTS]
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
                result.copy_(slot.output, non_blocking=True)
                slot.free.record(self.store)
        finished = self.streams.Event()
        finished.record(self.store)
        return finished


# %%
# Is my copy asynchronous?
# ------------------------
# Put this file beside your code and give it a step of yours. Run one step before: the first call of
# a kernel loads it, and waits.
#
# .. code-block:: python
#
#    from three_streams import is_my_copy_asynchronous
#
#    train_step(batch)
#    print(is_my_copy_asynchronous(lambda: train_step(batch)))
#
# The function profiles the call and reads the exported trace, in which you can see the same
# yourself:
#
# * Each copy on the device names the memory it used, ``Memcpy HtoD (Pinned -> Device)`` or
#   ``(Pageable -> Device)``, and the stream it ran on. If kernels run on that stream too, the copy
#   holds the device.
# * Each call of the CUDA runtime (``cudaMemcpyAsync``, ``cudaStreamSynchronize``) lasts as long as
#   it held the host. The verdict is *held* if these calls took more than half of the copies' time
#   on the device. A wait by ``.item()`` counts as well.
# * ``hidden_share`` is the part of the copies' time during which a kernel ran. A stream of its own
#   allows overlap, it does not promise it.


@dataclass(frozen=True)
class Copies:
    """The copies of one direction during a call."""

    pinned: bool  # every one of them
    own_stream: bool  # no kernel ran on a stream of theirs
    device_s: float  # seconds on the device
    hidden_share: float  # of these, while a kernel ran

    def __str__(self) -> str:
        memory = "pinned" if self.pinned else "PAGEABLE"
        stream = "own stream" if self.own_stream else "THE KERNELS' STREAM"
        return f"{memory}, {stream}, {self.hidden_share:.0%} of {self.device_s:.1e} s hidden"


@dataclass(frozen=True)
class Verdict:
    """``copies`` by direction ("HtoD", "DtoH"); the host spent ``host_s`` s in copies and waits."""

    copies: dict[str, Copies]
    host_s: float

    @property
    def holds_host(self) -> bool:
        """Whether the host was held for more than half of the time that the copies took."""
        return self.host_s > sum(copies.device_s for copies in self.copies.values()) / 2

    def __str__(self) -> str:
        if not self.copies:
            return "no device copy to judge: no accelerator, or nothing was copied to or from it"
        host = f"host {'HELD' if self.holds_host else 'free'}, {self.host_s:.1e} s in copy calls"
        return "; ".join([host, *(f"{name} {found}" for name, found in self.copies.items())])


def is_my_copy_asynchronous(function: Callable[[], object]) -> Verdict:
    """Profile one call of ``function``, which was called before, and judge its copies."""
    if not torch.accelerator.is_available():
        return Verdict({}, 0.0)
    torch.accelerator.synchronize()
    with torch.profiler.profile(acc_events=True) as profile:
        with torch.profiler.record_function("judged call"):
            function()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        profile.export_chrome_trace(f"{directory}/trace.json")
        return judge(json.loads(Path(directory, "trace.json").read_text())["traceEvents"])


def judge(events: list[dict]) -> Verdict:
    """Read the events of a Chrome trace in which ``judged call`` is annotated on the host."""
    (call,) = (e for e in events if (e.get("cat"), e["name"]) == ("user_annotation", "judged call"))
    calls = (e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    during = (e for e in calls if call["ts"] <= e["ts"] <= call["ts"] + call["dur"])
    waits = (e["dur"] for e in during if "Memcpy" in e["name"] or "Synchronize" in e["name"])
    kernels = [event for event in events if event.get("cat") == "kernel"]
    busy = {kernel["args"]["stream"] for kernel in kernels}
    copies: dict[str, list[dict]] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            direction = event["name"].split()[1]  # of "Memcpy HtoD (Pinned -> Device)"
            if direction in ("HtoD", "DtoH"):
                copies.setdefault(direction, []).append(event)
    found = {}
    for direction, each in copies.items():
        pinned = not any("Pageable" in event["name"] for event in each)
        own_stream = busy.isdisjoint(event["args"]["stream"] for event in each)
        total = sum(event["dur"] for event in each)
        hidden = sum(beside(event, kernels) for event in each)
        found[direction] = Copies(pinned, own_stream, total / 1e6, hidden / total)
    return Verdict(found, sum(waits) / 1e6)


def beside(copy: dict, kernels: list[dict]) -> float:
    """Microseconds of ``copy`` during which at least one of ``kernels`` ran."""
    begin, end, covered = copy["ts"], copy["ts"] + copy["dur"], 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        stop = min(end, kernel["ts"] + kernel["dur"])
        covered += max(0.0, stop - max(begin, kernel["ts"]))
        begin = max(begin, stop)
    return covered


# %%
# Run it, and prove it
# --------------------
# The pipeline runs twice, so that slots are used again. Its results must be those of the serial
# version, bit by bit. Then each way is judged; on the CPU there is no device copy to judge.


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if on_device := device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    side = SIDE if on_device else SIDE_ON_CPU
    torch.manual_seed(0)
    weight = torch.randn(side, side, device=device)
    pageable = [torch.randn(side, side) for _ in range(CHUNKS)]
    expected = [torch.empty_like(chunk) for chunk in pageable]
    pinned = [chunk.pin_memory() if on_device else chunk for chunk in pageable]
    results = [torch.zeros_like(chunk, pin_memory=on_device) for chunk in pageable]

    one_stream(pageable, expected, weight)
    pipeline = Pipeline(weight)
    pipeline.streams.synchronize()  # the sources are complete, whoever wrote them
    for _ in range(2):
        finished = pipeline.run(pinned, results)
        finished.synchronize()
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        for result in results:
            result.zero_()
    print(f"{CHUNKS} chunks through {SLOTS} slots, twice: every bit as in the serial version")

    naive = is_my_copy_asynchronous(lambda: one_stream(pageable, expected, weight))
    queued = is_my_copy_asynchronous(lambda: one_stream(pinned, results, weight, True))
    overlapped = is_my_copy_asynchronous(lambda: pipeline.run(pinned, results))
    print(f"pageable:      {naive}\none stream:    {queued}\nthree streams: {overlapped}")
    if on_device:
        assert naive.holds_host and not any(found.pinned for found in naive.copies.values())
        assert not queued.holds_host
        assert not any(found.own_stream for found in queued.copies.values())
        assert not overlapped.holds_host
        for found in overlapped.copies.values():
            assert found.pinned and found.own_stream and found.hidden_share > 0.5


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# The same chunks, from pageable memory on one stream to pinned memory on three. *Call* is the time
# until the call returned. *Bound* is what the link and the kernels allow: the slowest of the three
# lanes, plus the first copy in and the last one out. Its rates were measured apart, so a row can
# come out slightly below. Where a copy takes longer than the kernel, as here, the two directions
# hide each other.
#
# .. result-figure:: three_streams
#    :rows: pageable pageable_non_blocking pinned_blocking one_stream three_streams
#
# .. result-table:: three_streams
#    :rows: pageable pageable_non_blocking pinned_blocking one_stream three_streams record_stream
#
# From a profile of one call; the lane ``host`` shows when a copy or a wait holds the Python thread:
#
# .. timeline:: three_streams pageable one_stream three_streams
#
# If your pipeline loads and stores at the same time, plan with the duplex rates below the table.
# ``record_stream`` is the same pipeline with new device tensors for every chunk: as fast, and the
# memory that it reserves depends on how far the host ran ahead.
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
# When it is not worth it
# -----------------------
# Chunks are small: pack several tensors into one copy.
#
# Known limits
# ------------
# * ``is_my_copy_asynchronous`` reads the names that the CUDA profiler gives. Kernels and copies
#   that a CUDA graph launches are counted; other accelerators name theirs differently.
# * Copies within the device and between devices (``DtoD``, ``PtoP``) are not judged.
# * Where the device reads all host memory by itself (NVIDIA Grace Hopper), pageable memory behaves
#   in another way.
# * The pipeline pins nothing by itself: pinning takes longer than copying, so do it once.
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
