# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/two_hosts.py
"""
Two hosts: local disks, a partner's copy, restart with fewer
============================================================

Survive the loss of a machine without shared storage. Each rank writes to its own host and sends a
copy to a partner host, beside training. Any one host may be lost. The job then continues on the
other hosts, or with a new one, from the newest checkpoint that they have between them.

**When not to bother:** your hosts share a directory that is fast enough. Take :doc:`keep_verify_prune`
then. What stands below on starting jobs and on storage holds there, too.

.. code-block:: python

    from pathlib import Path

    import torch.distributed.checkpoint as dcp
    from overlap_recipes.checkpoint import AppState
    from overlap_recipes.checkpoint.two_hosts import PartnerSaves, gather

    app, local = AppState(model, optimizer), Path("/local/run")  # of this host alone
    newest = gather(local)                        # on all ranks; None: there are none
    if newest is not None:
        dcp.load({"app": app}, checkpoint_id=local / f"step{newest}")
    with PartnerSaves(device, model.buffers) as saves:
        while app.step < steps:
            train_step(app)                       # counts app.step
            if app.step % 1000 == 0:
                saves.save({"app": app}, local / f"step{app.step}")

.. code-block:: bash

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1          # see "Starting it"
    torchrun --nnodes=1:2 --nproc-per-node=8 --max-restarts=3 --rdzv-id=run --rdzv-backend=c10d \\
        --rdzv-endpoint=host0:29400 train.py         # the same line on every host

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * how the writing thread sends a copy to a partner
      * which step all hosts can load, when some have files that others miss
      * job files for torchrun, Slurm and Kubernetes
      * what NFS, Lustre and S3 promise, and what they do not

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of hosts with equally many ranks
      * a local disk on each host

.. verification-badge::

The idea
--------

.. lanes:: Schematic. Host B is lost in step 7: its part of step 6 is on host A.

   write host A:  0-4 own shards; 4-8 copy of B's; 8-9 rename; 18-21 gather
   write host B:  0-4 own shards; 4-8 copy of A's; 8-9 rename
   training:      0-9 step 7; 9-12 step 8; 12-18 restart !; 18-21 load; 21-26 step 7
   @8 all agree
   @12 B is lost

The ranks of host h send their files to host h + 1. When all ranks have reported that both copies
are written, every host renames its directory. One host may be lost before it does, another one
later. So at a restart, the hosts tell each other which complete files they have. The job loads the
newest step of which every file is on some host. A host that misses a file receives it.
"""

# %%
# Imports and sizes
# -----------------
# The imports are the proof's. The sizes and the name are the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :start-at: PIECE = 64 << 20
#    :end-at: LISTING = "files.json"

import argparse
import shutil
import tempfile
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist

from overlap_recipes.checkpoint.two_hosts import PartnerSaves, gather, steps_in

STEPS, SAVE_EVERY = 6, 2  # of the run that proves it

# %%
# Files between hosts
# -------------------
# A file to be sent is mapped, not read: its bytes go from the page cache to the network. A file
# that arrives is written aside, flushed and then renamed. So a file that has its final name has all
# of its bytes. A full disk fails the save, but the rank still takes what is sent to it. The sender
# would wait for it otherwise, and all later saves would fail with this one.
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: pieces_of
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: arriving
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: write_file
#
# The save
# --------
# DCP allows each host to write to a directory of its own. It writes ``.metadata`` on rank 0. That
# file is small and every host needs it, so every host gets it. The writing thread sends and
# receives, in the process group of ``Saves``, so training's collectives are not
# disturbed. If a partner is gone, the save fails on every rank that is left, after
# ``DEADLINE_S`` of ``overlap_recipes/checkpoint/saves.py`` at the latest.
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: PartnerSaves
#
# The restart
# -----------
# A step may have been saved twice: by the job that lost a host, and by the one that went on without
# it. When the host comes back, its files have the names of the others' and maybe their sizes. So
# each save has a name of its own in its listing, and files of two saves are never mixed. The later of
# two whole ones counts.
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: steps_in
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: write_listing
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: held
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: whole_saves
#
# .. literalinclude:: /overlap_recipes/checkpoint/two_hosts.py
#    :language: python
#    :pyobject: gather
#
# Run it, and prove it
# --------------------
# On one machine, every rank plays a host with a directory of its own. The proof trains six steps
# and saves every second one. Then it replaces the first host by one with an empty disk, and gives
# the last host a step that nobody has completely. Every host must gather step 6, with the bits
# that were saved.


def train(app: basic.AppState, local: Path, device: torch.device) -> None:
    with PartnerSaves(device, app.model.buffers, per_host=1) as saves:
        for _ in range(STEPS):
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                saves.save({"app": app}, local / f"step{app.step}")


