"""
Adam on the host, layer by layer
================================
"""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from queue import PriorityQueue

import torch
import torch.distributed as dist
import weight_streaming as streaming
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

LAYERS = 4
STEPS = 5
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def host_threads() -> int:
    """Cores of this rank, less one for its training thread."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, cores - 1)


class PipelinedAdamW(streaming.StreamedStack):
    def __init__(
        self,
        layers: Iterable[nn.Module],
        device: torch.device,
        *,
        adamw: dict,
        max_norm: float | None = None,
        threads: int | None = None,
        **settings,
    ) -> None:
        super().__init__(layers, device, **settings)
        self.max_norm = max_norm
        self.masters, self.gradients32, self.optimizers = [], [], []
        for weights, gradients in zip(self.weights, self.gradients, strict=True):
            master = weights.flat[: gradients.flat.numel()].float()
            gradient = torch.empty_like(master)
            named = {n: nn.Parameter(view) for n, view in gradients.views_of(master).items()}
            for name, view in gradients.views_of(gradient).items():
                named[name].grad = view
            self.masters.append(master)
            self.gradients32.append(gradient)
            self.optimizers.append(torch.optim.AdamW(named.items(), fused=True, **adamw))

        self.norms: list[list[torch.Tensor]] = [[] for _ in self.weights]
        self.total_norm: torch.Tensor | None = None
        self.received: dict[int, Future] = {}
        self.updated: dict[int, Future] = {}
        self.due: PriorityQueue[int] = PriorityQueue()
        self.group = dist.new_group(backend="gloo")
        team = (torch.set_num_threads, (threads or host_threads(),))
        self.arrivals = ThreadPoolExecutor(1, "arrivals", *team)
        self.updates = ThreadPoolExecutor(1, "updates", *team)

    # On the training thread

    def forward(self, x):
        for future in self.received.values():
            future.result()
        return super().forward(x)

    def load(self, layer: int) -> None:
        if layer in self.updated:
            self.updated[layer].result()
        super().load(layer)

    def store(self, layer: int) -> None:
        wait([self.received[layer]] if layer in self.received else [])
        super().store(layer)
        self.received[layer] = self.arrivals.submit(self.receive, layer)

    # On the thread of arrivals

    def receive(self, layer: int) -> None:
        self.host_done[layer].synchronize()
        gradient = self.gradients32[layer].copy_(self.gradients[layer].flat)
        dist.all_reduce(gradient, group=self.group)
        gradient /= dist.get_world_size()
        views = self.gradients[layer].views_of(gradient)
        self.norms[layer] = [torch.linalg.vector_norm(view) for view in views.values()]
        if self.max_norm is None:
            self.schedule([layer])
        elif layer == 0:
            self.schedule(range(len(self.layers)))

    def schedule(self, layers: Iterable[int]) -> None:
        for layer in layers:
            for name, norm in zip(self.gradients[layer].views, self.norms[layer], strict=True):
                if not norm.isfinite():
                    raise FloatingPointError(f"layer {layer}: the gradient of {name!r}")
        if self.max_norm is not None:
            self.total_norm = get_total_norm([norm for norms in self.norms for norm in norms])
        for layer in layers:
            self.updated[layer] = Future()
            self.due.put(layer)
            self.updates.submit(self.update_lowest)

    # On the thread of updates

    def update_lowest(self) -> None:
        layer = self.due.get()
        try:
            optimizer, master = self.optimizers[layer], self.masters[layer]
            if self.max_norm is not None:
                parameters = optimizer.param_groups[0]["params"]
                clip_grads_with_norm_(parameters, self.max_norm, self.total_norm)
            optimizer.step()
            self.weights[layer].flat[: master.numel()].copy_(master)
            self.updated[layer].set_result(None)
        except BaseException as error:
            self.updated[layer].set_exception(error)

    def finish(self) -> None:
        for future in [*self.received.values(), *self.updated.values()]:
            future.result()

    def close(self) -> None:
        self.arrivals.shutdown()
        self.updates.shutdown()
        dist.destroy_process_group(self.group)
        super().close()


def build_layers() -> Iterable[nn.Module]:
    torch.manual_seed(0)
    return (streaming.Block().bfloat16() for _ in range(LAYERS))


def batch_of(step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    shape = (streaming.BATCH, streaming.TOKENS, streaming.WIDTH)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


class Resident:
    """The same training the ordinary way: no pipeline, one optimizer, its steps after backward."""

    def __init__(self, stack: PipelinedAdamW) -> None:
        self.layers = nn.ModuleList(build_layers())
        self.layouts = stack.gradients
        self.group = stack.group
        self.masters = [
            {n: nn.Parameter(p.detach().float()) for n, p in layer.named_parameters()}
            for layer in self.layers
        ]
        self.parameters = [p for masters in self.masters for p in masters.values()]
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **SETTINGS)

    def step(self, x: torch.Tensor, max_norm: float | None) -> None:
        by_layer = streaming.resident_gradients(self.layers, x, streaming.loss_of)
        for masters, gradients, layout in zip(self.masters, by_layer, self.layouts, strict=True):
            flat = torch.zeros_like(layout.flat, dtype=torch.float32)
            for name, view in layout.views_of(flat).items():
                masters[name].grad = view.copy_(gradients[name])
            dist.all_reduce(flat, group=self.group)
            flat /= dist.get_world_size()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, max_norm)
        self.optimizer.step()
        with torch.no_grad():
            for layer, masters in zip(self.layers, self.masters, strict=True):
                for name, parameter in layer.named_parameters():
                    parameter.copy_(masters[name])


def prove(device: torch.device, max_norm: float | None) -> None:
    stack = PipelinedAdamW(build_layers(), device, adamw=SETTINGS, max_norm=max_norm)
    with closing(stack):
        losses = [stack.step(batch_of(step, device), streaming.loss_of) for step in range(STEPS)]
        stack.finish()
        resident = Resident(stack)
        for step in range(STEPS):
            resident.step(batch_of(step, device), max_norm)
        for layer, masters in enumerate(resident.masters):
            for name, view in stack.gradients[layer].views_of(stack.masters[layer]).items():
                assert torch.equal(view, masters[name]), f"layer {layer}, {name}: masters differ"
                weight = stack.layers[layer].get_parameter(name)
                assert torch.equal(weight, masters[name].bfloat16()), f"layer {layer}, {name}"
        print(f"max_norm {max_norm}: {STEPS} steps", [round(loss.item(), 3) for loss in losses])


def main() -> None:
    device = streaming.start_rank()
    try:
        prove(device, max_norm=None)
        prove(device, max_norm=0.05)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
