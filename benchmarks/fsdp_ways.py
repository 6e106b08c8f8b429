"""The ways to train that ``fsdp_overlap.py`` compares, a stock Llama or a stack of matrices."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "sharding")]

import fsdp2_settings  # noqa: E402

from benchmarks import measuring, workloads  # noqa: E402
from overlap_recipes.fsdp2 import (  # noqa: E402
    faster_way,
    in_place_gather,
    in_place_reduce,
    use_peer_copies,
)

LENGTH = 4096  # tokens of a sequence
REFERENCE = "no_communication"


@dataclass(frozen=True)
class Case:
    """What is trained: the fields that tell rows of one name apart."""

    model: str = "llama-8b-blocks"
    loop: str = "reads"
    compiled: bool = False
    reduce_dtype: str = "float32"
    activation_checkpointing: bool = False


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


class Way:
    """A sharded Llama; a subclass's ``shard`` says how. ``loop(tokens)`` trains it."""

    ours: bool = False  # whether it is a recipe or the library
    note = ""
    clips = True
    precision = "float32 weights, bfloat16 compute"

    def how(self) -> dict[str, object]:
        """The fields of a row that say how it trains."""
        return {"note": self.note, "clips": self.clips, "precision": self.precision}

    def __init__(self, case: Case, device: torch.device, layers: int | None = None) -> None:
        self.case, self.device = case, device
        self.model = self.build(layers)
        self.shard()
        self.optimizer = self.build_optimizer()

    def build(self, layers: int | None) -> nn.Module:
        model = workloads.llama(self.case.model, self.device, layers=layers)
        if self.case.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return workloads.compile_blocks(model) if self.case.compiled else model

    def build_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        return torch.optim.AdamW(parameters, lr=workloads.LEARNING_RATE, fused=True)

    def shard(self) -> None:
        """As torchtitan groups units: embedding, each layer, norm and head."""
        dtype = getattr(torch, self.case.reduce_dtype)
        policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, dtype)}
        inner = self.model.model
        for layer in inner.layers:
            fully_shard(layer, **policy)
        if not self.model.config.tie_word_embeddings:
            fully_shard(inner.embed_tokens, **policy)
            fully_shard([inner.norm, self.model.lm_head], **policy)
        fully_shard(self.model, **policy)
        parts = (inner.embed_tokens, *inner.layers, self.model.lm_head)
        self.tune([part for part in parts if isinstance(part, FSDPModule)])

    def tune(self, units: list[FSDPModule]) -> None: ...

    def loop(self, tokens: int) -> workloads.StockLoop:
        options = {"reads": self.case.loop == "reads", "optimizer": self.optimizer}
        return workloads.StockLoop(self.model, tokens, min(tokens, LENGTH), **options)


class Fsdp2(Way):
    note = "fully_shard on embedding, layers, norm with head; settings as they come"


class Tuned(Way):
    ours = True
    note = "fsdp2, two units kept, two prefetched, reduce-scatters in a group of their own"

    def tune(self, units: list[FSDPModule]) -> None:
        fsdp2_settings.tune(units)


class ReduceGroup(Way):
    ours = True
    note = "fsdp2, reduce-scatters in a group of their own"

    def tune(self, units: list[FSDPModule]) -> None:
        fsdp2_settings.reduce_in_own_group(units)


class InPlace(Way):
    ours = True
    note = "fsdp2, gathered by peer copies and reduced by pushes, without copies around them"
    options: dict = {}

    def tune(self, units: list[FSDPModule]) -> None:
        self.copy = in_place_gather.gather_in_place(self.model, **self.options)
        self.pushed = in_place_reduce.reduce_in_place(self.model)
        if self.copy is None or self.pushed is None:
            raise RuntimeError("the ranks cannot read each other's memory")


class InPlaceBegun(InPlace):
    note = InPlace.note + "; the next forward's first gathers begun behind the update"

    def loop(self, tokens: int) -> workloads.StockLoop:
        loop = super().loop(tokens)
        update = loop.update

        def update_and_begin() -> None:
            update()
            self.copy.begin_next_forward()

        loop.update = update_and_begin
        return loop


class InPlaceKept(InPlaceBegun):
    options = {"slots": 10}
    note = InPlaceBegun.note + "; ten slots for twelve layers"


class FasterWay(Way):
    """What a user has: the way that the first steps have chosen."""

    ours = True

    def how(self) -> dict[str, object]:
        kept = "peer copies" if self.copies.gathers.in_use else "stock FSDP2"
        return super().how() | {"note": f"use_peer_copies, whose first steps kept {kept}"}

    def tune(self, units: list[FSDPModule]) -> None:
        self.copies = use_peer_copies(self.model)

    def loop(self, tokens: int) -> workloads.StockLoop:
        loop = super().loop(tokens)
        for _ in range(2 * (faster_way.WARM + faster_way.TIMED) + 2):
            loop.step()
        return loop


class MegatronFsdp(Way):
    """NVIDIA's package; ``options`` as its guide for speed sets them."""

    options: dict = {}
    note = "megatron-fsdp, settings as they come"
    clips = False
    precision = "bfloat16 gradients"

    def shard(self) -> None:
        package = importlib.import_module("megatron_fsdp")
        unit = type(self.model.model.layers[0])
        self.model = package.fully_shard_model(
            module=self.model.to(torch.bfloat16),
            fsdp_unit_modules=[unit],
            fsdp_group_ag=dist.new_group(),
            device=self.device,
            **self.options,
        )
        self.model.get_input_embeddings = self.model.module.get_input_embeddings

    def build_optimizer(self) -> torch.optim.Optimizer:
        package = importlib.import_module("megatron_fsdp")
        return package.fully_shard_optimizer(super().build_optimizer())

    def loop(self, tokens: int) -> workloads.StockLoop:
        loop = super().loop(tokens)
        loop.clip = self.clips
        return loop