def main(directory: Path) -> None:
    basic.HIDDEN = 512  # small: it is copied often
    device = basic.start_rank()
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        local = basic.directory_of_rank_0(directory) / f"host{rank}"
        assert gather(local) is None
        app = basic.build_app(device)
        train(app, local, device)
        assert sorted(steps_in(local)) == [4, 6]
        if rank == ranks - 1:  # a step of which nobody else has anything, and this host not all
            torn = shutil.copytree(local / "step6", local / "step7")
            (torn / f"__{rank}_0.distcp").unlink()
        if ranks > 1 and rank == 0:
            shutil.rmtree(local)
        dist.barrier()
        older_stay = local.exists()
        assert gather(local) == STEPS
        assert sorted(steps_in(local)) == ([4, 6] if older_stay else [6])
        loaded = basic.load_app(local / f"step{STEPS}", device)
        basic.assert_same_bits(loaded, basic.snapshot(app))
        print(f"host {rank}: step {STEPS} is here, every bit equal")
        if older_stay:
            shutil.rmtree(local / "step4")  # of three hosts, none has all of it
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where the hosts' disks are (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# The tests build two hosts from network namespaces, each with a torchrun of its own, and cut the
# link between them in the middle of a save. The first host continues alone, from a step that it
# has. The link comes back, and the second host starts again with an empty disk. Both must end with
# the bits of an uninterrupted run. They do the same with one directory that both hosts share and
# the saves of :doc:`keep_verify_prune`.
#
# Starting it
# -----------
# **torchrun**: use the same line on every host. ``--nnodes=1:2`` lets one host continue when the
# other is lost. The host of ``--rdzv-endpoint`` keeps the rendezvous. If *that* host is lost, the
# job ends and the scheduler has to start it again. In containers, and on hosts with several
# networks, say which network to use: ``--local-addr``, ``GLOO_SOCKET_IFNAME``,
# ``NCCL_SOCKET_IFNAME``, and ``--rdzv-conf is_host=1`` on the host that keeps the rendezvous,
# ``is_host=0`` on the others.
#
# A **new** host can join only with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` on all hosts (torch
# 2.13). Without it, the oldest torchrun publishes its address in the first round alone. A host
# that is new in a later round waits for that address for a minute, and then the whole job ends
# with a ``DistStoreError``.
#
# You decide how soon a loss is noticed: by the ``timeout`` of ``init_process_group``, by
# ``DEADLINE_S`` of ``overlap_recipes/checkpoint/saves.py``, and by ``last_call_timeout`` in ``--rdzv-conf``,
# which is how long a restart waits for more hosts.
#
# **Slurm** (nobody has run this file):
#
# .. code-block:: bash
#
#     #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --requeue --signal=TERM@120
#     head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
#     export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
#     srun --kill-on-bad-exit=0 torchrun --nnodes=1:2 --nproc-per-node=8 --max-restarts=3 \
#         --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:29400" train.py
#
# **Kubernetes** (nobody has run this file): an indexed job, and a service without an address of
# its own, so that pods have names.
#
# .. code-block:: yaml
#
#     apiVersion: v1
#     kind: Service
#     metadata: {name: run}
#     spec: {clusterIP: None, selector: {job-name: run}}
#     ---
#     apiVersion: batch/v1
#     kind: Job
#     metadata: {name: run}
#     spec:
#       completionMode: Indexed
#       completions: 2
#       parallelism: 2
#       backoffLimit: 20
#       template:
#         spec:
#           subdomain: run
#           restartPolicy: OnFailure
#           terminationGracePeriodSeconds: 120
#           containers:
#           - name: train
#             image: your/image
#             command: [torchrun, --nnodes=1:2, --nproc-per-node=8, --max-restarts=3, --rdzv-id=run,
#                       --rdzv-backend=c10d, --rdzv-endpoint=run-0.run:29400, train.py]
#             env: [{name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}]
#             resources: {limits: {nvidia.com/gpu: 8}}
#             volumeMounts: [{name: local, mountPath: /local}]
#           volumes: [{name: local, hostPath: {path: /var/lib/run}}]
#
# What storage promises
# ---------------------
# .. list-table::
#    :header-rows: 1
#
#    * - storage
#      - when others see a write
#      - rename
#      - lock
#    * - local disk
#      - never: other hosts have none of it
#      - atomic
#      - ``flock``, on this host
#    * - NFS
#      - after ``close``, at their next ``open``; listings may be some seconds old
#      - atomic on the server; a repeated request may report an error for a rename that was done
#      - between hosts from version 4 on
#    * - Lustre
#      - at once
#      - atomic
#      - between hosts if mounted with ``flock``, not with ``localflock``
#    * - S3
#      - at once when the write has been answered
#      - none: :doc:`object_storage`
#      - none; ``If-None-Match``
#
# Known limits
# ------------
# * One host may be lost, or several that are not neighbors. Two neighbors that are lost together
#   take both copies of a part with them.
# * ``gather`` gives every host the whole checkpoint. With many hosts, let each fetch what its
#   ranks read. For restarts with other numbers of ranks, use a shared directory.
# * Where there are checkpoints and none is whole, ``gather`` raises. To begin anew, empty ``local``.
# * Sizes are compared, not digests: :doc:`keep_verify_prune` has digests.
#
# What it costs
# -------------
# Disk of each host: ``keep_last`` + 1 checkpoints of its own ranks, twice. Memory: ``PIECE`` per rank.
# Network: each shard once, at the pace of gloo's sockets, beside training's own traffic.
