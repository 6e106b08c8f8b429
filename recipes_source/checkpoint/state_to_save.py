# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/state_to_save.py
"""
What to save, and how to know that it is right
==============================================

Save what a restart reads, and change nothing by saving it. ``AppState`` holds model, optimizer and
step, of a sharded model and any optimizer. ``assert_same_bits`` is the test that most recipes of
this folder run on themselves.

**When this is all you need:** your state is small, or you save rarely. ``dcp.save`` of
``torch.distributed.checkpoint`` (DCP) stops every rank until the last byte is on disk; the other
recipes of this folder shorten that stop or hide it.

Copy this file, make ``app = AppState(model, optimizer)``, and count ``app.step`` up at each step.
This saves and loads:

.. literalinclude:: state_to_save.py
   :pyobject: save_and_load

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what a state dict for DCP holds
      * how a save before the first step changes training, and how to prevent it
      * what it takes to say that a checkpoint is right

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, CPU or GPU
      * a model sharded with ``fully_shard`` (FSDP2), under DDP, or a plain one

.. verification-badge::

The idea
--------

.. lanes:: Schematic. A resumed job does what the first job would have done.

   job:      0-4 step 1; 4-8 step 2; 8-10 save !; 10-14 step 3; 14-18 step 4
   resumed:  8-10 load !; 10-14 step 3 ~; 14-18 step 4 ~
   @10 the same bits
"""

# %%
# The state: copy this part
# -------------------------
# DCP calls ``state_dict()`` on every ``Stateful`` object that you pass to it, on the calling
# thread. ``get_state_dict`` names optimizer state after its parameter, and returns each rank's
# shards as DTensors. That is why you can load the checkpoint on another number of ranks.
#
# An optimizer that has not stepped has no state. ``get_state_dict`` therefore makes it step once,
# with zero gradients and a learning rate of zero. That step leaves marks: a counted step, weight
# decay in the moments of ``Adam``, a momentum buffer that was not there. Saving before the first step would
# thus change training (`issue 164929 <https://github.com/pytorch/pytorch/issues/164929>`__).
#
# ``AppState`` saves the state that this step made, so that a checkpoint of step 0 loads as later
# ones do. Then it clears the optimizer's state again.
#
# A load needs made-up state, too, because DCP fills tensors that exist. State in the checkpoint for
# which the new job has no tensor is left out without a word. State that the checkpoint lacks makes
# DCP raise, or, in a partial load, stays made up. So ``has_state`` lists which parameters really
# have which state. After a load, those have it, and no others; if the new job has no tensor for
# some, the load raises.
#
# DCP also leaves the state of frozen parameters as it is. ``load`` therefore sets ``requires_grad``
# while DCP loads.

import argparse
import json
import logging
import os
import tempfile
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

NO_STATE = "%s never had a gradient: load with DefaultLoadPlanner(allow_partial_load=True)"
NO_ROOM = "no room here for the checkpoint's state of %s: frozen, or added later than the load?"


def groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    return [*chain.from_iterable(optimizer.param_groups for optimizer in optimizers)]


