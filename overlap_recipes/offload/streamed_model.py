# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/streamed_model.py
"""A stock model whose layers are streamed from the host under its own forward."""

from collections.abc import Iterable
from functools import partial
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import host_memory
from . import arguments, caches
from . import layer_as_node as node
from .layer_state import version_of
from .streamable import refuse_shared_parameters, refuse_unfit
from .weight_streaming import GRADIENT_SLOTS, StreamedLayers

# Private by name: ``_parameters`` of modules, ``_backward_hooks`` and
# ``_post_accumulate_grad_hooks`` of parameters, ``_execution_engine`` of autograd,
# ``_active_ddp_module`` of DDP, ``torch._C._current_graph_task_id``.

_MOMENTS_BYTES = 8  # of a trained parameter: two of Adam in fp32
_MASTER_BYTES = 4  # of one in another dtype: fp32 is its own master


def resident_bytes(layer: nn.Module) -> int:
    """What a layer takes on the device, with its gradients and the state of Adam in fp32."""
    total = 0
    for parameter in layer.parameters():
        total += parameter.nbytes
        if parameter.requires_grad:
            total += parameter.nbytes + _MOMENTS_BYTES * parameter.numel()
            if parameter.dtype != torch.float32:
                total += _MASTER_BYTES * parameter.numel()
    return total


