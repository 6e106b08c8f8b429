"""Load folders that transformers has written into sharded models on meta; compare the logits."""

import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3Config

from overlap_recipes.checkpoint.hub_folder import load_folder

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}  # 3 on 2 ranks: one has more
CONFIGS = {
    "qwen3 tied": Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, **HEADS, **EXPERTS),
}
CASES = [("qwen3 tied", torch.float32, 0), ("mixtral", torch.bfloat16, 1)]


def on_meta(config: PreTrainedConfig, by: int = 0) -> torch.nn.Module:
    """A sharded model without memory; matrices are cut along dimension ``by``."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=lambda p: Shard(by) if p.dim() > by else None)
    return fully_shard(model)


def refused(model: torch.nn.Module, folder: Path, said: str, **options: object) -> None:
    try:
        load_folder(model, folder, **options)
    except ValueError as error:
        assert re.search(said, str(error)), error
        return
    raise AssertionError(f"{folder} was loaded, and should have been refused: {said}")


def written(root: Path, name: str, dtype: torch.dtype) -> Path:
    """A folder of several files, with other numbers than a new model has."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    folder = root / f"{name} {dtype}"
    model.save_pretrained(folder, max_shard_size="4KB")  # on rank 0
    dist.barrier()
    return folder


def prove_logits(root: Path) -> None:
    tokens = torch.arange(14).view(2, 7)
    for name, dtype, by in CASES:
        config = CONFIGS[name]
        folder = written(root, name, dtype)
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model = on_meta(config, by)
        load_folder(model, folder)
        with torch.no_grad():
            expected, found = stock(input_ids=tokens), model(input_ids=tokens)
        assert torch.equal(found.logits, expected.logits), f"{name}, {dtype}, by {by}"
        if config.tie_word_embeddings:
            assert model.lm_head.weight is model.model.embed_tokens.weight


def prove_a_model_that_is_not_sharded(root: Path) -> None:
    """``to_empty`` makes two of its tied weights, of which the folder has one."""
    folder = root / "qwen3 tied torch.float32"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3 tied"], dtype=torch.float32)
    load_folder(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in stock.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def edited(root: Path, title: str, edit: object) -> Path:
    """A folder in one file that ``edit`` has changed the tensors of."""
    folder = root / title
    if dist.get_rank() == 0:
        tensors: dict[str, torch.Tensor] = {}
        for file in (root / "qwen3 tied torch.float32").glob("*.safetensors"):
            tensors.update(load_file(file))
        edit(tensors)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    return folder


def prove_a_tied_weight_has_either_name(root: Path) -> None:
    """Some folders have the output layer's name for it."""

    def rename(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    expected = on_meta(CONFIGS["qwen3 tied"])
    load_folder(expected, root / "qwen3 tied torch.float32")
    model = on_meta(CONFIGS["qwen3 tied"])
    load_folder(model, edited(root, "output layer's name", rename))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = model.lm_head.weight.to_local()
    assert torch.equal(found, expected.lm_head.weight.to_local())


def prove_refusals(root: Path) -> None:
    config = CONFIGS["qwen3 tied"]
    norm = "model.norm.weight"

    def lose(tensors: dict) -> None:
        tensors["model.nörm.weight"] = tensors.pop(norm)

    both = f"{norm}: only in the model\n.*model.nörm.weight: only in the folder"
    refused(on_meta(config), edited(root, "renamed", lose), both)

    def shorten(tensors: dict) -> None:
        tensors[norm] = tensors[norm][:5].clone()

    said = rf"{norm}: \(16,\), in the folder \(5,\)"
    refused(on_meta(config), edited(root, "short", shorten), said)

    def count(tensors: dict) -> None:
        tensors[norm] = tensors[norm].long()

    said = f"{norm}: torch.float32, in the folder torch.int64"
    refused(on_meta(config), edited(root, "counted", count), said)

    def untie(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    said = "lm_head.weight: the model ties it to model.embed_tokens.weight"
    refused(on_meta(config), edited(root, "untied", untie), said)
    whole = root / "qwen3 tied torch.float32"
    said = "no checkpoint has these buffers.*: model.rotary_emb.inv_freq"
    refused(on_meta(config), whole, said, initialize=lambda module: None)

    file = edited(root, "cut", lambda tensors: None) / "model.safetensors"
    if dist.get_rank() == 0:
        file.write_bytes(file.read_bytes()[:-8])
    dist.barrier()
    refused(on_meta(config), file.parent, r"model.safetensors ends at byte \d+, within model\.")


def main(root: Path) -> None:
    prove_logits(root)
    prove_a_model_that_is_not_sharded(root)
    prove_a_tied_weight_has_either_name(root)
    prove_refusals(root)


if __name__ == "__main__":
    dist.init_process_group()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            of_rank_0 = [temporary]
            dist.broadcast_object_list(of_rank_0)
            main(Path(of_rank_0[0]))
    finally:
        dist.destroy_process_group()
