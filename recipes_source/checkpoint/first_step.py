# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/first_step.py
"""
From start to first step
========================

See what a restart waits for, and make most of it wait for less. No rank builds the model in its own
memory: it is made without memory, sharded, and each rank reads its rows alone, from a Hub folder or
from a checkpoint. What depends on nothing else runs beside it. Every bit is that of
``from_pretrained``, in buffers that no file has, too.

**When not to bother:** the model is small, or your jobs start once a week. Or the first step compiles
for minutes: then keep the compiler's cache first, which this page does not show.

.. code-block:: python

    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from overlap_recipes.checkpoint.hub_folder import load_folder

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # shapes alone
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    load_folder(model, folder)  # memory, then this rank's rows of each tensor

``torchrun`` starts it, and ``fully_shard`` joins the ranks if your script has not. ``folder`` is a
path: ``snapshot_download`` of ``huggingface_hub`` returns that of a model's name.

Your project needs ``transformers`` and the package ``overlap_recipes``: ``pip install .`` in this
repository, or a copy of its folder ``overlap_recipes``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * which parts a start has, which wait for which, and how to see what each takes
      * how to fill a sharded model that has no memory yet
      * which tensors no file has, and who fills them

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * a folder of safetensors, as ``save_pretrained`` and the Hub have it, or a checkpoint; each
        host sees it
      * no network: nothing is fetched

.. verification-badge::

The idea
--------

.. lanes:: Schematic. What waits for nothing starts with the process; the first step waits for all.

   main:        0-5 imports; 5-7 join; 7-8 build; 8-13 load; 13-15 first step
   read ahead:  0-9 files to the page cache ~
   device:      2-5 open ~
   data:        7-12 first batch ~
   @7 the ranks have met
   @13 weights are there

A chain cannot be shortened by running it beside itself: the load waits for memory, memory for the
shards, shards for the process group, and all of it for the imports. Three things wait for nothing:

* **Reading files ahead** needs no torch. A thread that starts in the script's first line brings them
  into the page cache while modules are imported. It helps where they are not there yet.
* **Opening the device** needs torch alone, not your model's imports.
* **The first batch** needs the rank's number. A loader that starts its workers takes seconds.

What is left is to do no work twice. ``from_pretrained`` on each rank reads the whole model into host
memory, of which the rank then keeps a part. On eight ranks of one host, that is eight models.
"""

# %%
# Parts with a name
# -----------------
# Before you change anything, look: a line a part, with the seconds since the process began. The
# library's own lines come between: how many bytes a load took, and how long. ``time`` is imported
# first, so that the imports are a part as well.

import time

STARTED = time.time()

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.checkpoint.hub_folder import give_memory, load_folder
from overlap_recipes.ranks import start_rank