def _split(layers: list[nn.Module], budget: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """The lowest layers, as many as ``budget`` bytes of the device hold; and the others."""
    resident = []
    streamed = list(layers)
    while streamed and resident_bytes(streamed[0]) <= budget:
        lowest = streamed.pop(0)
        budget -= resident_bytes(lowest)
        resident.append(lowest)
    return resident, streamed


def _bytes_to_take(layers: list[nn.Module], gradient_dtype: torch.dtype | None) -> int:
    """Of host memory, for layers and their gradients; weights there give back what they have."""
    files = host_memory.MappedFiles()
    nbytes = 0
    for parameter in nn.ModuleList(layers).parameters():
        if not parameter.is_cpu or files.hold(parameter):
            nbytes += parameter.nbytes
        if parameter.requires_grad:
            nbytes += parameter.numel() * (gradient_dtype or parameter.dtype).itemsize
    return nbytes


class _ResidentLayers:
    """Layers that stay on the device; backward runs them again like the others."""

    def __init__(self) -> None:
        self.alike = set()  # layers, by their mode, whose second run has given what the first had
        self.plain = []

    def take(self, layers: list[nn.Module]) -> None:
        """Run these by ``call`` from here on."""
        for index, layer in enumerate(layers):
            self.plain.append(node.Plain(layer))
            layer.forward = node.marked(partial(self.call, index))

    def call(self, index: int, /, *args, **kwargs):
        """What ``layer.forward`` is now: the layer, checkpointed.

        It runs on views of its inputs. So its own gradients of an input are added up before they
        are added to what comes from elsewhere, as from a layer that is streamed. The lists and
        dicts that it was given get what it has put into their copies.
        """
        if not torch.is_grad_enabled():
            caches.refuse_going_on(args, kwargs)
            return self.run(index, args, kwargs)
        node.refuse_func()
        args, kwargs = caches.empty_copies(index, args, kwargs)
        inputs = arguments.inputs_of((args, kwargs))
        views = [x.view_as(x) for x in inputs]
        view_of = {}  # by the input's ``id``
        input_of = {}  # by the view's ``id``
        for x, view in zip(inputs, views, strict=True):
            view_of[id(x)] = view
            input_of[id(view)] = x
        its_args, its_kwargs = arguments.exchanged((args, kwargs), view_of)
        result, left = self.checkpointed(index, its_args, its_kwargs)
        node.hand_out_hooks(zip(inputs, views, strict=True))
        arguments.handed_back((args, kwargs), arguments.exchanged(left, input_of))
        return result

    def checkpointed(self, index: int, args: tuple, kwargs: dict) -> tuple:
        """The layer's result, and the arguments as it has left them.

        Raises:
            RuntimeError: the layer calls backward.
        """
        gradients = self.gradients_of(index)
        run = node.Run(self, index)
        with node.early_stop(self, index):
            result, left = node.checkpoint(run, args, kwargs, use_reentrant=False)
        if self.gradients_of(index) != gradients:
            raise RuntimeError(
                f"{self.title(index)} calls backward in its forward, and would again when backward "
                "runs it again: return what a loss is computed with, or keep such layers out"
            )
        return result, left

    def gradients_of(self, index: int) -> list[tuple[int, int]]:
        """Which gradients a layer's weights have, and how often each has changed."""
        gradients = [parameter.grad for parameter in self.plain[index].parameters()]
        return [(id(g), version_of(g)) for g in gradients if g is not None]

    def sources(self, index: int) -> list[torch.Tensor]:
        """A layer's weights."""
        return list(self.plain[index].parameters())

    def sample(self, index: int) -> torch.Tensor:
        """None of its elements: backward uses the weights that are there, as without us."""
        return torch.empty(0)

    def is_differentiated(self, index: int) -> bool:
        """Backward finds the weights in any case."""
        return True

    def title(self, index: int) -> str:
        return f"layer {index} ({type(self.plain[index].layer).__name__})"

    def run(self, index: int, args: tuple, kwargs: dict):
        return self.plain[index](*args, **kwargs)

    def close(self) -> None:
        """Give the layers their forward back."""
        while self.plain:
            self.plain.pop().give_back()


class StreamedModel(StreamedLayers):
    """A model whose layers live in host memory; everything else of it moves to the device.

    Args:
        model: any module; its forward is not changed.
        layers: those of its submodules that run one after the other, in order.
        device: where it runs.
        budget: bytes of device memory for layers that stay there, the lowest ones, each with its
            gradients and the state of Adam.
        settings: of ``StreamedLayers``.
    """

    group = None  # by which ranks tell each other what they take; the job's own if None

    def __init__(self, model: nn.Module, layers: Iterable, device, *, budget=0, **settings) -> None:
        layers = list(layers)

        def count_bytes() -> int:
            refuse_unfit(model, layers)
            _, streamed = _split(layers, budget)
            refuse_shared_parameters(model, streamed)
            return _bytes_to_take(streamed, settings.get("gradient_dtype"))

        host_memory.refuse_more_than_free(
            count_bytes,
            "weights and gradients of layers",
            "free some, keep more layers on the device by budget=, or take a host with more",
            self.group,
        )
        resident, streamed = _split(layers, budget)
        # Before ``super().__init__``, which names layers; and ``give_back``, if that fails.
        self.model = model
        self.optimizer = None  # a ``HostAdamW``, which waits for its layers by itself
        self.ended = WeakSet()  # optimizers whose state is in the host's memory as long as they are
        self.hooks = []
        self.summed = set()  # layers of whose gradients the host has a sum
        self.stored_by = {}  # by layer: the number of the backward that has stored its gradients
        self.resident = _ResidentLayers()
        self.resident_below = len(resident)
        try:
            super().__init__(streamed, torch.device(device), **settings)
            self.move_the_rest(set(nn.ModuleList(streamed).parameters()))
            self.resident.take(resident)
            self.register_hooks(streamed)
        except BaseException:
            self.give_back()
            raise

    def move_the_rest(self, of_layers: set[nn.Parameter]) -> None:
        """What is no weight of a streamed layer goes to the device."""
        for parameter in set(self.model.parameters()) - of_layers:
            parameter.data = parameter.data.to(self.device)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    def register_hooks(self, layers: list[nn.Module]) -> None:
        """Be told of saves and loads of weights, of steps, and of gradients from outside."""
        for module in nn.ModuleList(layers).modules():
            saves = module.register_state_dict_pre_hook(self.before_state_dict)
            loads = module.register_load_state_dict_pre_hook(self.before_load_state_dict)
            self.hooks += [saves, loads]
        self.hooks.append(register_optimizer_step_pre_hook(self.before_step))
        for index, layer in enumerate(self.layers):
            for parameter in layer.trained.values():
                self.hooks.append(parameter.register_hook(partial(self.outside, index)))

    def call(self, index: int, /, *args, **kwargs):
        """What ``layer.forward`` is now."""
        with node.named(self.title(index)), self.one_thread_at_a_time():
            node.refuse_func()
            self.check(self.layers[index])
            self.follower.before_forward(index)
            if torch.is_grad_enabled():
                self.refuse_ddp()
                number = self.resident_below + index
                args, kwargs = caches.empty_copies(number, args, kwargs)
            else:
                caches.refuse_going_on(args, kwargs)
            return self.forward(index, args, kwargs)

    def backward_of(self, index: int, begins: list, pairs: list, trains: bool) -> list:
        frozen = [n for n, p in self.layers[index].trained.items() if not p.requires_grad]
        if trains and frozen:
            raise RuntimeError(
                f"{frozen[0]} was frozen between forward and backward: freeze it after backward, "
                "and stream the model again"
            )
        if trains:
            self.refuse_sums_that_nobody_takes(index)
        return super().backward_of(index, begins, pairs, trains)

    @staticmethod
    def refuse_ddp() -> None:
        """Refuse a model inside of DDP, which sees no gradient of a streamed layer.

        Raises:
            RuntimeError: the ranks' weights would grow apart.
        """
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise RuntimeError(
                "DistributedDataParallel sees no gradient of a streamed layer, and ranks would "
                "grow apart: leave it out, HostAdamW averages gradients over the ranks"
            )

    @staticmethod
    def check(layer) -> None:
        """Refuse a ``HostLayer`` whose parameters are not those that were taken, or have hooks."""
        taken = {}
        for weights in layer.weights:
            taken |= weights.views
        for name, p in layer.module.named_parameters():
            trained = name in layer.trained
            moved = name not in taken or p.data_ptr() != taken[name].data_ptr()
            retrained = torch.is_grad_enabled() and p.requires_grad is not trained
            if moved or retrained:
                raise RuntimeError(
                    f"{name}: its memory, or what is trained, has changed; take it again"
                )
            ours = 1 if trained else 0  # ``outside``
            if len(p._backward_hooks or ()) > ours or p._post_accumulate_grad_hooks:
                raise RuntimeError(f"{name}: a parameter's hooks do not run here: use its grad")

    def refuse_sums_that_nobody_takes(self, layer: int) -> None:
        """Gradients in another dtype are in no ``parameter.grad``: only ``HostAdamW`` sees them.

        Raises:
            RuntimeError: there is none: an optimizer of torch would not train the layers.
        """
        dtype = self.layers[layer].sums_in_other_dtype()
        if dtype is not None and not self.follower.takes_sums:
            raise RuntimeError(
                f"gradients in {dtype} are for HostAdamW: build it before backward, or leave "
                "gradient_dtype out"
            )

    # Sums of microbatches

    def forget_dropped_sum(self, layer: int) -> None:
        """Forget the host's sum of a layer if ``zero_grad()`` has dropped it.

        Raises:
            RuntimeError: a ``parameter.grad`` is another tensor now, or gone alone; all is closed.
        """
        if not self.plain:
            raise RuntimeError("this model is closed")
        are_there = []  # of the gradients that ``hand_out_gradients`` has made a ``parameter.grad``
        is_exchanged = False
        for buffer in self.layers[layer].gradients:
            for name, view in buffer.views.items():
                parameter = self.layers[layer].trained[name]
                grad = parameter.grad
                if grad is not None:
                    has_moved = grad.data_ptr() != buffer.addresses[name]
                    if has_moved or grad is not view:
                        is_exchanged = True
                if parameter.dtype == view.dtype:
                    are_there.append(grad is not None)
        if are_there and not any(are_there):
            self.summed.discard(layer)  # zero_grad() has forgotten it
        has_sum = layer in self.summed
        if is_exchanged and not has_sum:
            raise RuntimeError(
                f"weights of {self.title(layer)} got gradients outside of its forward (its parts "
                "are called, or its weights used, elsewhere), or parameter.grad was exchanged: "
                "change it in place, or drop all; what uses a layer's weights outside of it goes "
                "in a backward of its own, after that"
            )
        has_gone_alone = has_sum and not all(are_there)
        if is_exchanged or has_gone_alone:
            raise RuntimeError(
                "parameter.grad was exchanged: change it in place, or drop all; what uses a "
                "layer's weights outside of it goes in a backward of its own, after that"
            )

    def load_sum(self, layer: int) -> bool:
        """Queue the copy of earlier microbatches' sum into the gradient slot, if there is one."""
        self.forget_dropped_sum(layer)
        if layer not in self.summed:
            return False
        slot = layer % GRADIENT_SLOTS
        here = self.gradient_flats[layer]
        on_host = self.layers[layer].gradients
        self.h2d.wait_event(self.grad_free[slot])
        with self.streams.stream(self.h2d):
            for flat, host in zip(here, on_host, strict=True):
                flat.copy_(host.flat, non_blocking=True)
        self.sum_ready[slot].record(self.h2d)
        return True

    def store(self, layer: int) -> None:
        super().store(layer)
        self.summed.add(layer)
        self.note_backward(layer)
        # At the end of this backward:
        torch.autograd.Variable._execution_engine.queue_callback(self.host_done[layer].synchronize)

    def note_backward(self, layer: int) -> None:
        """A layer's gradients are used: none may be added to them in the backward that runs."""
        self.stored_by[layer] = torch._C._current_graph_task_id()

    def note_taken(self, layer: int) -> None:
        """They were used on the device: what the host has of earlier microbatches is of no use."""
        self.note_backward(layer)
        self.summed.discard(layer)
        for parameter in self.layers[layer].trained.values():
            parameter.grad = None

    def outside(self, layer: int, gradient: torch.Tensor | None) -> None:
        """Refuse a gradient that autograd would add to one that is on its way to the host.

        The layer's own node gives none to its weights here: it has stored theirs.
        """
        if gradient is None:
            return
        if self.stored_by.get(layer) == torch._C._current_graph_task_id():
            raise RuntimeError(
                f"a weight of {self.title(layer)} is used outside of it: in a backward of its own"
            )

    # The host's side

    def wait(self, raises: bool = True) -> None:
        """Wait for updates and copies: then the host may read gradients, and change weights.

        A failed update is raised, unless weights are going to be loaded.
        """
        self.follower.before_host(raises)
        super().wait()
        self.held.clear()  # what the device has may be old then
        torch.clear_autocast_cache()

    def before_state_dict(self, *_) -> None:
        self.wait()

    def before_load_state_dict(self, *_) -> None:
        self.wait(raises=False)

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Before any optimizer's step, but that of one which waits by itself, layer by layer."""
        torch.clear_autocast_cache()  # of an autocast around several steps
        if optimizer is not self.optimizer:
            self.wait()

    def give_back(self) -> None:
        """Let the layers run as they did before, and nothing be told any more."""
        for hook in self.hooks:
            hook.remove()
        self.resident.close()
        super().give_back()
