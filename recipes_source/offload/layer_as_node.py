# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/layer_as_node.py
"""
Any layer as one node: run again in backward, differentiated by you
===================================================================

Decide yourself when a layer's weights are there in backward, and where its gradients go. This
recipe puts any layer into the model's autograd graph as **one node** whose backward is a function
of yours. Forward keeps only the layer's inputs; backward runs the layer again. Gradients keep every
bit. It is a building block: :doc:`weight_streaming` fills in the function.

**When not to bother:** all you want is less memory. ``torch.utils.checkpoint`` by itself is
simpler.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * a graph inside a node, differentiated when you say so
      * layers with keyword arguments, nested inputs, several outputs
      * a recomputation that repeats no matmul in vain, and no random number

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

Forward runs the layer under ``torch.utils.checkpoint``, which keeps its inputs alone, in a graph of
its own, and gives detached results to the model's graph. When backward comes to the node, it hands
your function the two ends of the inner graph. One call of ``torch.autograd.grad`` between them runs
the layer again and returns all of its gradients at once: no hooks on parameters, no guess when the
last gradient of a layer has come.

.. lanes:: Schematic. Three layers; in backward each runs again inside its node. Your function fetches weights (W) and takes gradients (G).

   compute: 0-4 F0; 4-8 F1; 8-12 F2; 12-21 again and B2; 21-30 again and B1; 30-39 again and B0
   yours:   12-13 W2 ~; 20-21 G2 ~; 21-22 W1 ~; 29-30 G1 ~; 30-31 W0 ~; 38-39 G0 ~
"""

# %%
# Imports and sizes
# -----------------
# They are the proof's, whose toys come from :doc:`host_layers`.

from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from host_layers import BATCH, TOKENS, WIDTH, Block, loss_of
from torch import nn
from torch.func import functional_call

from overlap_recipes.offload.layer_as_node import Plain, as_node
from overlap_recipes.ranks import start_rank

LAYERS = 3

# %%
# Any arguments
# -------------
# Layers of libraries take masks, positions and caches, by keyword, nested in tuples. Tensors that
# require gradients must enter the inner graph, and those that leave it the outer one; all else is
# passed as it is.
#
# Lists and dicts that a layer is given are copied for each of its runs: it may fill them, as Gemma 3n
# does to share keys and values. What it put in leaves the node like its result, and is handed back
# to the caller's list or dict.
#
# .. literalinclude:: /overlap_recipes/offload/arguments.py
#    :language: python
#    :pyobject: tensors_in
#
# .. literalinclude:: /overlap_recipes/offload/arguments.py
#    :language: python
#    :pyobject: Copying
#
# .. literalinclude:: /overlap_recipes/offload/arguments.py
#    :language: python
#    :pyobject: handed_back
#
# A graph inside a node
# ---------------------
# ``checkpoint`` restores torch's random state for the second run, so dropout repeats itself, and it
# **stops early**: when the last tensor that backward needs is there, the rest of the layer is not
# run. In a block that ends in a matmul, that matmul is not repeated.
#
# To differentiate the inner graph later it is enough to know where it begins and ends
# (``get_gradient_edge``). A leaf at the beginning would keep the input a second time; a node of our
# own keeps nothing. After use the ends are dropped, and with them the layer's input.
#
# Four programs would go wrong in silence, and are errors instead:
#
# * An argument or a weight is changed in place between forward and backward. Autograd has saved
#   nothing to compare, so ``Run`` compares versions.
# * A layer changes an argument that is no list or dict, and is not seen inside: ``held_by`` compares
#   the tensors that it holds.
# * A tensor that is trained comes into a layer by another way than its arguments: ``leaves_of``
#   finds it at the end of the inner graph.
# * A tensor leaves it by another way than its result, with a hook that keeps it, say, and a loss is
#   computed with it. Then backward comes through the ``Entrance``, or to a weight, which it never
#   does otherwise.
#
# A layer may change more than its weights: BatchNorm its statistics, a router its counts, any class
# what it keeps on itself. The second run must see all that as the first did, and leave it alone.
# So ``Run`` takes a ``LayerState`` before the first one, and puts it back for the second.
#
# ``Plain`` runs the forward that a layer had before its ``forward`` was exchanged, so that
# ``functional_call`` can give it weights from elsewhere.
#
# .. literalinclude:: /overlap_recipes/offload/layer_as_node.py
#    :language: python
#    :pyobject: refuse
#
# .. literalinclude:: /overlap_recipes/offload/layer_as_node.py
#    :language: python
#    :pyobject: leaves_of
#
# .. literalinclude:: /overlap_recipes/offload/layer_as_node.py
#    :language: python
#    :pyobject: Run
#
# .. literalinclude:: /overlap_recipes/offload/layer_state.py
#    :language: python
#    :pyobject: LayerState
#
# .. literalinclude:: /overlap_recipes/offload/layer_as_node.py
#    :language: python
#    :pyobject: Entrance
#
# .. literalinclude:: /overlap_recipes/offload/layer_as_node.py
#    :language: python
#    :pyobject: Through
#
# .. literalinclude:: /overlap_recipes/offload/layer_as_node.py
#    :language: python
#    :pyobject: Plain
#
# .. literalinclude:: /overlap_recipes/offload/layer_as_node.py
#    :language: python
#    :pyobject: as_node
#
# Run it, and prove it
# --------------------
# The same layers, ordinary and as nodes: the gradients of all weights and of the input must have
# the same bits, with dropout and a buffer that each forward changes, and every layer must have run
# twice, the second time last first.


