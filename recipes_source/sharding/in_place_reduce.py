"""
FSDP2 without copies around its reductions
==========================================

"""

# %%
# Imports
# -------

import os
from collections import deque
from collections.abc import Iterator

import in_place_gather as in_place
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

BATCH_BYTES = 128 << 20  # of gradients that are pushed between two barriers
WAITING = 2  # units whose gradients are kept until they have been pushed

NAMES = """
    post_backward finalize_backward reduce_grads gradient_divide_factor _all_reduce_hook
"""


class PushedGradients:
    """Reduces gradients of one group of ranks by pushes into slots of their owners."""

    def __init__(self, memory: in_place.PeerMemory) -> None:
        self.memory, self.streams = memory, torch.get_device_module(memory.device)
        self.stream = self.streams.Stream(priority=-1)
        self.slots: list[list[torch.Tensor]] = []  # two, each by rank: (ranks, bytes)
        self.plans: dict[tuple, tuple] = {}
        self.under_way: deque = deque()
        self.retired: list = []
        self.calls = self.batches = 0

    def slot(self, nbytes: int) -> list[torch.Tensor]:
        """The slot whose turn it is, by rank. Larger ones, which are rare, are a collective."""
        if not self.slots or self.slots[0][0].shape[1] < nbytes:
            self.retired.append(self.slots)  # others may still write to them
            size = (self.memory.ranks, nbytes)
            self.slots = [self.memory.empty(size, torch.uint8) for _ in range(2)]
            self.plans.clear()
        return self.slots[self.batches % 2]

    def plan(self, parameters: tuple, dtype: torch.dtype) -> tuple:
        """Where the parts of a batch go: by owner and parameter, and this rank's slot as a table."""
        key = (*map(id, parameters), dtype, self.batches % 2)
        numels = [p.padded_sharded_param_size.numel() for p in parameters]
        slot = self.slot(sum(numels) * dtype.itemsize)
        if key not in self.plans:
            rank = self.memory.rank
            flat = [t[:, : sum(numels) * dtype.itemsize].view(dtype) for t in slot]
            places = [owner[rank].split(numels) for owner in flat]
            self.plans[key] = (numels, places, flat[rank])
        return self.plans[key]

    @torch.no_grad()
    def reduce(self, group, taken: list) -> None:
        """Queue the reduction of ``taken``, parameters and gradients of one unit."""
        current, totals = self.streams.current_stream(), []
        for batch in batches(taken):
            numel = sum(p.padded_sharded_param_size.numel() for p, _ in batch)
            size = {"dtype": group._orig_dtype, "device": self.memory.device}
            totals.append(torch.empty(numel, **size))  # where activations were just freed
        self.stream.wait_stream(current)
        with self.streams.stream(self.stream):
            for batch, total in zip(batches(taken), totals, strict=True):
                self.reduce_batch(group, batch, total)
            event = self.stream.record_event()
        self.calls += 1
        self.under_way.append((event, taken, totals))
        self.drain(WAITING)

    def reduce_batch(self, group, batch: list, total: torch.Tensor) -> None:
        rank, ranks = self.memory.rank, self.memory.ranks
        parameters, gradients = tuple(p for p, _ in batch), [g for _, g in batch]
        dtype = group._reduce_dtype or gradients[0].dtype
        if dtype.itemsize < gradients[0].itemsize:  # rounded before they are sent, as FSDP2 does
            gradients = [g.to(dtype) for g in gradients]
        numels, places, arrived = self.plan(parameters, gradients[0].dtype)
        self.batches += 1
        flat = [g.contiguous().view(-1) for g in gradients]
        for step in range(1, ranks):
            owner = (rank + step) % ranks
            for grad, numel, place in zip(flat, numels, places[owner], strict=True):
                part = grad[owner * numel : (owner + 1) * numel]  # the last may be short or empty
                place[: len(part)].copy_(part, non_blocking=True)
        mine = [g[rank * n : (rank + 1) * n] for g, n in zip(flat, numels, strict=True)]
        torch._foreach_copy_([p[: len(m)] for p, m in zip(places[rank], mine, strict=True)], mine)
        self.memory.barrier()
        reduced = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        divisor = group.gradient_divide_factor or ranks
        (torch.sum if divisor == 1 else torch.mean)(arrived, 0, dtype=dtype, out=reduced)
        if reduced is not total:
            total.copy_(reduced)
        start = 0
        for p, numel in zip(parameters, numels, strict=True):
            shape, stride = p.sharded_size, p.contiguous_sharded_stride
            self.accumulate(p, total.as_strided(shape, stride, start))
            start += numel

    def accumulate(self, p, gradient: torch.Tensor) -> None:
        sharded = p.sharded_param
        if sharded.grad is None:
            sharded.grad = p.to_sharded_dtensor(gradient)
        else:
            sharded.grad._local_tensor.add_(gradient)
        for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(sharded)

    def drain(self, keep: int) -> None:
        """Let the compute stream wait for all but the last ``keep`` units; free their gradients."""
        while len(self.under_way) > keep:
            self.streams.current_stream().wait_event(self.under_way.popleft()[0])