LOG = logging.getLogger("start")
PIECE = 32 << 20  # bytes that are read ahead at a time
TOKENS = torch.arange(14).view(2, 7)  # of which logits are compared
CONFIG = Qwen3Config(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Log when a part of the start has ended, and what it took."""
    begun = time.time()
    yield
    now = time.time()
    LOG.info("%6.2f s: %s took %.2f s", now - STARTED, name, now - begun)


# %%
# What waits for nothing
# ----------------------
# Ranks of one host share the page cache, so each reads ahead its share of the files. Do not do it
# where the host has no room for them. Here the proof writes the folder first; in your script, put
# ``read_ahead`` above the imports, and start it there in a ``threading.Thread``. To open a GPU, a
# thread that makes one tensor on it suffices. Keep your loader's iterator beside its first batch: a
# new one begins with that batch again.


def read_ahead(files: list[Path]) -> None:
    with part("reading ahead"):
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.read(PIECE):
                    pass


def first_batch(rank: int) -> torch.Tensor:
    """Token ids, (2, 7) int64."""
    with part("the first batch"):
        generator = torch.Generator().manual_seed(rank)
        rows = torch.randint(CONFIG.vocab_size, (16, 7), generator=generator)
        return next(iter(DataLoader(rows, batch_size=2)))


def begin_beside(pool: ThreadPoolExecutor, folder: Path) -> Future:
    """Start what waits for nothing; the first batch is the result."""
    rank = int(os.environ.get("RANK", "0"))
    rank_of_host = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    files = sorted(folder.iterdir())
    pool.submit(read_ahead, files[rank_of_host::ranks_of_host])
    return pool.submit(first_batch, rank)


# %%
# A model without memory
# ----------------------
# On ``meta`` a tensor has a shape and a dtype. ``fully_shard`` cuts it as any other, so each rank gets
# memory for its rows only.


def on_meta(folder: Path) -> nn.Module:
    """The sharded model of a folder, without memory."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


# %%
# ``load_folder`` gives it memory, then reads. Memory comes as it is, so each tensor must be filled.
# Two kinds are easily forgotten. Buffers that no file has, such as the frequencies of rotary
# embeddings: whoever leaves them gets a model that runs and is wrong. And weights that are tied:
# ``to_empty`` may make two of them.
#
# .. literalinclude:: /overlap_recipes/checkpoint/hub_folder.py
#    :language: python
#    :pyobject: give_memory
#
# How does one know that a buffer has been filled? It holds zeros before, then ones, and both times the
# model's own initialisation must leave the same bits. What it does not fill is an error, not noise.
#
# .. literalinclude:: /overlap_recipes/checkpoint/hub_folder.py
#    :language: python
#    :pyobject: filled
#
# A safetensors file is a header in JSON and the tensors' bytes, row after row. So a rank's rows are
# runs of bytes, which the threads of :doc:`load` read. Where the folder has another dtype than the
# model, a run goes to a block beside the tensor, and is cast on the device.
#
# .. literalinclude:: /overlap_recipes/checkpoint/hub_folder.py
#    :language: python
#    :pyobject: plan
#
# The start
# ---------
# A new run loads a folder. A run that goes on gives the model memory, with whatever was in it, and
# resumes; its optimizer's state comes with it. One script for both calls ``load_folder`` when
# ``resume`` has returned 0. Make the optimizer before the first forward: FSDP2 leaves the outermost
# module's weights whole behind a forward without a backward.


def start_new(folder: Path, device: torch.device) -> tuple[TrainingState, torch.Tensor]:
    """A job from a folder, and its first batch, which has come beside it."""
    with ThreadPoolExecutor(2) as pool:
        batch = begin_beside(pool, folder)
        with part("building"):
            model = on_meta(folder)
        with part("loading"):
            load_folder(model, folder, device)
        return TrainingState(model, optimizer_of(model)), batch.result().to(device)


def start_again(folder: Path, device: torch.device) -> TrainingState:
    """A job with memory, for ``resume``."""
    with part("building"):
        model = on_meta(folder)
        give_memory(model, device)
    return TrainingState(model, optimizer_of(model))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(state: TrainingState, tokens: torch.Tensor) -> float:
    """Train on a batch; returns the loss."""
    (optimizer,) = state.optimizers
    loss = state.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %%
# Run it, and prove it
# --------------------
# Rank 0 writes two folders, in float32 and in bfloat16. For each, the logits of the sharded model must
# have the bits of ``from_pretrained``, and so must the rotary buffer. The model takes a step and is
# saved. A new start resumes: its logits must have the bits of the trained model. A model that is not
# sharded is filled as well. A folder of another width is refused before anything has changed.


def written(root: Path, dtype: torch.dtype) -> Path:
    """A folder, written by transformers."""
    folder = root / str(dtype)
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)
        model.save_pretrained(folder, max_shard_size="4KB")
    dist.barrier()
    return folder


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(input_ids=TOKENS.to(device)).logits


def prove_folder(folder: Path, device: torch.device) -> tuple[TrainingState, torch.Tensor]:
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    state, batch = start_new(folder, device)
    model = state.model
    expected = stock.model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, expected), "the rotary buffer differs"
    assert model.lm_head.weight is model.model.embed_tokens.weight, "the tie is gone"
    assert torch.equal(logits_of(model), logits_of(stock)), f"other logits of {folder.name}"
    print(f"{folder.name}: logits and rotary buffer have the bits of from_pretrained")
    return state, batch


