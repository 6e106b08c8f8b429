# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/export.py
"""
Export to Hugging Face, during training
=======================================

Write a model for ``from_pretrained`` while training goes on. Evaluation and serving want one set
of safetensors files with an index, not one shard per rank. This recipe writes that set from the
host memory that a save has staged. Every rank writes its own rows to their place in the final
files, so nothing is gathered and nothing is written twice.

**When not to bother:** one process has room for all weights and training may wait
(``model.save_pretrained``), or you keep the checkpoint of that step anyway. Then export it later,
on another machine, with the command below.

.. code-block:: python

    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM

    from overlap_recipes.checkpoint.export import Exports, for_transformers, weights

    options = for_transformers(model, dtype=torch.bfloat16)  # names, and config.json
    with Exports(device, model.buffers, **options) as exports:
        for step, batch in enumerate(batches, 1):
            train_step(batch)
            if step % 1000 == 0:
                exports.save(weights(model), Path(f"hf{step}"))

    AutoModelForCausalLM.from_pretrained("hf1000")  # somewhere else, without this package

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. The package is a command, too:

.. code-block:: bash

    python -m overlap_recipes.checkpoint export step1000 hf1000  # of a DCP checkpoint that you have

The command writes the tensors as they are called in the model, and no ``config.json``. For
``from_pretrained`` call ``convert(checkpoint, directory, **for_transformers(model))``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what a safetensors file is, and why ranks can fill one together
      * a DCP storage writer that knows the whole plan before it writes
      * how to load the export into a sharded model, and how to give it to ``torch.save``

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, one file system that all ranks see
      * ``safetensors`` to read, not to write

.. verification-badge::

The idea
--------

A safetensors file has three parts: a length, a header in JSON (name, dtype, shape and place of
each tensor), and the tensors' bytes, row by row. The header is known before a byte is written. So
the place of each shard is known too, and ranks can write at the same time:

.. lanes:: Schematic. Above, two ranks write into one file; below, DCP's own writer merges shards.

   write rank 0:  0-1 header; 1-5 rows 0 to 511; 6-7 index
   write rank 1:  1-5 rows 512 to 1023
   consolidated:  1-5 write shards; 5-9 read shards; 9-17 rank 0 writes
   @5 all have written

``fully_shard`` divides tensors by rows, and the rows of a rank lie together: one system call per
tensor. Other divisions (columns, two dimensions) work too, with one call per row.
"""

# %%
# Imports and names
# -----------------
# The imports are for the proof. The table is the module's: dtypes, and their names in a file.
#
# .. literalinclude:: /overlap_recipes/checkpoint/export.py
#    :language: python
#    :start-at: DTYPES = {
#    :end-at: }

import argparse
import tempfile
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from overlap_recipes.checkpoint.export import Exports, convert, weights

try:
    from safetensors.torch import load_file
except ImportError as error:
    raise SystemExit("pip install safetensors") from error

# %%
# What is exported
# ----------------
# The names are those of the model. A tied weight has two names and is one tensor. The export stores
# it under the first name, as ``save_pretrained`` does, and whoever loads the model ties it again.
# ``torch.compile``, ``DistributedDataParallel`` and activation checkpointing change the names of a
# model; the export has the original ones.
#
# .. literalinclude:: /overlap_recipes/checkpoint/export_names.py
#    :language: python
#    :pyobject: weights
#
# ``transformers`` 5 fuses the experts of a mixture when it loads them, and splits them when it
# saves. ``for_transformers`` finds out, on the meta device, which part of which tensor gets which
# name. Ranks then write these parts. All other models keep their own names.
#
# Where everything goes
# ---------------------
#
# .. literalinclude:: /overlap_recipes/checkpoint/export.py
#    :language: python
#    :pyobject: lay_out
#
# .. literalinclude:: /overlap_recipes/checkpoint/export.py
#    :language: python
#    :pyobject: encoded
#
# .. literalinclude:: /overlap_recipes/checkpoint/export.py
#    :language: python
#    :pyobject: runs
#
# The writer
# ----------
# DCP asks every rank what it holds, shows all of it to rank 0 at once, and sends each rank its part
# of the plan. A tensor that several ranks hold is then in one rank's part only. Before it sends the
# parts, rank 0 lays out and creates the files. From then on, the ranks write without any
# communication.
#
# .. literalinclude:: /overlap_recipes/checkpoint/export.py
#    :language: python
#    :pyobject: SafetensorsWriter
#
# During training
# ---------------
# Staging and the thread are those of :doc:`saves_beside_training`. The weights are copied during
# the next step and written to a temporary directory, which gets its final name when all ranks have
# written. If a restarted run comes to the same step again, the new export takes the place of the
# old one. Other files that lie there stay.
#
# .. literalinclude:: /overlap_recipes/checkpoint/export.py
#    :language: python
#    :pyobject: Exports
#
# From a checkpoint, and back
# ---------------------------
# ``convert`` exports a DCP checkpoint: it asks for all tensors below a prefix. ``load_export``
# loads an export into a sharded model with torch's own reader, and each rank reads its rows.
# ``read_all`` reads everything into the memory of one process, which is what ``torch.save`` needs.
#
# .. literalinclude:: /overlap_recipes/checkpoint/export.py
#    :language: python
#    :pyobject: convert


