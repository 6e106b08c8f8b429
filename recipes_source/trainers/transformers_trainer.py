# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, trainers/transformers_trainer.py
"""
Save during training in transformers' Trainer
=============================================

**Needs FSDP2, also on one GPU**: set the two ``fsdp`` arguments below, and start with
``torchrun --nproc-per-node=1``. It refuses DDP and a plain ``Trainer``: turn DDP into FSDP2 by the same
arguments, or keep ``Trainer`` and save in its own loop.

Keep ``Trainer``, and let it train while it saves. With FSDP2, ``Trainer`` saves through
accelerate, which writes model and optimizer one after the other while training stops. This
subclass hands both to ``Saves``, which copies them during the next step and writes them
on a thread.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer none
   :field: cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

   ``CheckpointManager`` was measured in a loop without ``Trainer``, with the faster writer of
   :doc:`/recipes/checkpoint/saves_beside_training`. ``none`` is the same measurement without a save: the
   noise.

.. index::
   single: Hugging Face Trainer, asynchronous checkpoint
   single: async checkpoint with the HuggingFace trainer
   single: accelerate asynchronous checkpoint

**When not to bother:** a save takes a few seconds, and you save once per epoch.

.. code-block:: python

   from transformers import TrainingArguments
   from overlap_recipes.trainers.transformers import OverlappedTrainer

   arguments = TrainingArguments(
       output_dir="run",
       save_steps=100,
       fsdp=True,
       fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
   )
   trainer = OverlappedTrainer(model, arguments, train_dataset=data)
   trainer.train()  # to resume: trainer.train(resume_from_checkpoint=True)

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``.

.. verification-badge::
"""

# %%
# .. literalinclude:: /overlap_recipes/trainers/transformers.py
#    :language: python
#    :pyobject: TrainerFiles
#
# .. literalinclude:: /overlap_recipes/trainers/transformers.py
#    :language: python
#    :pyobject: TrainerFolder
#
# .. literalinclude:: /overlap_recipes/trainers/transformers.py
#    :language: python
#    :pyobject: OverlappedTrainer
#
# What each method is for
# -----------------------
#
# .. lanes:: Schematic. The copy runs during the next step, the write during the steps after it.
#
#    training:  0-6 step 1; 6-7 save; 7-15 step 2; 15-23 step 3; 23-31 step 4
#    copy:      7-13 to host memory ~
#    write:     13-26 checkpoint-1.incomplete ~; 26-27 its name ~
#
# ``train``
#    Refuses what would end in a checkpoint that nobody can load. ``model_init`` gives ``Trainer`` a
#    new model, so the buffers are asked for when a save plans. The ``with`` block waits for the
#    last upload. After an exception it does not wait for other ranks.
# ``prepare_saves``
#    Locks memory and plans during the first steps, so that the first save need not. The optimizer
#    is made later than the saves, so all is asked for by functions.
# ``_save_checkpoint``
#    ``Trainer``'s own method writes the schedule, the random numbers and ``trainer_state.json``: a
#    few kilobytes. ``_get_output_dir`` makes it write them to a temporary folder of this rank.
#    Model and optimizer follow as live tensors, which are copied during the next step. Of a model
#    with LoRA only the adapters are saved, under the names that accelerate asks for.
# ``_save_optimizer_and_scheduler``
#    Writes the schedule alone. ``Trainer``'s version also saves model and optimizer, synchronously.
# ``TrainerFiles.write``
#    Runs on the writing thread, in ``checkpoint-4.*.incomplete``. It writes the folders that
#    accelerate writes, so ``resume_from_checkpoint`` and ``accelerate merge-weights`` find what
#    they expect.
# ``TrainerFolder.commit``
#    Replaces a checkpoint of an earlier run. What a callback has written into ``checkpoint-4``
#    (``on_save``) moves into the checkpoint.
#
# A checkpoint gets its name when it is complete, with its small files in it. Of the folders whose
# names are ``checkpoint-`` and a number, ``Trainer`` resumes from the highest number, so a run that
# was killed resumes from the last complete one. Stock ``Trainer`` writes into ``checkpoint-4``
# itself, and after a kill in mid-save it would choose that incomplete checkpoint.
#
# ``save_total_limit`` counts complete checkpoints. ``Trainer`` deletes old ones when a save has
# returned, and here the new one is not there yet. It would also count ``checkpoint-4.*.incomplete``,
# which a killed run has left, and delete a complete one in its place. The oldest goes when
# the next save is called, so the disk holds one checkpoint more than the limit, also at the end.
#
# You need no hook before the optimizer: ``Saves`` orders every ``optimizer.step()`` in
# the process after its copies.
#
# Without Trainer
# ---------------
# A loop of your own on accelerate calls ``accelerator.save_state``. The function below replaces
# it. accelerate writes its small files (schedule, samplers, random numbers), and ``saves`` the
# rest. ``accelerator.load_state(directory)`` reads the result.
#
# .. literalinclude:: /overlap_recipes/trainers/transformers.py
#    :language: python
#    :pyobject: save_state
#
# Something to train
# ------------------
# The proof trains a stock Llama of two small layers. Its dropout draws random numbers, so a resume
# that forgets their state shows. accelerate uses FSDP on accelerators only. For tests on a CPU,
# ``TrainerOnAnyDevice`` sets what accelerate would have found; you need it for nothing else.
import argparse
import logging
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

for talkative in ("torchao", "torch.utils._pytree"):  # if torchao is there, transformers imports it
    logging.getLogger(talkative).setLevel(logging.ERROR)

