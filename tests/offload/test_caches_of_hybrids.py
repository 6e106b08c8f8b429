"""Stock hybrids train streamed with their defaults, caches on, as they do resident."""

import copy

import pytest
import torch
from torch import nn

from overlap_recipes.offload import resident_bytes, stream_layers

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
HYBRIDS = {
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1, 3], "mamba_chunk_size": 4},
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "minimax": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_chunk_size": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
}


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **HYBRIDS[name])
    return transformers.AutoModelForCausalLM.from_config(config).train()


def loss_of(model: nn.Module, given: bool) -> torch.Tensor:
    words = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    options = {"use_cache": True}
    if given:
        options["past_key_values"] = transformers.DynamicCache(config=model.config)
    return model(input_ids=words, labels=words, **options).loss


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_trains_with_its_cache(name):
    trains_alike(name, given=False)


@pytest.mark.parametrize("name", ["jamba", "llama"])
def test_a_model_trains_with_a_cache_that_it_is_given(name):
    trains_alike(name, given=True)


def trains_alike(name: str, given: bool) -> None:
    """With two layers of four on the device."""
    model = small(name)
    resident = copy.deepcopy(model)
    layers = model.model.layers
    budget = resident_bytes(layers[0]) + resident_bytes(layers[1])
    with stream_layers(model, layers, "cpu", budget=budget) as streamed:
        assert streamed.resident_below > 0 and streamed.layers
        for each in (resident, model):
            torch.manual_seed(1)
            loss_of(each, given).backward()
    for (path, ours), theirs in zip(model.named_parameters(), resident.parameters(), strict=True):
        if theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), path


def test_a_llama_that_is_given_a_cache_without_a_config_trains():
    model = small("llama")
    resident = copy.deepcopy(model)
    words = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with stream_layers(model, model.model.layers, "cpu"):
        for each in (resident, model):
            cache = transformers.DynamicCache()
            each(input_ids=words, labels=words, past_key_values=cache).loss.backward()
    for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