class MegatronFsdpGuide(MegatronFsdp):
    options = {"nccl_ub": True, "fsdp_double_buffer": True, "disable_symmetric_registration": True}
    note = "megatron-fsdp, registered double buffers, no multicast"


class LocalCopies:
    """Stands in for a collective: moves as many bytes on the device."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False) -> None:
        ranks, rank = group.size(), group.rank()
        if output_tensor.numel() < input_tensor.numel():
            output_tensor.copy_(input_tensor.view(ranks, -1)[rank])
            return
        for other, part in enumerate(output_tensor.view(ranks, -1)):
            if other != rank:  # FSDP2 has put this rank's part in its place
                part.copy_(input_tensor)


class NoCollectives(Way):
    note = "fsdp2, its collectives replaced by copies on the device"

    def tune(self, units: list[FSDPModule]) -> None:
        for unit in units:
            unit.set_custom_all_gather(LocalCopies())
            unit.set_custom_reduce_scatter(LocalCopies())


class WholeLoop(workloads.StockLoop):
    """Updates float32 rows of whole weights in bfloat16."""

    def __init__(self, way: "NoCommunication", tokens: int, reads: bool) -> None:
        options = {"reads": reads, "optimizer": way.optimizer}
        super().__init__(way.model, tokens, min(tokens, LENGTH), **options)
        self.whole, self.parameters = self.parameters, way.own

    def update(self) -> None:
        for own in self.parameters:
            own.grad = torch.empty_like(own)
        rows = [rows_of(whole.grad) for whole in self.whole]
        torch._foreach_copy_([own.grad for own in self.parameters], rows)
        for whole in self.whole:
            whole.grad = None
        super().update()
        with torch.no_grad():
            torch._foreach_copy_([rows_of(whole) for whole in self.whole], self.parameters)


class NoCommunication(Way):
    note = "whole bfloat16 weights; each rank updates its own float32 rows; nothing is sent"

    def shard(self) -> None:
        self.own = [nn.Parameter(rows_of(p.detach()).clone()) for p in self.model.parameters()]
        self.model.to(torch.bfloat16)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.own, lr=workloads.LEARNING_RATE, fused=True)

    def loop(self, tokens: int) -> WholeLoop:
        return WholeLoop(self, tokens, self.case.loop == "reads")


# -- the synthetic stack ----------------------------------------------------------------------


class Unit(nn.Module):
    """Two residual multilayer perceptrons: four matrices of ``width * hidden`` parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


class Stack(Way):
    """Eight units of 0.47 G parameters, bfloat16 throughout, and its own loop."""

    note = "fully_shard on each unit and the root"
    clips = False
    precision = "bfloat16 throughout"

    def build(self, layers: int | None) -> nn.Module:
        small = self.device.type == "cpu"
        self.width, hidden = (64, 96) if small else (8192, 14_336)
        torch.manual_seed(0)
        with self.device:
            units = [Unit(self.width, hidden).bfloat16() for _ in range(4 if small else 8)]
        return nn.Sequential(*units)

    def shard(self) -> None:
        for unit in self.model:
            fully_shard(unit)
        fully_shard(self.model)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-6, fused=True)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loop(self, tokens: int) -> "Stack":
        torch.manual_seed(1)
        batch = torch.randn(tokens, self.width, device=self.device, dtype=torch.bfloat16)
        self.batch, self.loss, self.ends = batch.requires_grad_(), None, []
        return self

    def step(self) -> None:
        if len(self.ends) == 2:
            self.ends.pop(0).synchronize()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.update()
        self.batch.grad = None
        self.ends.append(measuring.timing_event(self.device))
        self.ends[-1].record()
        self.loss = loss.detach()


class StackWhole(Stack):
    note = "whole weights; each rank updates its own rows; nothing is sent"

    def shard(self) -> None: ...

    def build_optimizer(self) -> torch.optim.Optimizer:
        self.own = [nn.Parameter(rows_of(weight.data)) for weight in self.model.parameters()]
        return torch.optim.AdamW(self.own, lr=3e-6, fused=True)

    def update(self) -> None:
        for weight, own in zip(self.model.parameters(), self.own, strict=True):
            own.grad = rows_of(weight.grad)
        super().update()
        self.model.zero_grad()


class StackInPlace(Stack):
    ours = True
    note = InPlace.note

    def shard(self) -> None:
        super().shard()
        in_place_gather.gather_in_place(self.model)
        in_place_reduce.reduce_in_place(self.model)


STACKS = {
    REFERENCE: StackWhole,
    "fsdp2": Stack,
    "fsdp2_in_place": StackInPlace,
}
WAYS = {
    REFERENCE: NoCommunication,
    "fsdp2_no_collectives": NoCollectives,
    "fsdp2": Fsdp2,
    "fsdp2_tuned": Tuned,
    "fsdp2_reduce_group": ReduceGroup,
    "fsdp2_in_place": InPlace,
    "fsdp2_in_place_begun": InPlaceBegun,
    "fsdp2_in_place_kept": InPlaceKept,
    "fsdp2_faster_way": FasterWay,
    "megatron-fsdp": MegatronFsdp,
    "megatron-fsdp-guide": MegatronFsdpGuide,
}