def batches(taken: list) -> Iterator[list]:
    """Parts of ``taken`` of one dtype and at most BATCH_BYTES, or one parameter."""
    batch: list = []
    nbytes = 0
    for item in taken:
        gradient = item[1]
        if batch and (
            nbytes + gradient.nbytes > BATCH_BYTES or gradient.dtype != batch[0][1].dtype
        ):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += gradient.nbytes
    if batch:
        yield batch


class InPlaceReduce:
    """Methods of an FSDP2 group of parameters, around its own."""

    def post_backward(self, *unused) -> None:
        taken = self.take()  # FSDP2 finds no gradient, and reshards
        super().post_backward(*unused)
        if taken:
            self.pushed.reduce(self, taken)

    def take(self) -> list:
        if not self.reduce_grads or self.why_stock():
            return []
        taken = []
        for p in self.fsdp_params:
            p.accumulate_unsharded_grad_if_needed()
            if p.unsharded_accumulated_grad is not None:
                taken.append((p, p.unsharded_accumulated_grad_data))
                p.unsharded_accumulated_grad = None
            elif hasattr(p, "_unsharded_param") and p.unsharded_param.grad is not None:
                taken.append((p, p.unsharded_grad_data))
                p.unsharded_param.grad = None
        return taken

    def why_stock(self) -> bool:
        """Whether this backward's reduction is one that FSDP2 must do."""
        factor = self.gradient_divide_factor
        return (
            factor not in (None, 1, self.pushed.memory.ranks)
            or self._all_reduce_hook is not None
            or getattr(self, "reduce_scatter_unused_params", False)
            or (self._reduce_dtype or self._orig_dtype) == torch.float16
        )

    def finalize_backward(self) -> None:
        super().finalize_backward()
        self.pushed.drain(0)


def reduce_in_place(model: FSDPModule) -> PushedGradients | None:
    """Have every unit of ``model`` reduce its gradients by pushes, from now on. Collective."""
    groups = in_place.param_groups(model)
    shard_group = getattr(groups[0].mesh_info, "shard_process_group", None)
    chosen = [
        group
        for group in groups
        if in_place.why_stock(group, shard_group) is None
        and not hasattr(group.mesh_info, "replicate_process_group")
    ]
    if not chosen or in_place.why_not(shard_group, chosen[0].device):
        return None
    pushed = PushedGradients(in_place.PeerMemory(shard_group, chosen[0].device))
    for group in chosen:
        if missing := [name for name in NAMES.split() if not hasattr(group, name)]:
            raise RuntimeError(f"FSDP2 of torch {torch.__version__} has no {missing}: not for it")
        group.pushed = pushed
        in_place.become(group, InPlaceReduce)
    return pushed


# %%
# Run it, and prove it
# --------------------


def prove(device: torch.device) -> None:
    for dtypes in ((), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        policy = MixedPrecisionPolicy(*dtypes)
        expected = in_place.train(in_place.build(device, policy), device)
        model = in_place.build(device, policy)
        in_place.gather_in_place(model)
        pushed = reduce_in_place(model)
        found = in_place.train(model, device)
        if dist.get_world_size() <= 2:
            assert in_place.same(found, expected), "not the bits of stock FSDP2"
        for tensor, of_fsdp in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, of_fsdp, rtol=0.05, atol=0.01)
        if pushed is not None:
            assert pushed.calls == in_place.UNITS * in_place.STEPS, "FSDP2 reduced by itself"
            print(f"{pushed.calls} reductions by pushes")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if "RANK" in os.environ else alone))
    try:
        prove(device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
