"""Export a sharded mixture of experts: every bit that ``save_pretrained`` of the whole writes."""

import copy
import json
import sys
import tempfile
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path.insert(0, str(RECIPES))

import _toys as basic  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from export import read_all  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from transformers import MixtralConfig, MixtralForCausalLM  # noqa: E402

from overlap_recipes.checkpoint.export import Exports, for_transformers, weights  # noqa: E402

SIZES = {"vocab_size": 64, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}  # 3 on 2 ranks: one has more


def by_dimension(dimension: int):
    """A placement for ``fully_shard``: experts by this dimension, others as usual."""

    def placed(parameter: nn.Parameter) -> Shard | None:
        return Shard(dimension) if parameter.dim() == 3 else None

    return placed


def main(root: Path) -> None:
    torch.manual_seed(0)
    whole = MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, **EXPERTS))
    whole.save_pretrained(root / "reference")  # writes on rank 0
    dist.barrier()
    expected = read_all(root / "reference")
    config = json.loads((root / "reference" / "config.json").read_text())
    assert "model.layers.0.block_sparse_moe.experts.2.w3.weight" in expected
    for dimension in range(2):  # by the third rows are cut: each is a call of its own
        model = copy.deepcopy(whole)
        fully_shard(model, shard_placement_fn=by_dimension(dimension))
        directory = root / f"by{dimension}"
        with Exports(torch.device("cpu"), file_bytes=4000, **for_transformers(model)) as exports:
            exports.save(weights(model), directory)
        found = read_all(directory)
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        wrong = [name for name, x in expected.items() if not basic.same_bits(found[name], x)]
        assert not wrong, f"by dimension {dimension}: {wrong}"
        written = json.loads((directory / "config.json").read_text())
        assert written == config, f"config.json: {written}, stock {config}"
    dist.barrier()


if __name__ == "__main__":
    basic.start_rank()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            main(basic.directory_of_rank_0(Path(temporary)))
    finally:
        dist.destroy_process_group()
