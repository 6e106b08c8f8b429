# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/whole_step.py
"""A whole optimizer step for a streamed model: clipped, scheduled, averaged over ranks."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..ranks import world_size
from . import adam_in_pieces as pieces
from . import device_adam, eight_bit
from .follower import Follower
from .host_layers import Sample
from .ranks_agree import RanksAgree
from .streamable import refuse_layer_drop, refuse_unlike_plain

_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class _Written(NamedTuple):  # what an update of a layer takes: equal later if nobody has changed it
    versions: list[int]  # of its gradients on the host
    sample: list[int]  # of their bytes
    settings: list[dict] | None  # None where a step takes those of its own time


class HostAdamW(torch.optim.Optimizer, Follower):
    """AdamW in fp32 for a streamed model: layers on threads of the host, the rest on the device.

    A context manager: its end waits for the last updates, and the model stays streamed.

    Args:
        params: all trained parameters or groups of them, as for ``torch.optim.AdamW``.
        streamed: the model, from ``stream_layers``.
        max_norm: limit of the norm of all gradients, or None.
        in_backward: update each layer as its gradients arrive; no ``max_norm`` then.
        threads: of the host, for updates; if None, all cores but one that are this rank's: those
            it is bound to, or its part of what the ranks of the host share.
        moments: "fp32", or "8bit": the device updates, by ``eight_bit``. Of host memory it takes
            6.1 bytes a parameter of bfloat16 layers with ``in_backward``, where gradients stay on
            the device and ``grad`` is None, 8.1 without; ``no_sync`` takes 2 more, a save a copy of
            its own. Weights are in bfloat16 or float32. One kernel in Triton updates; where
            Triton or a C compiler is missing, PyTorch's operators do, which are slower.
        more: ``lr``, ``betas``, ``eps`` and ``weight_decay``, as for ``torch.optim.AdamW``.

    ``step`` takes the gradients: none is left to zero. A ``GradScaler`` steps by itself, without
    ``unscale_`` where ``max_norm`` clips. A step whose gradients are not finite
    changes nothing and is counted in ``skipped``; with ``in_backward`` whatever waits next raises
    ``FloatingPointError``. Every rank of the default process group must build one.

    Raises:
        ValueError: ``max_norm`` with ``in_backward``, a setting that this AdamW has not or that no
            AdamW takes, what is trained in float64; a trained parameter of a layer is missing; the
            model has an optimizer or, on several ranks, leaves layers out by chance.
        TypeError: a trained parameter is no dense tensor of torch itself.
        RuntimeError: the host has not the memory; in backward or ``step``: ranks began with other
            weights, or ran other layers; weights, or gradients that are used already, were changed;
            the last microbatch was in ``no_sync``.
    """

    takes_sums = True
    # A ``GradScaler`` leaves gradients as they are, and sets these for the time of its step:
    _step_supports_amp_scaling = True
    grad_scale = 1  # a tensor then: by how much gradients are too large
    found_inf = None

    def __init__(
        self,
        params,
        streamed,
        *,
        max_norm=None,
        in_backward=False,
        threads=None,
        moments="fp32",
        **more,
    ):
        if in_backward and max_norm is not None:
            raise ValueError("in backward the norm of all gradients is not known: drop max_norm")
        if dist.is_initialized() and dist.get_world_size() > 1:
            refuse_layer_drop(streamed.model)
        super().__init__(params, _DEFAULTS | more)
        pieces.refuse_other_adams(self.param_groups, more.keys() - _DEFAULTS.keys())
        pieces.refuse_bad_numbers(self.param_groups)
        self.streamed = streamed
        self.max_norm = max_norm
        self.in_backward = in_backward
        self.group_of = {}  # by parameter the number of its group, in the order of groups
        for number, group in enumerate(self.param_groups):
            pieces.refuse_wide(group["params"])
            for parameter in group["params"]:
                self.group_of[parameter] = number
        refuse_unlike_plain(self.group_of)
        self.host = device_adam.updates_of(streamed, self.group_of, threads, moments, in_backward)
        self.kept = pieces  # how state is kept of what stays on the device
        if moments == "8bit":
            self.kept = eight_bit
        self.synchronises = True  # whether this backward is that of a step's last microbatch
        self.sums_microbatches = False  # whether one has not been the last
        self.taken = set()  # layers of this step whose gradients never went to the host
        self.skipped = 0  # steps
        self.norms = {}  # of averaged gradients, by parameter
        self.written = {}  # by layer: ``written_now`` at the end of backward
        self.samples = []  # by layer: of its gradients
        for layer in streamed.layers:
            self.samples.append(Sample(layer.gradients))
        self.has_compared = False  # the ranks' weights
        self.averaged = []  # layers of this step, in the order in which ranks averaged them
        self.ranks = RanksAgree()

        self.state |= self.host.state
        self.residents = [p for p in self.group_of if p not in self.state]
        for parameter in self.residents:
            if parameter.requires_grad:
                self.state[parameter] = self.kept.state_on_device(parameter)
        self.register_state_dict_pre_hook(lambda _: self.before_state_dict())
        model = streamed.model
        self.hooks = [model.register_state_dict_pre_hook(lambda *_: self.before_state_dict())]
        for module in model.modules():
            self.hooks.append(
                module.register_load_state_dict_post_hook(lambda loaded, _: self.reload(loaded))
            )
        streamed.follower = self
        streamed.optimizer = self
        self.handled = id(sys.exc_info()[1])  # what is being handled where this one is made

    def add_param_group(self, param_group: dict) -> None:
        if hasattr(self, "group_of"):
            raise ValueError("what is trained is fixed: close this one, make another optimizer")
        super().add_param_group(param_group)

    # Forward and backward: what a ``Follower`` is told

    def before_load(self, layer: int) -> None:
        self.host.before_load(layer)

    def may_load(self, layer: int) -> bool:
        return self.host.may_load(layer)

    def before_host(self, raises: bool) -> None:
        self.host.before_host(raises)

    def before_forward(self, layer: int) -> None:
        self.refuse_updated(layer)

    def before_gradients(self, layer: int) -> None:
        if not self.has_compared:
            self.has_compared = True
            self.ranks.refuse_other_weights(self.group_of)
        is_first_of_step = self.synchronises and not self.averaged
        if is_first_of_step:
            layers = self.ranks.heard("backward", lambda: sorted(self.streamed.recorded))
            self.ranks.refuse_other_layers("forward", layers)
        self.refuse_updated(layer)
        self.host.take_changes(layer)  # before any rank of the host can update it

    def refuse_updated(self, layer: int) -> None:
        """With ``in_backward``: a layer's weights must be of the same step as all others."""
        trained = self.streamed.layers[layer].trained.values()
        if self.in_backward and any(parameter in self.norms for parameter in trained):
            raise RuntimeError(
                "updated already: step() comes before the next forward, an evaluation as well; "
                "earlier microbatches go in no_sync(); a model that runs a layer twice in a "
                "forward needs in_backward=False"
            )

    def after_gradients(self, layer: int) -> None:
        """Average a layer's gradients over the ranks, and take their norms."""
        totals = self.streamed.totals[layer]
        if self.synchronises:
            self.averaged.append(layer)
        for name, parameter in self.streamed.layers[layer].trained.items():
            self.norms.pop(parameter, None)  # of earlier microbatches alone
            if self.synchronises:
                self.average(parameter, totals[name])

    def average(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1:
            fp32 = gradient.float()
            dist.all_reduce(fp32)
            gradient.copy_(fp32.div_(ranks))
        self.norms[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)

    def takes_gradients(self, layer: int) -> bool:
        """With 8 bits and ``in_backward``: have a layer updated by gradients that never travel."""
        if self.kept is pieces or not self.in_backward or not self.synchronises:
            return False
        with self.updating(layer):
            self.host.queue(layer, here=True)
        self.taken.add(layer)
        self.streamed.note_taken(layer)
        if not self.sums_microbatches:
            self.streamed.layers[layer].give_gradients_away()
        self.note_at_end(layer)
        return True

    def after_store(self, layer: int) -> None:
        """With ``in_backward``: have a layer updated when its gradients are on the host."""
        self.note_at_end(layer)
        if self.in_backward and self.synchronises:
            with self.updating(layer):
                pass

    def updating(self, layer: int) -> AbstractContextManager:
        """Announce the update of a layer, whose gradients are known; the block is a part of it."""
        self.refuse_changed_weights(layer)
        trained = self.streamed.layers[layer].trained.values()
        norms = [self.norms[parameter] for parameter in trained]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = norm.new_ones(())
        known = pieces.to_host(self.streamed.d2h, norm, scale)
        return self.host.later(self.arrive, [layer], self.settings(), *known)

    def note_at_end(self, layer: int) -> None:
        """Have a layer's gradients noted at this backward's end."""
        noted = partial(self.note_written, layer)
        torch.autograd.Variable._execution_engine.queue_callback(noted)

    def note_written(self, layer: int) -> None:
        """Backward has stored a layer's gradients: note what they are."""
        if self.are_used_by_backward():
            self.written[layer] = self.written_now(layer)

    def are_used_by_backward(self) -> bool:
        """Whether gradients are not to be changed after it: it has used them, or their norms."""
        return self.in_backward or self.max_norm is not None

    def written_now(self, layer: int) -> _Written:
        settings = self.settings() if self.in_backward else None
        if layer in self.taken:
            return _Written([], [], settings)
        gradients = self.streamed.layers[layer].gradients
        versions = [buffer.flat._version for buffer in gradients]
        sample = self.samples[layer].now().tolist()
        return _Written(versions, sample, settings)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of each microbatch but the last: gradients are only summed."""
        self.synchronises = False
        self.sums_microbatches = True
        try:
            yield
        finally:
            self.synchronises = True

    # The step

    @torch.no_grad()
    def step(self, closure=None) -> torch.Tensor | None:
        """Queue the update of everything, with the settings of now; wait for nothing.

        ``closure``, if there is one, computes the gradients first; its loss is returned.
        """
        if self.streamed.optimizer is not self:
            raise RuntimeError("this optimizer has ended: step in its block")
        self.host.check()
        self.refuse_scaler()
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()

        residents = self.agree_on_gradients()
        for p in residents:
            if p not in self.state:  # it was frozen when this was made
                self.state[p] = self.kept.state_on_device(p)
            self.average(p, p.grad)
        layers = sorted(self.streamed.summed | self.taken)
        norms = self.norms_of(residents, layers)
        if not norms:
            return loss

        norm = torch.linalg.vector_norm(torch.stack(norms))
        unscale = torch.ones_like(norm)
        if isinstance(self.grad_scale, torch.Tensor):
            unscale = self.grad_scale.double().reciprocal().float().to(norm.device)
        norm = norm * unscale
        limit = torch.inf if self.max_norm is None else self.max_norm
        scale = (limit / (norm + 1e-6)).clamp(max=1.0) * unscale
        settings = self.settings()
        skip = (~norm.isfinite()).float()
        known = pieces.to_host(self.streamed.d2h, norm, scale)
        to_update = [] if self.in_backward else layers  # in backward, they have been
        with self.host.later(self.arrive, to_update, settings, *known):
            for p in residents:
                group = settings[self.group_of[p]]
                self.kept.update_on_device(group, p, self.state[p], scale, skip)
            self.forget()
        return loss

    def norms_of(self, residents: list[torch.nn.Parameter], layers: list[int]) -> list:
        """Of all that a step trains, in the order of groups."""
        trained = set(residents)
        for layer in layers:
            trained.update(self.streamed.layers[layer].trained.values())
        return [self.norms[p] for p in self.group_of if p in trained]

    def agree_on_gradients(self) -> list[torch.nn.Parameter]:
        """Refuse other layers on other ranks; return what this step trains on the device.

        It is what any rank has a gradient of. On a rank that has none, it is zeros, as
        ``DistributedDataParallel`` has it that finds unused parameters.

        Raises:
            RuntimeError: on all ranks, that they have averaged other layers; or what one of them
                finds wrong with its gradients.
        """
        said = self.ranks.heard("step", self.own_gradients)
        self.ranks.refuse_other_layers("backward", [averaged for averaged, _ in said])
        found = set()
        for _, numbers in said:
            found.update(numbers)
        residents = [self.residents[number] for number in sorted(found)]
        for p in residents:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return residents

    def own_gradients(self) -> tuple[list[int], list[int]]:
        """Layers that this rank has averaged; which parameters on the device have gradients.

        Raises:
            RuntimeError: gradients are not those that backward left, or are sparse.
        """
        found = [number for number, p in enumerate(self.residents) if p.grad is not None]
        for number in found:
            pieces.refuse_sparse(self.residents[number])
        for layer in range(len(self.streamed.layers)):
            self.streamed.forget_dropped_sum(layer)
        for layer in self.streamed.summed | self.taken:
            self.check(layer)
        return self.averaged, found

    def refuse_scaler(self) -> None:
        """Refuse a ``GradScaler`` that would not scale as it does with an AdamW of torch.

        Raises:
            RuntimeError: says what to do.
        """
        if self.found_inf is None:
            return
        if self.in_backward:
            raise RuntimeError(
                "layers are updated already, by scaled gradients: load a checkpoint, and train "
                "with no GradScaler, or with in_backward=False"
            )
        if world_size() > 1:
            raise RuntimeError(
                "a GradScaler of each rank would scale by what its own rank has found: train in "
                "bfloat16 or float32 without one, or on one rank"
            )

    def check(self, layer: int) -> None:
        """Refuse gradients of a layer that are not what backward left."""
        trained = self.streamed.layers[layer].trained.values()
        if any(p not in self.norms for p in trained):
            raise RuntimeError("a layer's last microbatch was in no_sync(): run it outside")
        self.refuse_changed_weights(layer)
        if self.are_used_by_backward() and self.written.get(layer) != self.written_now(layer):
            raise RuntimeError(
                "gradients, or settings, were changed after backward: see max_norm, which clips; a "
                "GradScaler steps without unscale_"
            )

    def refuse_changed_weights(self, layer: int) -> None:
        """Weights must be those of backward, as far as that is counted."""
        if self.host.is_counted(layer):
            raise RuntimeError(
                "weights were changed between backward and step: change them after step() and "
                "wait()"
            )

    def settings(self) -> list[dict]:
        """Of all groups, as they are now: a schedule may change them at once, tensors as well."""
        return [pieces.copy_of_settings(group) for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that are not to be used; too late where layers were updated by them."""
        if self.in_backward and self.norms:
            raise RuntimeError("layers are updated already: step, or load a checkpoint")
        self.forget()

    def forget(self) -> None:
        """Forget all gradients, sums on the host as well."""
        super().zero_grad()
        self.norms.clear()
        self.written.clear()
        self.averaged.clear()
        self.taken.clear()
        self.streamed.summed.clear()

    def arrive(self, announced: dict, arrived, copy, source) -> None:
        """The thread of arrivals: when gradients and their norm are here, have layers updated."""
        arrived.synchronize()
        norm, scale = copy.tolist()
        if copy[0].isfinite():
            self.host.start(announced, scale)
        elif self.in_backward:
            raise FloatingPointError(f"norm {norm}: half updated; load a checkpoint")
        else:
            self.host.drop(announced)
            self.skipped += 1

    # Weights and state that go elsewhere, or come from there

    def before_state_dict(self) -> None:
        """Wait for updates.

        Raises:
            RuntimeError: with ``in_backward``, between backward and step.
        """
        self.streamed.wait()
        if self.in_backward and self.norms:
            raise RuntimeError("layers are updated, and the rest is not: save after step()")

    def reload(self, module: torch.nn.Module | None = None) -> None:
        """Make the masters the weights: something else has changed these after ``wait()``."""
        parameters = list(self.group_of)
        if module is not None:
            parameters = list(module.parameters(recurse=False))
        for p in parameters:
            if "master" not in self.state.get(p, ()):
                continue  # with 8 bits, a digest tells
            master = self.state[p]["master"]
            if not torch.equal(master.to(p.dtype), p):
                master.copy_(p.detach())
        self.host.note_masters(parameters)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load what this or an AdamW of torch gave; weights become the rounded masters.

        Where the moments had 8 bits and have not now, or the weights another dtype, the model loads
        first: what it has is a part of the masters.

        Raises:
            ValueError: it is of other parameters, or of another optimizer.
        """
        groups = state_dict["param_groups"]
        found = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if found != expected:
            raise ValueError("the state is of other parameters")
        pieces.refuse_other_adams(groups)
        eight_bit.refuse_other_states(state_dict["state"].values())
        self.host.begin_load()
        if self.in_backward or self.host.has_failed():
            self.forget()
        for ours, theirs in zip(self.param_groups, groups, strict=True):
            ours |= pieces.copy_of_settings(theirs)
        if self.kept is pieces:
            state_dict = eight_bit.in_fp32(state_dict, self.group_of)
        self.kept.load_states(self.state, self.group_of, state_dict)
        self.host.end_load()

    # The end

    def __enter__(self) -> "HostAdamW":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.end(waits=kind is None)

    def end(self, waits: bool) -> None:
        """End the threads; the model stays streamed, and may get another optimizer.

        Raises:
            Exception: what kept the last updates from being made, if it ``waits`` for them.
        """
        if self.streamed.optimizer is not self:
            return
        try:
            if waits:
                self.streamed.wait()
        finally:
            self.host.close()
            self.samples = []
            for hook in self.hooks:
                hook.remove()
            self.streamed.optimizer = None
            self.streamed.ended.add(self)

    def close(self) -> None:
        """End this and the model's streaming; waits for the updates if no error is on its way."""
        error = sys.exc_info()[1]
        is_on_its_way = error is not None and id(error) != self.handled
        with closing(self.streamed):
            self.end(waits=not is_on_its_way)