class AppState(Stateful):
    """All that a restart needs: model, optimizer or a list of them, and the number of steps taken.

    Raises:
        TypeError: an optimizer keeps its state in another one.
        ValueError: two optimizers share a parameter, or a checkpoint does not fit this job.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | list) -> None:
        self.model, self.optimizer, self.step, self.has_state = model, optimizer, 0, ""
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        for outer in self.optimizers:
            for name, inner in vars(outer).items():
                if isinstance(inner, torch.optim.Optimizer) and inner.state is not outer.state:
                    raise TypeError(f"{type(outer).__name__} keeps its state in {name}: pass that")

    def state_dict(self) -> dict:
        model, optim = self.ask()
        return {"model": model, "optimizer": optim, "step": self.step, "has_state": self.has_state}

    def load_state_dict(self, state_dict: dict) -> None:
        self.load(state_dict["model"], state_dict["optimizer"], state_dict["has_state"])
        self.step = state_dict["step"]

    def ask(self) -> tuple[dict, dict]:
        """The states of model and optimizers, with the training left as it was.

        Notes in ``has_state`` which parameters have which state; warns of those that should have.
        """
        new = [optimizer for optimizer in self.optimizers if not optimizer.state]
        gradients = [(p, p.grad) for group in groups(new) for p in group["params"]]
        try:
            for parameter, _ in gradients:  # with gradients there, DCP would make no state
                parameter.grad = None
            model, optim = dcp_state.get_state_dict(self.model, self.optimizers)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer in new:
                optimizer.state.clear()
        made_up, state = [*map(id, groups(new))], optim.get("state", {})
        pairs = [*zip(groups(self.optimizers), optim.get("param_groups", []), strict=True)]
        real = [name for own, saved in pairs if id(own) not in made_up for name in saved["params"]]
        parameters = [p for own, _ in pairs for p in own["params"]]
        if len(parameters) > len(set(parameters)):
            raise ValueError("two optimizers hold one parameter: DCP has room for the state of one")
        noted = {name: [*map(str, state[name])] for name in real if state.get(name)}
        self.has_state = json.dumps(noted)
        for own, saved in pairs:
            names = zip(own["params"], saved["params"], strict=False)
            missing = [name for p, name in names if p.requires_grad and name not in noted]
            if missing and not noted.keys().isdisjoint(saved["params"]):
                logging.getLogger(__name__).warning(NO_STATE, missing)
        return model, optim

    def load(self, model: dict, optim: dict, has_state: str) -> None:
        noted, state = json.loads(has_state), optim["state"]
        if has_state is self.has_state and len(noted) < len(state):
            raise ValueError("no 'has_state' in this checkpoint: load it with set_state_dict")
        if lost := [n for n, keys in noted.items() if not {*keys} <= {*map(str, state.get(n, ()))}]:
            raise ValueError(NO_ROOM % lost)
        state = {n: {k: state[n][k] for k in state[n] if str(k) in noted[n]} for n in noted}
        optim = {**optim, "state": {"": {}, **state}}  # a name: numbers would mean another format
        dcp_state.set_model_state_dict(self.model, model)
        some = dcp_state.StateDictOptions(strict=False)  # not every parameter has state
        parameters = chain(*(group["params"] for group in groups(self.optimizers)))
        frozen = [p.requires_grad_() for p in parameters if not p.requires_grad]  # DCP skips those
        try:
            if self.optimizers:
                dcp_state.set_optimizer_state_dict(self.model, self.optimizers, optim, options=some)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


# %%
# The model that these recipes train
# ----------------------------------
# You need not copy anything from here on. ``SampleCounter`` stands for every buffer that forward
# changes (BatchNorm's statistics, a token count). Its value has to be the same on all ranks. DCP
# assumes that plain tensors are replicated, and keeps **one** rank's copy: if the ranks hold
# different values, the other values are lost without an error.

WIDTH, HIDDEN = 512, 2048  # features
BATCH = 64  # samples per rank and step


def start_rank() -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()  # gloo for CPU tensors, NCCL for CUDA's, as far as built in
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def directory_of_rank_0(directory: Path) -> Path:
    """The directory that rank 0 was given: a checkpoint is one directory for all ranks."""
    agreed = [directory]
    dist.broadcast_object_list(agreed)
    return agreed[0]


class SampleCounter(nn.Module):
    """Count the samples and the numbers that all ranks have seen, in a buffer of two int64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples[0] += x.shape[0] * dist.get_world_size()
        self.samples[1] += x.numel() * dist.get_world_size()
        return x


def build_app(device: torch.device, seed: int = 0) -> AppState:
    """An MLP over (batch, WIDTH) float32, sharded over all ranks, and its AdamW; no step taken."""
    torch.manual_seed(seed)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    model = fully_shard(nn.Sequential(SampleCounter(), up, nn.GELU(), down).to(device))
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def load_app(directory: Path, device: torch.device) -> AppState:
    """A new application state, initialised with another seed, then loaded from ``directory``."""
    app = build_app(device, seed=1)
    dcp.load({"app": app}, checkpoint_id=directory)
    return app


def next_batch(app: AppState, device: torch.device) -> torch.Tensor:
    """A batch that depends on the step and the rank alone."""
    torch.manual_seed(1000 * app.step + dist.get_rank())
    return torch.randn(BATCH, WIDTH, device=device)


def forward_backward(app: AppState, device: torch.device) -> None:
    app.model(next_batch(app, device)).square().mean().backward()


def train_step(app: AppState, device: torch.device) -> None:
    forward_backward(app, device)
    app.optimizer.step()
    app.optimizer.zero_grad()
    app.step += 1


