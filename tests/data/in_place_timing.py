"""A first look on two GPUs: the time and memory of stock blocks, stock FSDP2 and in place.

torchrun --nproc-per-node=2 tests/data/in_place_timing.py SECONDS
"""

import gc
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "sharding")]

import fsdp2_settings  # noqa: E402
import in_place_gather  # noqa: E402
import in_place_reduce  # noqa: E402

from benchmarks import workloads  # noqa: E402

GPU = torch.cuda.is_available()
START = time.perf_counter()
LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else 150
NAME = "llama-8b-blocks" if GPU else "llama-tiny"


def say(*text):
    if dist.get_rank() == 0:
        print(f"[{time.perf_counter() - START:6.1f} s]", *text, flush=True)


class LocalGather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        ranks, rank = group.size(), group.rank()
        parts = output_tensor.view(ranks, -1)
        for other in range(ranks):
            if other != rank:
                parts[other].copy_(input_tensor)


class LocalReduce(LocalGather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def shard(model, compiled=False):
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if compiled:
        workloads.compile_blocks(model)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, mp_policy=precision)
        fully_shard([model.model.norm, model.lm_head], mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


def build(way, device, compiled):
    model = shard(workloads.llama(NAME, device), compiled)
    units = [
        m
        for m in (model.model.embed_tokens, *model.model.layers, model.lm_head)
        if isinstance(m, FSDPModule)
    ]
    if way == "no_collectives":
        for m in model.modules():
            if isinstance(m, FSDPModule):
                m.set_custom_all_gather(LocalGather())
                m.set_custom_reduce_scatter(LocalReduce())
    elif way == "tuned":
        fsdp2_settings.tune(units)
    elif way.startswith("gather"):
        model.copies = in_place_gather.gather_in_place(model)
    elif way.startswith("in_place"):
        kept, ahead = (int(c) for c in (way.removeprefix("in_place") or "22"))
        model.copies = in_place_gather.gather_in_place(model, kept=kept, ahead=ahead)
        model.pushed = in_place_reduce.reduce_in_place(model)
    return model


def sync():
    if GPU:
        torch.cuda.synchronize()


def measure(way, tokens, steps, device, compiled=False):
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        free = torch.cuda.mem_get_info()[0]
    model = build(way, device, compiled)
    out = {}
    for count in tokens:
        loop = workloads.StockLoop(model, tokens=count, length=min(count, 4096), reads=True)
        for _ in range(3):
            loop.step()
        sync()
        dist.barrier()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            loop.step()
            sync()
            times.append((time.perf_counter() - begin) * 1e3)
        out[count] = f"{statistics.median(times):.1f} ({min(times):.1f}) loss {loop.loss:.5f}"
        if GPU:
            peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
            peaks += (free - torch.cuda.mem_get_info()[0],)
            out[count] += " GB allocated, reserved, device:"
            out[count] += "".join(f" {peak / 1e9:.1f}" for peak in peaks)
        del loop
    say(way, "compiled" if compiled else "eager", out)
    del model


def micro(device):
    """Rates of what the recipes are made of."""
    n = (58 << 20) if GPU else 1 << 12
    memory = in_place_gather.PeerMemory(dist.group.WORLD, device)
    peers = memory.empty([2, n], torch.bfloat16)
    other = peers[1 - memory.rank]
    local, total = (
        torch.empty(n, dtype=torch.bfloat16, device=device),
        torch.empty(n, device=device),
    )
    fp32 = torch.randn(n, device=device)
    half = torch.tensor([0.5], device=device)

    def add():
        torch.mul(local, half, out=total)
        total.add_(peers[memory.rank][0], alpha=0.5)

    works = {
        "pull from a peer": lambda: local.copy_(other[0], non_blocking=True),
        "push to a peer": lambda: other[0].copy_(local, non_blocking=True),
        "foreach kernel pulls": lambda: torch._foreach_copy_([local], [other[0]]),
        "copy on the device": lambda: local.copy_(peers[memory.rank][0], non_blocking=True),
        "foreach copy on the device": lambda: torch._foreach_copy_(
            [local], [peers[memory.rank][0]]
        ),
        "publish (cast)": lambda: torch._foreach_copy_([local], [fp32]),
        "mean of two rows": lambda: torch.mean(
            peers[memory.rank], 0, dtype=torch.float32, out=total
        ),
        "mul and add": add,
        "barrier": memory.barrier,
    }
    for name, work in works.items():
        work()
        sync()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(10):
            work()
        host = (time.perf_counter() - begin) / 10
        sync()
        seconds = (time.perf_counter() - begin) / 10
        rate = f"{2 * n / 1e6:.0f} MB of bf16, {2 * n / seconds / 1e9:.0f} GB/s"
        say(f"micro {name}: {seconds * 1e6:.0f} us for {rate}, host {host * 1e6:.1f} us")
    if GPU:
        tiny = [torch.empty(8, device=device) for _ in range(2)]
        begin = time.perf_counter()
        for _ in range(200):
            tiny[0].copy_(tiny[1], non_blocking=True)
        say(f"micro host time of a copy_: {(time.perf_counter() - begin) / 200 * 1e6:.1f} us")


def profile(device):
    """Where the host's time goes: both ways at 1,024 tokens."""
    for way in ("fsdp2", "in_place"):
        model = build(way, device, False)
        loop = workloads.StockLoop(
            model, tokens=1024 if GPU else 64, length=1024 if GPU else 64, reads=False
        )
        for _ in range(3):
            loop.step()
        import cProfile
        import io
        import pstats

        profiler = cProfile.Profile()
        sync()
        profiler.enable()
        for _ in range(3):
            loop.step()
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(22)
        say(
            way, "\n".join(line for line in text.getvalue().splitlines()[4:] if line.strip())[:3500]
        )
        host = []
        for _ in range(4):
            sync()
            begin = time.perf_counter()
            loop.step()
            host.append((time.perf_counter() - begin) * 1e3)
        say(way, "host ms of a step", host)
        del model, loop


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    dist.init_process_group()
    jobs = [("micro", lambda: micro(device))]
    sizes = [1024, 4096] if GPU else [64]
    for way in (
        "fsdp2",
        "in_place",
        "no_collectives",
        "tuned",
        "in_place02",
        "in_place21",
        "gather",
        "fsdp2",
        "in_place",
    ):
        jobs.append((way, lambda way=way: measure(way, sizes, 8, device)))
    jobs.append(("profile", lambda: profile(device)))
    for way in ("fsdp2", "in_place"):
        jobs.append(
            (way + " long", lambda way=way: measure(way, [12288] if GPU else [128], 4, device))
        )
    for way in ("fsdp2", "in_place"):
        jobs.append((way + " compiled", lambda way=way: measure(way, sizes, 6, device, True)))
    for name, job in jobs:
        over = torch.tensor([time.perf_counter() - START > LIMIT], device=device, dtype=torch.int32)
        dist.broadcast(over, 0)
        if over.item():
            say("no time for", name)
            continue
        try:
            job()
        except Exception:
            say("FAILED", name, traceback.format_exc())
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
