"""torchtitan#1903 and #1291, instructlab/training#128, vllm#16682: an export beside training.

It must be what ``save_pretrained`` writes. The first argument is what is compared, ``names`` of the
tensors or ``config``; the second the model's type, the third, if given, ``bf16``.
"""

import json
import sys
from pathlib import Path

import roundtrip
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from overlap_recipes.checkpoint.export import Exports, for_transformers, weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def names_in(folder: Path) -> set[str]:
    """The names of all tensors of a folder."""
    names = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    return names


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(SIZES)
    if kind == "mixtral":
        sizes.update(EXPERTS)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def compare_names(exported: Path, reference: Path) -> None:
    found = names_in(exported)
    wanted = names_in(reference)
    message = f"exported as {min(found - wanted, default='')}, the stock name is "
    assert found == wanted, message + min(wanted - found, default="")


def compare_configs(exported: Path, reference: Path) -> None:
    found = json.loads((exported / "config.json").read_text())
    wanted = json.loads((reference / "config.json").read_text())
    wrong = []
    for key in sorted(wanted):
        if found.get(key) != wanted[key]:
            wrong.append(f"{key} is {found.get(key)}, stock {wanted[key]}")
    assert not wrong, f"config.json: {'; '.join(wrong)}"


def main(what: str, kind: str, dtype: torch.dtype | None) -> None:
    with roundtrip.job() as root:
        model = build(kind)
        with Exports(roundtrip.HOST, **for_transformers(model, dtype)) as exports:
            exports.save(weights(model), root / "exported")
        if dtype is not None:
            model.to(dtype)
        model.save_pretrained(root / "reference")
        if what == "names":
            compare_names(root / "exported", root / "reference")
        else:
            compare_configs(root / "exported", root / "reference")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], torch.bfloat16 if "bf16" in sys.argv else None)