# %%
# The test
# --------
# A checkpoint is right when loading it gives back the very bits that you passed to ``save``: of
# the weights, both Adam moments, the optimizer's step counts and settings, the buffer, and the
# step.


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of a nested state dict by path; a DTensor counts as this rank's shard."""
    if isinstance(tree, dict):
        tree = tree.items()
    elif isinstance(tree, list):
        tree = enumerate(tree)
    else:
        return {path: tree.to_local() if isinstance(tree, DTensor) else tree}
    return {p: leaf for key, value in tree for p, leaf in leaves(value, f"{path}/{key}").items()}


def snapshot(app: AppState) -> dict[str, object]:
    """Copy every leaf, for :func:`assert_same_bits`; needs the memory of the state once more."""
    live = leaves(app.state_dict())
    return {p: leaf.detach().clone() if torch.is_tensor(leaf) else leaf for p, leaf in live.items()}


def staged_bytes(app: AppState) -> int:
    """Bytes that this rank's part of the state takes."""
    tensors = [leaf for leaf in leaves(app.state_dict()).values() if isinstance(leaf, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):  # as bytes: 0.0 and -0.0 are equal numbers
        return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
    return a == b


def assert_same_bits(app: AppState, expected: dict[str, object]) -> None:
    """Raise AssertionError naming the leaves of ``app`` that differ in any bit."""
    found = leaves(app.state_dict())
    assert found.keys() == expected.keys(), f"other keys: {found.keys() ^ expected.keys()}"
    differing = [path for path, leaf in expected.items() if not same_bits(found[path], leaf)]
    assert not differing, f"step {expected['/step']}: {differing[:3]} of {len(differing)} differ"


# %%
# Run it, and prove it
# --------------------
# A job saves before its first step and after its second, and trains on. Two other jobs start from
# the two checkpoints. All three must end with the bits of a job that never saved.


def save_and_load(app: AppState, directory: Path, device: torch.device) -> AppState:
    dcp.save({"app": app}, checkpoint_id=directory)
    resumed = build_app(device, seed=1)  # whatever your job begins with
    dcp.load({"app": resumed}, checkpoint_id=directory)
    return resumed


def train(app: AppState, last_step: int, device: torch.device) -> AppState:
    while app.step < last_step:
        train_step(app, device)
    return app


def main(directory: Path) -> None:
    device = start_rank()
    root, app = directory_of_rank_0(directory), build_app(device)
    never_saved = snapshot(train(build_app(device), 4, device))
    from_0 = save_and_load(app, root / "step0", device)
    from_2 = save_and_load(train(app, 2, device), root / "step2", device)
    assert_same_bits(from_2, snapshot(app))
    print("step 2 loaded back, every bit equal")
    for job in (app, from_0, from_2):
        assert_same_bits(train(job, 4, device), never_saved)
    print("saved and resumed jobs end like one that was never saved")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit below was made and run when this page was built.
#
# .. recipe-controls::
#
# What is not here
# ----------------
# A real job saves more: the learning-rate schedule, the random number generators, the position in
# the data, and an average of the weights if it keeps one. Add each as another entry of the dict.
# :doc:`resume_and_reshard` does so.
#
# Known limits
# ------------
# * DCP cannot write sparse or nested tensors and raises: save the dense tensors that they are made
#   of. A named tuple may come back as a tuple.
# * The step that ``get_state_dict`` makes runs the optimizer's hooks. If a hook updates an average
#   of the weights, it counts the first weights once more.
# * A parameter that no backward has reached has no optimizer state, so the checkpoint has none for
#   it; the save logs a warning. The job that loads the checkpoint expects some, and ``dcp.load``
#   ends with ``Missing key``. Load with ``DefaultLoadPlanner(allow_partial_load=True)``.
# * Freeze a layer, or leave it out of the optimizer, after the load: if it had state at the save, the
#   load raises otherwise. State that an optimizer adds after its first step also makes a load into a
#   new job raise.
# * A load that raises may have loaded the weights already.
# * Optimizers that wrap another are refused. Pass what they wrap (``sam.base_optimizer``). Instead of
#   ``ZeroRedundancyOptimizer``, use ``fully_shard``.
# * An optimizer that keeps nothing in ``state``, and moments in attributes of its own, makes such a
#   step whenever the state is asked for: its moments shrink, and are not saved.
# * ``dcp.save`` into a directory that holds a checkpoint writes over it, file by file. If that
#   fails half way, the directory loads, half old and half new: see :doc:`async_save`.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: the reference
