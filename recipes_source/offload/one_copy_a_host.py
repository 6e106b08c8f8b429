# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, offload/one_copy_a_host.py
"""
One copy per host: ranks share weights, Adam's state and its work
=================================================================

Let the ranks of a host share one copy of the layers, and the work of updating it. With
:doc:`train_what_does_not_fit`, each rank keeps all weights of the layers in host memory, with
masters and moments, and updates all of them. With this recipe they keep **one copy** in memory that all of them
map, and each rank updates its part: eight ranks hold it once, not eight times, and each does an
eighth of the update. The model gets the bits of one rank that takes all batches as microbatches.

.. result-gain:: offload_step
   :rows: one_copy own_copy
   :field: held_bytes
   :where: model=llama-8b

   Two ranks train six layers. ``own_copy`` is :doc:`train_what_does_not_fit` on each of them.

**When not to bother:** there is one rank per host; or the state fits the devices when it is sharded
over them: use FSDP2.

.. code-block:: python

   from overlap_recipes.offload import HostAdamW, stream_layers

   with (
       stream_layers(model, layers, device, one_copy_a_host=True) as streamed,
       HostAdamW(model.parameters(), streamed, lr=1e-3, max_norm=1.0) as optimizer,
   ):
       for batch in batches:
           inputs = {name: tensor.to(device) for name, tensor in batch.items()}
           model(**inputs).loss.backward()
           optimizer.step()

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * memory that several ranks map, without a file and without ``/dev/shm``
      * who may write what, and how the others know that it is written
      * what to wait for before a load

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, Linux, ``torchrun`` or ``LOCAL_WORLD_SIZE`` set
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

Gradients are averaged over all ranks before they leave the device, so every rank has all of them,
in memory of its own. With *n* ranks on the host, a rank updates every *n*-th block of a layer, in
the shared memory. Then it says so, by a number in shared memory that only this rank writes. Before
a rank loads a layer, it waits for the numbers of all:

.. lanes:: Schematic. Two ranks update two layers; each loads a layer when both have updated it.

   rank 0 host: 0-4 half of 0; 4-8 half of 1
   rank 1 host: 0-5 half of 0; 5-10 half of 1
   rank 0 H2D:  5-7 0 ~; 10-12 1 ~
   rank 1 H2D:  5-7 0 ~; 10-12 1 ~

Nobody writes weights that another rank still reads. A step updates layers when the norm of all
gradients is known, and it is known when every rank has computed its last backward.
"""

# %%
# Imports and sizes
# -----------------
# :doc:`train_what_does_not_fit` has the optimizer; this page shares what it keeps. The imports are
# the proof's.
#
# .. literalinclude:: /overlap_recipes/offload/one_copy_a_host.py
#    :language: python
#    :start-at: FAILED = -1
#    :end-at: POLL_S = 1e-4

import re
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from _training import (
    BAD_STEP,
    MAX_NORM,
    ON_DEVICE,
    STEPS,
    Model,
    loss_of,
    schedule_of,
    train,
)
from torch.nn.utils import clip_grads_with_norm_

from overlap_recipes.offload import adam_in_pieces as pieces
from overlap_recipes.offload.one_copy_a_host import Host
from overlap_recipes.offload.streaming import stream_layers
from overlap_recipes.offload.whole_step import HostAdamW
from overlap_recipes.ranks import start_rank

# %%
# Memory of all ranks
# -------------------
# An anonymous file (``memfd_create``) has no name, needs no mount, and is gone with the last rank
# that maps it, however it ends. The others open it through ``/proc``, while the first still holds
# it open. A barrier, where every rank waits for all others, says when it may close it.
#
# .. literalinclude:: /overlap_recipes/offload/one_copy_a_host.py
#    :language: python
#    :pyobject: Host
#
# A model whose weights are shared
# --------------------------------
# Each layer's weights move from a rank's own memory to that of all. All ranks write the same
# values, those of the first, so it does not matter who is last. Loading a state waits for all ranks
# before and after: one that is ahead must not write what another still reads.
#
# .. literalinclude:: /overlap_recipes/offload/one_copy_a_host.py
#    :language: python
#    :pyobject: SharedModel
#
# An update in parts
# ------------------
# ``done[layer, rank]`` counts the updates of a layer that a rank has ended. A step that is skipped
# counts as well. An update that fails on one rank is raised on all of the host: a rank that waits for
# a part that does not come would wait for ever.
#
# .. literalinclude:: /overlap_recipes/offload/one_copy_a_host.py
#    :language: python
#    :pyobject: SharedUpdates
#
# Run it, and prove it
# --------------------
# One rank takes the batches of all ranks as microbatches, adds their gradients in fp32 and rounds
# the mean once. All weights must have its bits, on every rank, through a step that is skipped.
# (From three ranks on, the library chooses the order of additions; a device's Adam rounds in
# another way than the host's: then they must be close.)
#
# ``Pss`` in ``/proc/self/smaps`` counts a page that *n* processes map as the *n*-th part of one. So
# the sum over the ranks says how often the host holds what they share.


