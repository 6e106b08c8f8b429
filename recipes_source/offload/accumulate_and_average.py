"""
Sum gradients on the host
=========================
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch
import torch.distributed as dist
import weight_streaming as streaming
from torch import nn

MICROBATCHES = 3
LAYERS = 4
STEPS = 2
SUM_DTYPE = torch.float32
CHUNK = 2**18  # elements added at a time: their fp32 copy stays in the cache of one core


class HostSums(streaming.StreamedStack):
    def __init__(
        self,
        layers: Iterable[nn.Module],
        device: torch.device,
        *,
        backwards: int,
        threads: int = 1,
        **settings,
    ) -> None:
        super().__init__(layers, device, **settings)
        self.backwards = backwards
        self.sums = [torch.empty_like(g.flat, dtype=SUM_DTYPE) for g in self.gradients]
        self.added: dict[int, Future] = {}
        self.group = dist.new_group(backend="gloo")
        self.worker = ThreadPoolExecutor(1, "host sums", torch.set_num_threads, (threads,))

    def store(self, layer: int) -> None:
        if layer in self.added:
            self.added[layer].result()
        backward = self.stores // len(self.layers) % self.backwards
        super().store(layer)
        self.added[layer] = self.worker.submit(self.add, layer, backward)

    def add(self, layer: int, backward: int) -> None:
        self.host_done[layer].synchronize()
        total, gradient = self.sums[layer], self.gradients[layer].flat
        for part, new in zip(total.split(CHUNK), gradient.split(CHUNK), strict=True):
            if backward == 0:
                part.copy_(new)
            else:
                part.add_(new)
        if backward == self.backwards - 1:
            dist.all_reduce(total, group=self.group)
            total /= dist.get_world_size()

    def finish(self) -> list[dict[str, torch.Tensor]]:
        for layer in self.added:
            self.added[layer].result()
        return [g.views_of(total) for g, total in zip(self.gradients, self.sums, strict=True)]

    def close(self) -> None:
        self.worker.shutdown()
        dist.destroy_process_group(self.group)
        super().close()


class LayerMajor(streaming.StreamedStack):
    def step(
        self, batches: list[torch.Tensor], loss_function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        outputs = [y.requires_grad_() for y in self.forward(batches)]
        losses = [loss_function(y) for y in outputs]
        torch.autograd.backward(losses)
        self.backward([y.grad for y in outputs])
        return torch.stack(losses).detach()

    def compute_forward(self, layer: int, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        compute = super().compute_forward
        return [compute(layer, x) for x in xs]

    def compute_backward(
        self,
        layer: int,
        xs: list[torch.Tensor],
        grad_ys: list[torch.Tensor],
        views: dict[str, torch.Tensor],
    ) -> list[torch.Tensor | None]:
        grad_xs = []
        for microbatch, (x, grad_y) in enumerate(zip(xs, grad_ys, strict=True)):
            grad_x, gradients = self.differentiate(layer, x, grad_y)
            for total, new in zip(views.values(), gradients, strict=True):
                if microbatch == 0:
                    total.copy_(new)
                else:
                    total.add_(new)
            grad_xs.append(grad_x)
        return grad_xs


class LayerMajorSums(LayerMajor, HostSums):
    """Both: the device sums the microbatches of a layer, the host averages over ranks."""


def build_layers() -> Iterable[nn.Module]:
    torch.manual_seed(0)
    return (streaming.Block().bfloat16() for _ in range(LAYERS))


def batches_of(rank: int, step: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (MICROBATCHES, streaming.BATCH, streaming.TOKENS, streaming.WIDTH)
    return list(torch.randn(shape, generator=generator).to(device, torch.bfloat16))


def resident_sums(
    layers: nn.ModuleList, batches: list[torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """fp32 sums, in the order of the microbatches, of what ordinary training gives."""
    sums = None
    for x in batches:
        gradients = streaming.resident_gradients(layers, x, streaming.loss_of)
        if sums is None:
            sums = [{n: g.to(SUM_DTYPE) for n, g in layer.items()} for layer in gradients]
        else:
            for total, new in zip(sums, gradients, strict=True):
                for name in total:
                    total[name] += new[name]
    return sums


def prove(device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stack = HostSums(build_layers(), device, backwards=MICROBATCHES)
    major = LayerMajorSums(build_layers(), device, backwards=1, gradient_dtype=SUM_DTYPE)
    with closing(stack), closing(major):
        for step in range(STEPS):
            everyone = [batches_of(r, step, device) for r in range(ranks)]
            for x in everyone[rank]:
                stack.step(x, streaming.loss_of)
            major.step(everyone[rank], streaming.loss_of)
            check(stack, major, [resident_sums(stack.layers, batches) for batches in everyone])
        assert stack.loads == MICROBATCHES * major.loads
        assert stack.stores == MICROBATCHES * major.stores
        print(f"{MICROBATCHES} microbatches: {stack.loads} loads, layer-major {major.loads}")


def check(stack: HostSums, major: LayerMajorSums, by_rank: list[list[dict]]) -> None:
    ranks = len(by_rank)
    means, means_of_major = stack.finish(), major.finish()
    for layer, mean in enumerate(means):
        for name, value in mean.items():
            terms = torch.stack([sums[layer][name] for sums in by_rank])
            expected = terms.sum(0) / ranks
            bound = torch.finfo(SUM_DTYPE).eps * terms.abs().sum(0)
            assert ((value - expected).abs() <= bound).all(), f"layer {layer}, {name}"
            assert ranks > 2 or torch.equal(value, expected), f"layer {layer}, {name}"
            assert torch.equal(means_of_major[layer][name], value), f"layer {layer}, {name}"


def main() -> None:
    device = streaming.start_rank()
    try:
        prove(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
