"""
A whole step: Adam on the host, clipped, scheduled, averaged
============================================================
"""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from queue import PriorityQueue

import torch
import torch.distributed as dist
from streamed_model import HostLayer, StreamedModel, start_rank
from torch import nn
from torch.optim.adamw import adamw

BLOCK = 2**18  # parameters that a thread updates at a time: its fp32 gradients stay in a cache
JOB = 4  # blocks that a thread takes at a time
MOMENTS = ("exp_avg", "exp_avg_sq")


def host_threads() -> int:
    """This rank's part of the machine's cores, less one for the thread that trains."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks - 1)


def update(settings: dict, master, gradient, state: dict, step, skip=None) -> None:
    """One AdamW step of a tensor in fp32; ``step`` counts; nothing changes if ``skip`` is 1."""
    adamw(
        [master],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [step],
        fused=True,
        found_inf=skip,
        amsgrad=False,
        maximize=False,
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        lr=float(settings["lr"]),
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
    )


class LayerUpdate(Future):
    """Done when all of a layer is updated; ``settings``, ``scale`` and ``steps`` are its step's."""

    def __init__(self, groups: list[dict]) -> None:
        super().__init__()
        self.settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.scale, self.steps, self.left, self.lock = 1.0, 0.0, 0, threading.Lock()

    def end_job(self, error: BaseException | None = None) -> None:
        with self.lock:
            self.left -= 1
            if error is not None and not self.done():
                self.set_exception(error)
            elif self.left <= 0 and not self.done():
                self.set_result(None)