import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from overlap_recipes.checkpoint import Saves
from overlap_recipes.checkpoint.writing import Target
from overlap_recipes.ranks import start_rank
from overlap_recipes.trainers.transformers import OverlappedTrainer, TrainerFiles, save_state

STEPS, SAVE_EVERY, KILLED_AT = 8, 2, 4  # killed while it writes the checkpoint of that step

MODEL = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, attention_dropout=0.1
)


class TrainerOnAnyDevice(OverlappedTrainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.device.type == "cpu":
            PartialState().distributed_type = DistributedType.FSDP
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True


def build_trainer(folder: Path, seed: int, save: bool = True) -> Trainer:
    os.environ.setdefault("LOCAL_RANK", "0")  # accelerate asks for it
    torch.manual_seed(seed)
    model = LlamaForCausalLM(MODEL)
    texts = torch.arange(64 * 16).square().remainder(61).view(64, 16)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_strategy="steps" if save else "no",
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=not torch.accelerator.is_available(),
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        disable_tqdm=True,
    )
    data = [{"input_ids": text, "labels": text} for text in texts]
    trainer = TrainerOnAnyDevice(model, arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    return trainer


def losses(trainer: Trainer) -> dict[int, float]:
    """The loss of each step; for a resumed run also of the steps before the kill."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


# %%
# Kill it, resume it
# ------------------
# Each rank runs the first job in a process of its own. SIGKILL ends it at the worst moment: all
# files of the checkpoint are written, and its name is not. The second job resumes. Its model
# starts with other random weights, so whatever it knows comes from the checkpoint. The third job
# is never interrupted and never saves. The losses must be equal, bit by bit.


def prove_without_trainer(trainer: Trainer, directory: Path) -> None:
    """Save by :func:`save_state`, forget the weights, have accelerate load them."""
    weights = list(trainer.model.parameters())
    expected = [weight.to_local().clone() for weight in weights]
    block = Saves(trainer.args.device, writer=TrainerFiles())
    with tempfile.TemporaryDirectory() as aside, block as saves:
        save_state(trainer.accelerator, saves, trainer.model, trainer.optimizer, aside, directory)
    for weight in weights:
        weight.detach().zero_()
    trainer.accelerator.load_state(str(directory))
    for weight, bits in zip(weights, expected, strict=True):
        assert torch.equal(weight.to_local(), bits), "accelerate loads other weights"
    print("accelerator.load_state gives back the weights that save_state wrote during training")


def killed_run(folder: Path) -> None:
    start_rank("killed")
    write = TrainerFiles.write

    def write_and_die(self: TrainerFiles, state: dict, target: Target, *rest: object) -> None:
        write(self, state, target, *rest)
        if f"checkpoint-{KILLED_AT}" in Path(target.name).name:
            os.kill(os.getpid(), signal.SIGKILL)

    TrainerFiles.write = write_and_die
    build_trainer(folder, seed=0).train()


def main(directory: Path) -> None:
    # A fork has imported all this already; but a process that has used CUDA must not be forked.
    start = "spawn" if torch.accelerator.is_available() else "fork"
    first = multiprocessing.get_context(start).Process(target=killed_run, args=(directory,))
    first.start()
    first.join()
    assert first.exitcode != 0, "the first run was to be killed"

    start_rank("resumed")
    try:
        last = get_last_checkpoint(directory)
        if dist.get_rank() == 0:
            print("after the kill:", *sorted(path.name for path in directory.iterdir()))
        assert Path(last).name == f"checkpoint-{KILLED_AT - SAVE_EVERY}", "not complete, yet chosen"
        dist.barrier()
        resumed = build_trainer(directory, seed=1)
        resumed.train(resume_from_checkpoint=True)
        expected = build_trainer(directory, seed=0, save=False)
        expected.train()
        assert losses(resumed) == losses(expected), (losses(resumed), losses(expected))
        print(f"resumed from {Path(last).name}: the losses of the run without a kill, bit by bit")
        dist.barrier()
        print("kept:", *sorted(path.name for path in directory.iterdir()))
        prove_without_trainer(expected, directory / "by_accelerate")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory and known limits
# -----------------------
# * :doc:`/recipes/checkpoint/saves_beside_training` says how much host memory a save takes, and what
#   else must call ``before_update()``.
# * ``load_best_model_at_end`` and ``push_to_hub`` would look for a checkpoint before it is
#   complete: they are refused. ``save_total_limit`` may delete the best one. A hyperparameter
#   search, which uses folders of its own, is not supported.
# * With a plain ``Trainer``, or under DDP, a ``TrainerCallback`` may save by ``CheckpointManager``.
#   Enter it and call ``resume`` in ``on_train_begin``, and set ``state.global_step`` to what that
#   returns. ``Trainer`` counts epochs from 0 then, so a loader that accelerate has prepared raises:
#   let ``get_train_dataloader`` return torchdata's ``StatefulDataLoader``.
# * The class overrides methods of ``Trainer`` whose names begin with an underscore. Another version
#   may call them otherwise; the tests run the one that ``requirements.txt`` pins.
# * A failed save is logged and raises when ``train`` ends, so a full disk does not end training.
# * ``save_model()`` writes nothing with ``SHARDED_STATE_DICT``, here as in ``Trainer``. For a model
#   in the Hub's format, first call
#   ``trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")``, after
#   ``train()``.
#
# Further reading
# ---------------
# * accelerate: `FSDP2 <https://huggingface.co/docs/accelerate/concept_guides/fsdp1_vs_fsdp2>`__
# * `Asynchronous checkpoints asked for in accelerate
#   <https://github.com/huggingface/accelerate/issues/3746>`__
