"""How other packages train a model whose optimizer, or more of it, is on the host.

``offload_step.py`` measures them: the same model, batches, loop and schedule as ours.

* ``torchao``: its ``CPUOffloadOptimizer`` with gradients offloaded. Weights stay on the device;
  weights and moments are bf16, so there are no fp32 masters. Its step begins while the device still
  runs backward, and it cannot clip: ``clip_grad_norm_`` would find no gradients, or change such as
  were copied already.
* ``torchao_fp32``: the same with fp32 weights and moments, compute in bf16 by autocast.
* ``torchao_clipped``, ``torchao_fp32_clipped``: the same, clipped by us, in the cheapest way known
  to us: norms are taken on the device in backward, and the step, which then waits for all of it,
  gives their factor to torch's Adam as ``grad_scale``. That is no further pass over memory. (Norms
  are taken in the rows that do not clip, too: a few milliseconds of the device.)
* ``fsdp2_cpu_offload``: FSDP2 with ``CPUOffloadPolicy``, fp32 weights and fused AdamW on the host,
  bf16 compute, clipped. On one rank it cannot prefetch as it does on more.
* ``deepspeed_offload``: ZeRO stage 3, weights and optimizer on the host, clipped.
"""

import os
from contextlib import nullcontext
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.workloads import LARGEST_NORM, StockLoop, rising_rate

RATE = 1e-4


def by_decay(model: torch.nn.Module) -> list[dict]:
    """Two groups: matrices, and what is not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


class PeerLoop(StockLoop):
    """The stock loop, with what a peer puts in place of model and optimizer."""

    engine = None  # DeepSpeed's, which clips and steps by itself
    precision = nullcontext()
    limit = None  # a function that clips where ``clip_grad_norm_`` cannot; called if ``limited``
    limited = False
    state_bytes = 0  # on the device when backward has ended: weights, gradients, optimizer's state

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.parameters = optimizer, list(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rising_rate)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.destroy()

    def look(self) -> None:
        """Count what is on the device now."""
        tensors = [t for p in self.model.parameters() for t in (p, p.grad)]
        for state in getattr(self.optimizer, "state", {}).values():
            tensors += state.values()
        local = [
            t.to_local() if isinstance(t, DTensor) else t for t in tensors if torch.is_tensor(t)
        ]
        self.state_bytes = sum(t.nbytes for t in local if t.device.type == self.device.type)

    def forward_backward(self) -> torch.Tensor:
        with self.precision:
            return super().forward_backward()

    def update(self) -> None:
        self.look()
        if self.limited:
            self.limit()
        super().update()

    def step(self) -> None:
        if self.engine is None:
            return super().step()
        ids = self.batch.to(self.device, non_blocking=True)
        loss = self.engine(input_ids=ids, labels=ids, use_cache=False).loss
        self.engine.backward(loss)
        self.look()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = RATE * rising_rate(self.steps)
        self.engine.step()
        self.steps += 1
        self.loss = loss.item()


def use_all_cores() -> None:
    """An Adam on the host gets this rank's share of the cores; the environment may say one."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores // dist.get_world_size() or 1)


def torchao(loop: PeerLoop) -> None:
    from torchao.optim import CPUOffloadOptimizer

    use_all_cores()
    norms: dict[torch.nn.Parameter, torch.Tensor] = {}

    def take_norm(parameter: torch.nn.Parameter) -> None:
        norms[parameter] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)

    for parameter in loop.model.parameters():  # before torchao's own hooks, which drop gradients
        parameter.register_post_accumulate_grad_hook(take_norm)
    options = {"offload_gradients": True, "lr": RATE, "fused": True}
    groups = by_decay(loop.model)
    optimizer = CPUOffloadOptimizer(groups, torch.optim.AdamW, **options)

    def limit() -> None:
        norm = torch.linalg.vector_norm(torch.stack(list(norms.values()))).cpu()
        scale = ((norm + 1e-6) / LARGEST_NORM).clamp(min=1.0)  # gradients are divided by it
        for each in (*optimizer.optim_dict.values(), optimizer.d_opt):
            if each is not None:
                each.grad_scale, each.found_inf = scale, torch.zeros(())

    loop.use(optimizer)
    loop.clip, loop.limit = False, limit


def torchao_fp32(loop: PeerLoop) -> None:
    loop.model.float()
    torchao(loop)
    loop.precision = torch.autocast(loop.device.type, torch.bfloat16)


def fsdp2_cpu_offload(loop: PeerLoop) -> None:
    model, device = loop.model.float(), loop.device
    use_all_cores()
    # norms are summed on the host, over a backend of its own
    group = dist.new_group(backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    options = {
        "mesh": dist.device_mesh.DeviceMesh.from_group(group, device.type),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    loop.use(torch.optim.AdamW(by_decay(model), lr=RATE, fused=True))


def deepspeed_offload(loop: PeerLoop) -> None:
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")
    on_host = {"device": "cpu", "pin_memory": loop.device.type == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": len(loop.batch),
        "bf16": {"enabled": True},
        "gradient_clipping": LARGEST_NORM,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": on_host,
            "offload_param": on_host,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 1e-2}},
    }
    groups = by_decay(loop.model)
    engine, *_ = deepspeed.initialize(model=loop.model, model_parameters=groups, config=config)
    loop.model, loop.engine = engine, engine


PEERS = {
    "torchao": torchao,
    "torchao_fp32": torchao_fp32,
    "deepspeed_offload": deepspeed_offload,
    "fsdp2_cpu_offload": fsdp2_cpu_offload,
}
DEPTHS = {"deepspeed_offload": (2, 4)}  # eight layers take more than 128 GiB of host memory


MASTERS = "float32 masters and moments"
EIGHT_BITS = "float32 masters, moments of 8 bits"
FLOAT32 = "float32 weights and moments"
BFLOAT16 = "bfloat16 weights and moments, no masters"
HOW: dict[str, dict[str, object]] = {  # fields of a row: whether it clips, and its precision
    "streamed_adam": {"clips": True, "precision": MASTERS},
    "streamed_adam_in_backward": {"clips": False, "precision": MASTERS},
    "8bit": {"clips": True, "precision": EIGHT_BITS},
    "8bit_in_backward": {"clips": False, "precision": EIGHT_BITS},
    "8bit_held": {"clips": False, "precision": EIGHT_BITS},
    "larger_than_device": {"clips": True, "precision": MASTERS},
    "torchao": {"clips": False, "precision": BFLOAT16},
    "torchao_clipped": {"clips": True, "precision": BFLOAT16},
    "torchao_fp32": {"clips": False, "precision": FLOAT32},
    "torchao_fp32_clipped": {"clips": True, "precision": FLOAT32},
    "fsdp2_cpu_offload": {"clips": True, "precision": FLOAT32},
    "deepspeed_offload": {"clips": True},
}


def note_of(name: str) -> dict[str, str]:
    """Field of a row: the version of the package."""
    package = name.split("_")[0]
    return {"note": f"{package} {version(package)}"} if package in ("torchao", "deepspeed") else {}
