"""Stock transformers models on stock FSDP2 and in place, two steps each: every bit is compared."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from stock_models import BY_NAME, Stock  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

from overlap_recipes.fsdp2.in_place_gather import gather_in_place  # noqa: E402
from overlap_recipes.fsdp2.in_place_reduce import reduce_in_place  # noqa: E402

STEPS = 2
POLICIES = (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32))
ONE_OF_EACH_KIND = ("qwen2", "gpt2", "qwen3_moe", "t5", "clip", "wav2vec2")


def build(stock: Stock, policy: MixedPrecisionPolicy) -> nn.Module:
    """A model whose layers are units."""
    model = stock.model()
    for module in list(model.modules()):
        if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
            fully_shard(module, mp_policy=policy)
    scalars = {p for p in model.parameters() if p.ndim == 0}  # FSDP2 shards none
    for scalar in scalars:
        scalar.requires_grad_(False)
    return fully_shard(model, mp_policy=policy, ignored_params=scalars)


def train(stock: Stock, policy: MixedPrecisionPolicy, ours: bool) -> list[torch.Tensor]:
    model = build(stock, policy)
    gathers = None
    if ours:
        gathers = gather_in_place(model)
        reduce_in_place(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = []
    for number in range(STEPS):
        transformers.set_seed(number)  # wav2vec2 masks by NumPy's
        loss = model(**stock.inputs(10 * number + dist.get_rank())).loss
        found.append(loss.detach())
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                found.append(parameter.grad.to_local().clone())
        optimizer.step()
        optimizer.zero_grad()
    if gathers is not None:
        assert gathers.gathers, "nothing was gathered by copies"
    return [*found, *(getattr(p, "_local_tensor", p).clone() for p in model.parameters())]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    for name in names:
        for policy in POLICIES:
            expected = train(BY_NAME[name], policy, ours=False)
            found = train(BY_NAME[name], policy, ours=True)
            assert len(found) == len(expected), f"{name}: {len(found)} values of {len(expected)}"
            for ours, theirs in zip(found, expected, strict=True):
                same = torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
                assert same, f"{name} differs under {policy}"
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main([*BY_NAME] if "all" in sys.argv else [*ONE_OF_EACH_KIND])
