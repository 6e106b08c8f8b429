"""The models of ``in_place_*.py``, sharded in every way, and how one is put in place."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from overlap_recipes.fsdp2 import in_place_gather, in_place_reduce

WIDTH, BLOCKS, STEPS = 10, 4, 3
SLOTS = 3  # so that units of a model of four blocks take turns
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
NONE = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
PLAIN = MixedPrecisionPolicy()
POLICIES = {"fp32": FP32, "bf16": BF16, "None": NONE, "plain": PLAIN}


class Block(nn.Module):
    """Uneven rows over two ranks, and a vector."""

    def __init__(self, adapter: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.adapter = None
        if adapter:
            for p in self.parameters():
                p.requires_grad_(False)
            self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y if self.adapter is None else y + self.adapter(x)


class Model(nn.Module):
    def __init__(self, tied: bool = False, adapter: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block(adapter) for _ in range(BLOCKS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13, bias=False)
        self.recompute = self.depth = self.order = None
        if tied:
            self.output.weight = self.embed.weight

    def chosen(self) -> list[nn.Module]:
        order = range(BLOCKS) if self.order is None else self.order
        return [self.blocks[n] for n in order][: self.depth]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.chosen():
            x = checkpoint(block, x, **self.recompute) if self.recompute else block(x)
        return self.output(self.norm(x)).float()


def batch(turn: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * turn + dist.get_rank())
    return torch.randint(13, (3, 5), generator=draw).to(DEVICE)


def loss_of(model: nn.Module, turn: int) -> torch.Tensor:
    ids = batch(turn)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def shard(policy, *, model=None, grouped=False, mesh=None, root=True, sharded=BLOCKS, **options):
    model = model or Model()
    options |= {"mp_policy": policy} | ({"mesh": mesh} if mesh else {})
    for block in model.blocks[:sharded]:
        fully_shard(block, **options)
    if grouped:
        fully_shard(model.embed, **options)
        fully_shard([model.norm, model.output], **options)
    return fully_shard(model, **options) if root else model


class CalledTwice(Model):
    """Each block runs twice in a row, the first also at the end."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(block(x))
        return self.output(self.norm(x)).float()


def recomputed(policy, **how):
    model = shard(policy)
    model.recompute = how
    return model


def compiled(policy):
    model = Model()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return shard(policy, model=model)


def adapted(policy):
    model = Model(adapter=True)
    for p in (*model.embed.parameters(), *model.norm.parameters(), *model.output.parameters()):
        p.requires_grad_(False)
    return shard(policy, model=model)


def on_meta(policy):
    with torch.device("meta"):
        model = Model()
    model = shard(policy, model=model)

    def fill():
        model.to_empty(device=DEVICE)
        torch.manual_seed(3)
        for p in model.parameters():
            p.to_local().detach().copy_(torch.randn(p.to_local().shape) / 5)

    model.fill = fill
    return model


def hybrid(policy):
    ranks = dist.get_world_size()
    hosts = 2 if ranks == 4 else 1
    mesh = init_device_mesh(
        DEVICE.type, (hosts, ranks // hosts), mesh_dim_names=("replicate", "shard")
    )
    return shard(policy, mesh=mesh)


def tied(policy):
    return shard(policy, model=Model(tied=True))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        k: v.to_local().clone() if isinstance(v, DTensor) else v.clone()
        for k, v in model.state_dict().items()
    }


def evaluate(model, how, turn):
    """Stock FSDP2 cannot train after an inference_mode before its first step: it shall, here."""
    with how() if hasattr(model, "copies") else torch.no_grad():
        return loss_of(model, turn).clone()


def in_place(model: nn.Module) -> nn.Module:
    in_place_gather.gather_in_place(model, slots=SLOTS)
    in_place_reduce.reduce_in_place(model)
    return model


def step(model: nn.Module, turn: int = 0) -> None:
    loss_of(model, turn).backward()
    model.zero_grad()
