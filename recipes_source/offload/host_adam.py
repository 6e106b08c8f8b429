"""
Adam on the host, at the speed of its memory
============================================

HEAD
"""

# %%
# Imports and sizes
# -----------------
# ``streamed_model.py`` keeps the layers; this page updates them.

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import PriorityQueue

import streamed_model as streaming
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw

BLOCK = 2**18  # parameters that a thread updates at a time: their fp32 gradients stay in its cache
JOB = 4  # blocks that a thread takes at a time
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 4

# %%
# A block
# -------


def host_threads() -> int:
    """This rank's part of the machine's cores, less one for the thread that trains."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks - 1)


def adam_step(settings: dict, master, gradient, state: dict, step, skip=None) -> None:
    """One step of AdamW for an fp32 tensor; ``step`` counts; nothing changes if ``skip`` is 1."""
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


# %%
# The update of a model
# ---------------------


class LayerUpdate(Future):
    """Done when all of a layer is updated; ``settings`` (by group), ``scale``, ``steps``: its step's."""

    def __init__(self, settings: list[dict]) -> None:
        super().__init__()
        self.settings, self.scale, self.steps = settings, 1.0, 0.0
        self.left, self.lock = 0, threading.Lock()

    def end_job(self, error: BaseException | None = None) -> None:
        with self.lock:
            self.left -= 1
            if self.done():
                return
            if error is not None:
                self.set_exception(error)
            elif self.left <= 0:
                self.set_result(None)


class HostUpdates:
    """AdamW for the layers of a streamed model, on threads of the host.

    Args:
        group_of: for each trained parameter of the layers the number of its settings.
        threads: of the host; ``host_threads()`` if None.

    ``state[parameter]`` are its ``master``, ``exp_avg`` and ``exp_avg_sq``, in fp32.
    """

    def __init__(
        self, streamed: streaming.StreamedModel, group_of: dict, threads: int | None = None
    ) -> None:
        self.streamed, self.group_of, self.state = streamed, group_of, {}
        self.blocks = [self.take(layer) for layer in streamed.layers]
        self.updates: dict[int, LayerUpdate] = {}
        self.due: PriorityQueue = PriorityQueue()
        self.of_thread = threading.local()
        cores = (torch.set_num_threads, (1,))
        self.workers = ThreadPoolExecutor(threads or host_threads(), "adam", *cores)
        self.arrivals = ThreadPoolExecutor(1, "arrivals", *cores)
        self.arrivals.submit(streamed.streams.set_device, streamed.streams.current_device())
        self.latest: Future = Future()  # of the thread of arrivals
        self.latest.set_result(None)
        streamed.before_load, streamed.before_host = self.await_layer, self.wait

    def take(self, layer) -> list[tuple]:
        """Masters and moments of a ``HostLayer``; returns blocks: group and slices of each."""
        blocks = []
        if missing := [n for n, p in layer.trained.items() if p not in self.group_of]:
            raise ValueError(
                f"give the optimizer all parameters that are trained; it lacks {missing}"
            )
        for weights, gradients in zip(layer.weights, layer.gradients, strict=False):
            flat = weights.flat
            kept = {"master": flat if flat.dtype == torch.float32 else flat.float()}
            kept |= {name: torch.zeros_like(kept["master"]) for name in MOMENTS}
            views = {name: weights.views_of(fp32) for name, fp32 in kept.items()}
            ends = [*weights.offsets[1:], flat.numel()]
            for name, begin, end in zip(weights.shapes, weights.offsets, ends, strict=True):
                parameter = layer.trained[name]
                self.state[parameter] = {which: named[name] for which, named in views.items()}
                for at in range(begin, end, BLOCK):
                    part = slice(at, min(at + BLOCK, end))
                    pieces = (x[part] for x in (gradients.flat, flat, *kept.values()))
                    blocks.append((self.group_of[parameter], *pieces))
        return blocks

    # The training thread

    def announce(self, layers: Iterable[int], settings: list[dict]) -> dict[int, LayerUpdate]:
        """Layers that are going to be updated: from here on, their next load waits for it."""
        announced = {layer: LayerUpdate(settings) for layer in layers}
        self.updates |= announced
        return announced

    def await_layer(self, layer: int) -> None:
        """Wait until a layer is updated; raises what kept it from that."""
        if self.latest.done():
            self.latest.result()
        if layer in self.updates:
            self.updates[layer].result()

    def wait(self) -> None:
        """Wait until all that was announced is updated."""
        self.latest.result()
        for update in self.updates.values():
            update.result()

    def later(self, work: Callable, *args) -> None:
        """Have the thread of arrivals do something; what it raises, ``wait`` raises."""
        self.latest = self.arrivals.submit(work, *args)

    # Any thread, when the gradients are on the host

    def start(self, announced: dict[int, LayerUpdate], steps: float, scale: float = 1.0) -> None:
        """Hand out the blocks of all layers; gradients are multiplied by ``scale``."""
        for layer, update in announced.items():
            update.steps, update.scale = steps, scale
            jobs = range(0, len(self.blocks[layer]), JOB)
            update.left = len(jobs)
            for job in jobs:
                self.due.put((layer, job, update))
                self.workers.submit(self.update_lowest)

    @staticmethod
    def drop(announced: dict[int, LayerUpdate], error: BaseException | None = None) -> None:
        """Update none of these layers; whoever waits for one gets the error, if there is one."""
        for update in announced.values():
            update.end_job(error)

    # The threads of the host

    def update_lowest(self) -> None:
        """Update some blocks of the lowest layer that is due."""
        layer, job, update = self.due.get()
        try:
            if not hasattr(self.of_thread, "scratch"):
                self.of_thread.scratch = torch.empty(BLOCK)
            for group, gradient, weight, master, *moments in self.blocks[layer][job : job + JOB]:
                fp32 = self.of_thread.scratch[: gradient.numel()].copy_(gradient)
                fp32.mul_(update.scale)
                state, step = (
                    dict(zip(MOMENTS, moments, strict=True)),
                    torch.tensor(float(update.steps)),
                )
                adam_step(update.settings[group], master, fp32, state, step)
                if weight.dtype != torch.float32:
                    weight.copy_(master)
            update.end_job()
        except BaseException as error:
            update.end_job(error)

    def close(self) -> None:
        """End the threads."""
        self.arrivals.shutdown()
        self.workers.shutdown()


# %%
# Run it, and prove it
# --------------------


def main() -> None:
    device = streaming.node.start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model = streaming.Model().bfloat16()
        streamed = streaming.StreamedModel(model, model.encoder.layers, device)
        trained = [p for layer in streamed.layers for p in layer.trained.values()]
        masters = [nn.Parameter(p.detach().float()) for p in trained]
        optimizer = torch.optim.AdamW(masters, fused=True, **streaming.SETTINGS)
        updates = HostUpdates(streamed, dict.fromkeys(trained, 0))
        for step in range(STEPS):
            streaming.loss_of(
                model, step, device
            ).backward()  # a layer is loaded when it is updated
            streamed.wait()
            for master, parameter in zip(masters, trained, strict=True):
                master.grad = parameter.grad.float()
            announced = updates.announce(range(len(streamed.layers)), [streaming.SETTINGS])
            updates.start(announced, steps=step)
            optimizer.step()
            model.zero_grad()
        streamed.wait()
        for parameter, master in zip(trained, masters, strict=True):
            assert torch.equal(updates.state[parameter]["master"], master)
            assert torch.equal(parameter, master.bfloat16())
        print(f"{len(trained)} tensors have the bits of torch.optim.AdamW")
        updates.close()
        streamed.close()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
