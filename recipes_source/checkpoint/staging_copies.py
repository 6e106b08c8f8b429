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
   from overlap_recipes.checkpoint.copies import CopyPlan, PinnedArena

   def tensors_now():
       moments = [x for state in optimizer.state.values() for x in state.values()]
       return [*model.parameters(), *model.buffers(), *moments]

   # Once, after the first optimizer step: before it, Adam has no state to copy
   plan = CopyPlan(tensors_now(), device, model.buffers())
   arena = PinnedArena(plan.nbytes, device)          # page-locked while arena lives
   copies = plan.copies(arena)                       # in rows, each with a gap before it
   hosts = plan.hosts(arena)                         # the same tensors, in host memory
   streams = torch.get_device_module(device)         # torch.cuda
   stream = streams.Stream()

   # At each save, after an optimizer step
   assert plan.fits(tensors_now())                   # if not, make all of the above anew
   plan.take_snapshots()                             # small tensors, and what forward changes
   stream.wait_stream(streams.current_stream())
   has_been_read, copied = copies.queue(streams, stream)
   ...                                               # forward, backward, loss.item()
   streams.current_stream().wait_event(has_been_read)
   optimizer.step()
   copied.synchronize()   # on a thread of yours, which writes hosts; it must end before the next save

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. ``hosts`` are in the order of ``tensors_now()``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why a small read waits for gigabytes, and how a few bytes prevent that
      * how to notice that prepared copies no longer fit
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
# Imports and sizes
# -----------------
# The imports are the proof's. The sizes are the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :start-at: # Private by name
#    :end-at: ALIGNMENT = 64

import torch

from overlap_recipes.checkpoint.copies import CopyPlan, PinnedArena
from overlap_recipes.checkpoint.state import shard_of

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
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: PinnedArena
#
# .. literalinclude:: /overlap_recipes/page_locked.py
#    :language: python
#    :start-at: def private_memory
#
# A DTensor that stays on the CPU
# -------------------------------
# DCP needs DTensors to know which part of each parameter a rank holds. ``DTensor.from_local``
# moves its local tensor to the device of the mesh. With the model's mesh it would copy the staged
# bytes back to the GPU. So the recipe makes a mesh of type ``cpu`` over the process groups that
# exist already.
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: shard_of
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: HostDTensors
#
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
# * tensors that are not contiguous, and views that conjugate or negate.
#
# Tensors on another device, such as step counts on the CPU, are copied to the arena at the save.
#
# Optimizers, loads, resized storages and ``p.data = ...`` may give a tensor other memory, or another
# shape over the same memory, or conjugate it. So call ``fits`` at every save.
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: identity
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: layout
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: Copies
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: rows
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: CopyPlan
#
# Run it, and prove it
# --------------------
# The proof queues the copies, runs a forward and a backward beside them, and makes the update wait
# for the event after which all tensors have been read. It does so three times on every rank. Each
# time, every host tensor must hold the bits of the save, whatever the step has written since.


def main() -> None:
    import _toys as basic

    from overlap_recipes.checkpoint.state import read

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
        has_been_read, copied = copies.queue(streams, stream)
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
# Two costs are left. ``queue`` takes the training thread some microseconds for each piece. And copies and kernels
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
# * Without CUDA, memory is pageable, and ``queue`` returns when all is copied.