def train_alone(model: torch.nn.Module, device: torch.device) -> None:
    """Ordinary training on the batches of all ranks, with the same steps."""
    masters = {p: torch.nn.Parameter(p.detach().float()) for p in model.parameters()}
    groups, ranks = pieces.groups_of(masters.values()), dist.get_world_size()
    optimizer = torch.optim.AdamW(groups, fused=True, **pieces.SETTINGS)
    schedule, in_order = schedule_of(optimizer), [p for g in groups for p in g["params"]]
    for step in range(STEPS):
        for rank in range(ranks):
            loss = loss_of(model, 1000 * rank + step, device)
            (loss * (torch.nan if step == BAD_STEP else 1)).backward()
            for p, master in masters.items():
                master.grad = p.grad.float() + (0 if rank == 0 else master.grad)
            model.zero_grad()
        for p, master in masters.items():
            master.grad = (master.grad / ranks).to(p.dtype).float()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in in_order]))
        if norm.isfinite():
            clip_grads_with_norm_(in_order, MAX_NORM, norm)
            optimizer.step()
        schedule.step()
        for p, master in masters.items():
            p.data.copy_(master)


def bytes_held(host: Host) -> tuple[int, int]:
    """Of what the ranks share: what one rank maps, and what the host holds of it."""
    maps = Path("/proc/self/smaps").read_text()
    ours = r"one_copy_a_host.*?\nSize: +(\d+) kB.*?\nPss: +(\d+) kB"
    mapped, held = zip(*re.findall(ours, maps, re.DOTALL), strict=True)
    total = torch.tensor(sum(map(int, held)))
    dist.all_reduce(total, group=host.group)
    return 1024 * sum(map(int, mapped)), 1024 * total.item()


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(0)
        model = Model().bfloat16()
        ordinary = deepcopy(model).to(device)
        groups, trained = pieces.groups_of(model.parameters()), model.encoder.parameters()
        options = pieces.SETTINGS | {"max_norm": MAX_NORM}
        with (
            stream_layers(model, model.encoder.layers, device, one_copy_a_host=True) as streamed,
            HostAdamW(groups, streamed, **options) as optimizer,
        ):
            train(optimizer, device)
            streamed.wait_for_all()
            assert optimizer.skipped == 1
            mapped, held = bytes_held(streamed.host)
            assert held <= mapped and mapped >= 14 * sum(p.numel() for p in trained)
        train_alone(ordinary, device)
        exact = device.type == "cpu" and dist.get_world_size() <= 2
        for ours, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
            close = {"rtol": 0, "atol": 0 if exact else ON_DEVICE}
            torch.testing.assert_close(ours.to(device), theirs, **close)
        print(f"{dist.get_world_size()} ranks map {mapped} bytes, the host holds {held}")
        print(f"{STEPS} steps: the weights of one rank that takes all batches")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Two ranks train six layers, clipped:
#
# .. result-table:: offload_step
#    :rows: one_copy own_copy
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory
# ------
# A host with :math:`n` ranks, for :math:`P` parameters of layers: weights in bf16, masters and
# moments once, :math:`14\,P` bytes, and each rank's gradients, :math:`2\,n\,P`. While the model is
# taken, each rank holds its weights in memory of its own as well.
#
# Known limits
# ------------
# * Gradients are averaged by an all-reduce of fp32 between the devices, and each rank stores all of
#   them, though it updates a part.
# * Shared memory has large pages only where the system allows it
#   (``/sys/kernel/mm/transparent_hugepage/shmem_enabled``); without, locking takes longer.
# * The optimizer's end waits until the other ranks have written their parts of the last step,
#   unless an error is on its way.
# * After an update that failed, or a step that was interrupted, loading a checkpoint is not enough,
#   whatever the error says: make model and optimizer anew, on all ranks.
# * A rank that dies leaves the others waiting for its part, until ``torchrun`` ends them.
# * Ranks of a host must be numbered one after the other, as ``torchrun`` does.
# * A change of weights by other means than ``load_state_dict`` needs ``streamed.wait_for_all()``
#   before, by all ranks, and ``optimizer.reload()`` and a barrier behind it.
# * It relies on a processor on which others see writes in their order, as on x86-64. On another
#   (Arm, say) a rank may load a part that is not complete, **without an error**.
#
# Further reading
# ---------------
# * `memfd_create <https://man7.org/linux/man-pages/man2/memfd_create.2.html>`__
# * `Proportional set size <https://man7.org/linux/man-pages/man5/proc_pid_smaps.5.html>`__