class Noted(nn.Module):
    """Takes keyword arguments, drops features, counts its calls, returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.dropout = Block(), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: dict) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        y = self.dropout(self.block(x * self.calls)) * scale["by"]
        return y, y.argmax(-1)


class Owner:
    """Weights that wait elsewhere: here in a list, in the next recipe in the memory of the host."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.plain, self.runs, self.gradients = [Plain(layer) for layer in layers], [], {}
        self.views = [dict(plain.named_parameters()) for plain in self.plain]
        for index, layer in enumerate(layers):
            layer.forward = partial(self.call, index)

    def call(self, index: int, *args, **kwargs):
        return as_node(self, index, args, kwargs)

    def sources(self, index: int) -> list[torch.Tensor]:
        return list(self.views[index].values())

    def sample(self, index: int) -> torch.Tensor:
        return torch.cat([weight.detach().flatten()[:4] for weight in self.sources(index)])

    def title(self, index: int) -> str:
        return f"layer {index}"

    def run(self, index: int, args: tuple, kwargs: dict):
        self.runs.append(index)
        return functional_call(self.plain[index], self.views[index], args, kwargs)

    def backward(self, index: int, begins: list, pairs: list, trains: bool) -> list:
        ends, grads = zip(*pairs, strict=True)
        weights = list(self.views[index].values()) if trains else []
        found = torch.autograd.grad(ends, weights + begins, grads)
        self.gradients[index] = found[: len(weights)]
        return list(found[len(weights) :])


def output_of(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # of dropout
    for layer in layers:
        x, _ = layer(x, scale={"by": torch.full((), 0.5, device=x.device)})
    return x


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        layers = nn.ModuleList(Noted() for _ in range(LAYERS)).to(device)
        x = torch.randn(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
        ordinary = deepcopy(layers)
        loss_of(output_of(ordinary, x)).backward()
        expected = [p.grad for p in ordinary.parameters()] + [x.grad]
        x.grad = None
        owner = Owner(layers)
        loss_of(output_of(layers, x)).backward()
        found = [gradient for index in range(LAYERS) for gradient in owner.gradients[index]]
        assert all(map(torch.equal, [*found, x.grad], expected))
        forward = list(range(LAYERS))
        assert owner.runs == forward + forward[::-1]
        assert all(map(torch.equal, layers.buffers(), ordinary.buffers()))
        print(f"layers ran in the order {owner.runs}: the same gradients, bit by bit")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# When it is not worth it
# -----------------------
# * A layer is run several times in one forward with different weights: each run is a node of its
#   own, and ``owner`` must know which weights it had.
#
# Memory
# ------
# The inputs of each layer, and what autograd saves in one layer at a time.
#
# Limits that are silent
# ----------------------
# * Seen by the second run as the first one left it: what an object of another class holds that a
#   layer keeps, or another module. Random numbers of NumPy, or of a generator that is no attribute of
#   a module of the layer, are drawn anew.
# * A ``TorchFunctionMode`` or dispatch mode that changes results must be on around backward, too. The
#   default dtype and the kernels of attention are those of forward.
# * ``torch.nn.functional.rrelu`` gives wrong gradients under any checkpoint that stops early
#   (pytorch#193671). ``nn.RReLU`` is right here.
#
# Known limits
# ------------
# * The inner graph is used once: ``backward(retain_graph=True)`` twice raises.
# * Second derivatives are not recorded: a loss with a gradient in it (``create_graph=True``)
#   raises.
# * Tensors inside other objects, such as dataclasses, are passed as they are: one that is trained
#   is an error. So is a loss with a tensor that a hook or ``output_attentions`` took out of a
#   layer.
# * ``torch.autograd.grad`` gives gradients of inputs and leaves the weights alone, as anywhere.
#   Here ``backward(inputs=...)`` leaves them alone, too: weights that are named there get no
#   gradient.
#
# Further reading
# ---------------
# * `torch.utils.checkpoint <https://docs.pytorch.org/docs/stable/checkpoint.html>`__
# * `Extending torch.autograd
#   <https://docs.pytorch.org/docs/stable/notes/extending.html>`__