def prove_resumed(
    state: TrainingState, batch: torch.Tensor, folder: Path, device: torch.device
) -> None:
    with part("the first step"):
        step(state, batch)
    root = folder.parent / "checkpoints"
    with CheckpointManager(root, state) as checkpoints:
        checkpoints.save(1)
    again = start_again(folder, device)
    with CheckpointManager(root, again) as checkpoints, part("resuming"):
        assert checkpoints.resume() == 1
    found, expected = logits_of(again.model), logits_of(state.model)
    assert torch.equal(found, expected), "other logits behind a resume"
    one, other = step(state, batch), step(again, batch)
    assert one == other, f"loss {other} behind a resume, {one} without"
    print("resumed on meta: logits and the next loss have the bits of the job that saved")


def prove_whole(folder: Path, device: torch.device) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    load_folder(model, folder, device)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "the tie is gone"
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    assert torch.equal(logits_of(model), logits_of(stock)), "other logits of a whole model"


def prove_refused(folder: Path, device: torch.device) -> None:
    with torch.device("meta"):
        wider = Qwen3Config(**{**CONFIG.to_dict(), "intermediate_size": 32})
        model = fully_shard(AutoModelForCausalLM.from_config(wider))
    try:
        load_folder(model, folder, device)
    except ValueError as error:
        print(f"another width: {len(str(error).splitlines()) - 1} tensors do not fit")
    else:
        raise AssertionError("a folder that does not fit was loaded")
    assert all(parameter.is_meta for parameter in model.parameters())


def main(directory: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("start", "overlap_recipes"):
        logging.getLogger(name).setLevel(logging.INFO)
    LOG.info("%6.2f s: imports have ended", time.time() - STARTED)
    with part("joining"):
        device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)
    root = of_rank_0[0]
    prove_folder(written(root, torch.bfloat16), device)
    folder = written(root, torch.float32)
    state, batch = prove_folder(folder, device)
    prove_resumed(state, batch, folder, device)
    prove_whole(folder, device)
    prove_refused(folder, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where files go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# The parts of a start of Qwen3 1.7B. ``in_turn`` resumes a checkpoint one part behind the other,
# ``beside`` with the three threads of this page. ``folder`` loads weights alone, ``from_pretrained``
# has each rank load the whole model and keep its shards (``benchmarks/first_step.py``):
#
# .. result-table:: first_step
#
# What breaks if you remove a line
# --------------------------------
# Each edit of the library was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory
# ------
# Host: that of :doc:`load`, whatever the model's size; ``from_pretrained`` takes the whole model on
# each rank. Device: this rank's shards, and where the folder has another dtype, 256 MiB and one
# tensor beside them. Files that are read ahead lie in the page cache, which gives way.
#
# Known limits
# ------------
# These can give you another model than you expect:
#
# * ``give_memory`` leaves noise in the weights. Behind it, resume or load, or you train on noise.
# * Weights keep the dtype that the model has on ``meta``. Say ``dtype=`` when you build it.
# * ``from_pretrained`` also sets ``eval()`` and reads ``generation_config.json``; ``from_config`` makes
#   a model in training mode. Call what you need.
# * What your own code changes in a model behind ``from_pretrained`` (new tokens, adapters) comes behind
#   ``load_folder``, not before.
#
# These raise on all ranks, before anything has changed:
#
# * Names, shapes or kinds of dtypes that differ, and a file that is cut. A folder has no digests:
#   bytes that have changed are not found.
# * Tensors that transformers transposes or joins when it loads.
#
# These raise on all ranks when the model has its memory; load into a new one then:
#
# * A buffer that the model's initialisation does not fill: pass ``initialize=``.
# * A tied weight of which the folder has two copies that differ.
#
# Further reading
# ---------------
# * :doc:`load`: how the bytes come
# * :doc:`preemption`: from a kill to the next step
# * :doc:`export`: write such a folder from a sharded model
# * `Safetensors <https://huggingface.co/docs/safetensors/index>`__: the format