def load_export(model: nn.Module, directory: Path) -> None:
    """Load an export into ``model``, sharded or not, of any number of ranks."""
    dcp.load(weights(model), storage_reader=dcp.HuggingFaceStorageReader(str(directory)))


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export, for ``torch.save``."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


# %%
# Run it, and prove it
# --------------------
# The proof makes an export during training and a checkpoint of the same step. It converts the
# checkpoint twice, the second time to bfloat16, and compares all of them bit by bit.


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, of DTensors with the rows of all ranks."""
    wholes = ((name, getattr(x, "full_tensor", x.detach)()) for name, x in tensors.items())
    return {name: whole.to("cpu", copy=True) for name, whole in wholes}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name, x in expected.items() if not basic.same_bits(found[name], x)]
    assert not differing, differing


def main(directory: Path) -> None:
    basic.HIDDEN = 1024  # small: it is written five times
    device = basic.start_rank()
    try:
        root, app = basic.directory_of_rank_0(directory), basic.build_app(device)
        options = {"config": {"model_type": "mlp"}, "file_bytes": 2_000_000}
        expected = full(weights(app.model))
        dcp.save({"app": app}, checkpoint_id=root / "step0")
        with Exports(device, app.model.buffers, **options) as exports:
            exports.save(weights(app.model), root / "hf")
            basic.train_step(app, device)
        again = basic.build_app(device, seed=1)
        load_export(again.model, root / "hf")
        assert_equal(full(weights(again.model)), expected)
        if dist.get_rank() == 0:
            prove(root, expected, options)
    finally:
        dist.destroy_process_group()


def prove(root: Path, expected: dict[str, torch.Tensor], options: dict) -> None:
    """Read the files with safetensors; compare them with a conversion and with ``torch.save``."""
    assert_equal(read_all(root / "hf"), expected)
    convert(root / "step0", root / "converted", **options)
    for file in sorted((root / "hf").iterdir()):
        assert file.read_bytes() == (root / "converted" / file.name).read_bytes(), file.name
    convert(root / "step0", root / "bf16", dtype=torch.bfloat16)
    stored = read_all(root / "bf16")
    assert_equal(stored, {n: x.to(stored[n].dtype) for n, x in expected.items()})
    torch.save(read_all(root / "hf"), root / "weights.pt")
    assert_equal(torch.load(root / "weights.pt", map_location="cpu", weights_only=True), expected)
    print("during training, converted, loaded on all ranks, by torch.load: every bit equal")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where the proof writes (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# The tests train a stock Llama on two ranks, export it during training, and load it with
# ``transformers`` alone. ``from_pretrained`` gives the logits of the trained model, bit by bit, with
# its embedding and head tied.
#
# What torch has
# --------------
# ``dcp.HuggingFaceStorageWriter``, which this writer extends, does one of two things. It takes the
# full state, gathered on rank 0. Or each rank writes its shards, and rank 0 reads them again and
# merges them into the final files. ``dcp.HuggingFaceStorageReader`` reads the results of both, and
# of this recipe. For ``torch.save``, ``torch.distributed.checkpoint.format_utils`` has
# ``dcp_to_torch_save`` and ``torch_save_to_dcp``, which convert whole checkpoints.
#
# What it costs
# -------------
# On the training thread: as much as a save. Host memory: the staged weights once, and one tensor of
# this rank if the dtype changes. Storage: the weights once, in
# the dtype of the export, without the optimizer.
#
# Known limits
# ------------
# * Nothing is quantized. A model that is not of ``transformers`` and has other names needs a table.
# * ``for_transformers`` refuses what ``transformers`` would transpose or join. ``load_export`` does not
#   load experts that were saved apart.
# * ``for_transformers`` refuses a model with adapters, which has names of its own: export a merged
#   copy (PEFT's ``merge_and_unload``).
# * A save fails if the directory has files but no export, or safetensors that no export wrote, or
#   if it is a symbolic link or the working directory.
# * ``weights`` does not include averaged weights that an optimizer keeps. Export a model that has
#   them.
# * Save the tokenizer from rank 0, into the same directory: its files stay when the export is
#   replaced.
# * ``posix_fallocate`` reserves the room of a file before a tensor is written. If the file system
#   cannot reserve room, zeros are written first. There, use a copy of the package without that
#   line.
#
# Further reading
# ---------------
# * `The safetensors format <https://huggingface.co/docs/safetensors/index>`__
# * :doc:`load`: load such a folder into a sharded model
# * :doc:`saves_beside_training`: staging, and when a directory gets its name