class HostAdamW(torch.optim.Optimizer):
    """AdamW in fp32 for a streamed model: its layers on threads of the host, the rest on the device.

    Args:
        params: all trained parameters or groups of them, as for ``torch.optim.AdamW``.
        streamed: the model.
        max_norm: limit of the norm of all gradients, or None.
        in_backward: update each layer as its gradients arrive; no ``max_norm`` then.
        threads: of the host, for updates.

    ``step`` takes the gradients: there is nothing to zero after it. A step whose gradients are not
    finite changes nothing and is counted in ``skipped``.
    """

    def __init__(
        self,
        params: Iterable,
        streamed: StreamedModel,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_norm: float | None = None,
        in_backward: bool = False,
        threads: int | None = None,
    ) -> None:
        if in_backward and max_norm is not None:
            raise ValueError("in backward the norm of all gradients is not known: drop max_norm")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.streamed, self.max_norm, self.in_backward = streamed, max_norm, in_backward
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.synchronises, self.skipped, self.steps = True, 0, torch.zeros(())
        self.group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self.blocks = [self.take(layer) for layer in streamed.layers]
        self.residents = [p for p in self.group_of if p.requires_grad and p not in self.state]
        for p in self.residents:
            state = {"step": torch.zeros((), device=p.device)}
            state["master"] = p.detach() if p.dtype == torch.float32 else p.detach().float()
            self.state[p] = state | {name: torch.zeros_like(state["master"]) for name in MOMENTS}
        self.norms: dict[nn.Parameter, torch.Tensor] = {}
        self.updates: dict[int, LayerUpdate] = {}
        self.latest: Future | None = None  # of the thread of arrivals
        self.due: PriorityQueue = PriorityQueue()
        self.of_thread = threading.local()
        cores = (torch.set_num_threads, (1,))
        self.workers = ThreadPoolExecutor(threads or host_threads(), "adam", *cores)
        self.arrivals = ThreadPoolExecutor(1, "arrivals", *cores)
        self.arrivals.submit(streamed.streams.set_device, streamed.streams.current_device())
        self.register_state_dict_pre_hook(lambda _: streamed.wait())
        for module in streamed.model.modules():
            hook = module.register_load_state_dict_post_hook(lambda module, _: self.reload(module))
            streamed.hooks.append(hook)
        streamed.optimizer, streamed.before_host = self, self.wait_for_updates
        streamed.before_load, streamed.after_gradients = self.await_layer, self.reduce
        streamed.after_store = self.stored

    def take(self, layer: HostLayer) -> list[tuple]:
        """Make masters and moments of a layer; returns blocks: a group's number and its slices."""
        blocks = []
        if missing := [n for n, p in layer.trained.items() if p not in self.group_of]:
            raise ValueError(f"give the optimizer all trained parameters; it lacks {missing}")
        for weights, gradients in zip(layer.weights, layer.gradients, strict=False):
            flat = weights.flat
            state = {"master": flat if flat.dtype == torch.float32 else flat.float()}
            state |= {name: torch.zeros_like(state["master"]) for name in MOMENTS}
            for name, kept in state.items():
                for which, view in weights.views_of(kept).items():
                    self.state[layer.trained[which]] |= {"step": self.steps, name: view}
            pieces = [gradients.flat, flat, *state.values()]
            begins = [*weights.offsets, flat.numel()]
            for number, name in enumerate(weights.shapes):
                group = self.group_of[layer.trained[name]]
                for at in range(begins[number], begins[number + 1], BLOCK):
                    part = slice(at, min(at + BLOCK, begins[number + 1]))
                    blocks.append((group, *(piece[part] for piece in pieces)))
        return blocks

    # The training thread, and autograd's

    def reduce(self, layer: int) -> None:
        """Average a layer's gradients over the ranks, and take their norms."""
        if self.synchronises:
            totals = self.streamed.totals[layer]
            for name, parameter in self.streamed.layers[layer].trained.items():
                self.average(totals[name])
                self.norms[parameter] = torch.linalg.vector_norm(totals[name], dtype=torch.float32)

    def average(self, gradient: torch.Tensor) -> None:
        if self.ranks > 1:
            fp32 = gradient.float()
            dist.all_reduce(fp32)
            gradient.copy_(fp32.div_(self.ranks))

    def stored(self, layer: int) -> None:
        """With ``in_backward``: have a layer updated when its gradients are there."""
        if self.in_backward and self.synchronises:
            mine = [self.norms[p] for p in self.streamed.layers[layer].trained.values()]
            norm = torch.linalg.vector_norm(torch.stack(mine))
            self.updates[layer] = LayerUpdate(self.param_groups)
            known = self.to_host(norm, torch.ones_like(norm))
            self.latest = self.arrivals.submit(self.begin, {layer: self.updates[layer]}, *known)

    def to_host(self, norm: torch.Tensor, scale: torch.Tensor) -> tuple:
        """Queue the copy of two numbers behind the gradients; return them, there and here."""
        streamed = self.streamed
        there, cuda = torch.stack([norm, scale]), norm.is_cuda
        here = torch.empty(2, pin_memory=cuda)
        arrived = streamed.streams.Event(**({"blocking": True} if cuda else {}))
        streamed.d2h.wait_stream(streamed.streams.current_stream())
        with streamed.streams.stream(streamed.d2h):
            here.copy_(there, non_blocking=True)
        arrived.record(streamed.d2h)
        return arrived, here, there

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of each microbatch but the last: gradients are only summed."""
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Queue the update of everything, with the settings of now; wait for nothing."""
        residents = [p for p in self.residents if p.grad is not None]
        for p in residents:
            self.average(p.grad)
            self.norms[p] = torch.linalg.vector_norm(p.grad, dtype=torch.float32)
        norms = [self.norms[p] for p in self.group_of if p in self.norms]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.ones_like(norm)
        if self.max_norm is not None:
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        skip = (~norm.isfinite()).float()
        for p in residents:
            state, settings = self.state[p], self.param_groups[self.group_of[p]]
            update(settings, state["master"], p.grad.float().mul_(scale), state, state["step"], skip)
            if p.dtype != torch.float32:
                p.copy_(state["master"])
        layers = {} if self.in_backward else {i: LayerUpdate(self.param_groups) for i in self.sums()}
        self.updates |= layers
        self.latest = self.arrivals.submit(self.begin, layers, *self.to_host(norm, scale), ends=True)
        self.zero_grad()

    def sums(self) -> list[int]:
        return sorted(self.streamed.summed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those on the host as well."""
        super().zero_grad()
        self.streamed.summed.clear()

    def await_layer(self, layer: int) -> None:
        """Wait until a layer is updated; raises what kept it from that."""
        if self.latest is not None and self.latest.done():
            self.latest.result()
        if layer in self.updates:
            self.updates[layer].result()

    def wait_for_updates(self) -> None:
        if self.latest is not None:
            self.latest.result()
        for each in self.updates.values():
            each.result()

    # Threads of the host

    def begin(self, layers: dict[int, LayerUpdate], arrived, here, there, ends=False) -> None:
        """When gradients and their norm are here: hand out blocks, the lowest layer's first."""
        try:
            arrived.synchronize()
            norm, scale = here.tolist()
            finite = norm - norm == 0
            if not finite and self.in_backward:
                raise FloatingPointError(f"norm {norm}, some layers are updated: load a checkpoint")
            for layer, mine in layers.items():
                mine.scale, mine.steps = scale, self.steps.item()
                jobs = range(0, len(self.blocks[layer]) if finite else 0, JOB)
                mine.left = len(jobs)
                for job in jobs:
                    self.due.put((layer, job, mine))
                    self.workers.submit(self.update_lowest)
                if not jobs:
                    mine.end_job()
            self.steps += ends and finite
            self.skipped += ends and not finite
        except BaseException as error:
            for mine in layers.values():
                mine.end_job(error)
            raise

    def update_lowest(self) -> None:
        """Update some blocks of the lowest layer that is due."""
        layer, job, mine = self.due.get()
        try:
            if not hasattr(self.of_thread, "scratch"):
                self.of_thread.scratch = torch.empty(BLOCK)
            for group, gradient, weight, master, exp_avg, exp_avg_sq in self.blocks[layer][job : job + JOB]:
                fp32 = self.of_thread.scratch[: gradient.numel()].copy_(gradient)
                if mine.scale != 1:
                    fp32.mul_(mine.scale)
                state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
                update(mine.settings[group], master, fp32, state, torch.tensor(mine.steps))
                if weight.dtype != torch.float32:
                    weight.copy_(master)
            mine.end_job()
        except BaseException as error:
            mine.end_job(error)

    # Weights and state that come from elsewhere

    def reload(self, module: nn.Module | None = None) -> None:
        """Make the masters the weights, where something else has changed these since ``wait()``."""
        for p in self.group_of if module is None else module.parameters(recurse=False):
            if p in self.state:
                self.state[p]["master"].copy_(p.detach())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load what ``state_dict`` gave; weights become the rounded masters."""
        self.streamed.wait()
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            ours |= {name: value for name, value in theirs.items() if name != "params"}
        for number, p in enumerate(self.group_of):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[p][name].copy_(value)
            if number in state_dict["state"]:
                p.copy_(self.state[p]["master"])

    def close(self) -> None:
        """End the threads, then close the model."""
        self.arrivals.shutdown()
        self.workers.shutdown()
        self.streamed.close()
