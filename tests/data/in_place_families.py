"""Train stock transformers models on stock FSDP2 and in place, two steps each; compare every bit.

Each family is a small random configuration; nothing is downloaded. Arguments: names of families, or
``all``. Rank 0 prints a line a family; see ``tests/fsdp2/test_families_in_place.py``.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.fsdp2.in_place_gather import gather_in_place
from overlap_recipes.fsdp2.in_place_reduce import reduce_in_place

STEPS = 2
TOKENS = 12
VOCABULARY = 64
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def ids(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=draw)


def causal(seed: int) -> dict:
    return {"input_ids": ids(seed), "labels": ids(seed)}


def translated(seed: int) -> dict:
    return {"input_ids": ids(seed), "labels": ids(seed + 1000)}


def classified(seed: int) -> dict:
    return {"input_ids": ids(seed), "labels": torch.tensor([0, 1])}


def pictures(seed: int) -> dict:
    draw = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=draw),
        "labels": torch.tensor([0, 1]),
    }


def pairs(seed: int) -> dict:
    return {
        "input_ids": ids(seed),
        "pixel_values": pictures(seed)["pixel_values"],
        "return_loss": True,
    }


def spectrograms(seed: int) -> dict:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(2, 16, 40, generator=draw)
    return {"input_features": features, "labels": ids(seed)}


def sounds(seed: int) -> dict:
    draw = torch.Generator().manual_seed(seed)
    return {"input_values": torch.randn(2, 1600, generator=draw), "labels": ids(seed)[:, :2]}


@dataclass(frozen=True)
class Family:
    config: str
    model: str
    options: dict = field(default_factory=dict)
    batch: Callable[[int], dict] = causal
    refused: str = ""  # words of the error that is due


def text(config: str, model: str, **more) -> Family:
    return Family(config, model, TEXT | more)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 2,
}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 32}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
FAMILIES = {
    # dense
    "llama": text("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": text("Qwen3Config", "Qwen3ForCausalLM", head_dim=8),
    "qwen2_tied": text("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "mistral": text("MistralConfig", "MistralForCausalLM", head_dim=8),
    "gemma2": text("Gemma2Config", "Gemma2ForCausalLM", head_dim=8),
    "gemma3": text("Gemma3TextConfig", "Gemma3ForCausalLM", head_dim=8),
    "phi3": text("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": text("Olmo2Config", "Olmo2ForCausalLM"),
    "smollm3": text("SmolLM3Config", "SmolLM3ForCausalLM"),
    "granite": text("GraniteConfig", "GraniteForCausalLM"),
    "cohere2": text("Cohere2Config", "Cohere2ForCausalLM", head_dim=8),
    "glm4": text("Glm4Config", "Glm4ForCausalLM", head_dim=8),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt_neox": text("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.0},
    ),
    "bloom": Family(
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    ),
    "mamba": Family(
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4},
    ),
    # experts
    "mixtral": text(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, output_router_logits=True
    ),
    "qwen3_moe": text("Qwen3MoeConfig", "Qwen3MoeForCausalLM", head_dim=8, **EXPERTS),
    "olmoe": text("OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "gpt_oss": text(
        "GptOssConfig", "GptOssForCausalLM", head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),
    # encoders
    "bert": Family("BertConfig", "BertForMaskedLM", TEXT),
    "roberta": Family("RobertaConfig", "RobertaForSequenceClassification", TEXT, classified),
    "distilbert": Family(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4},
    ),
    "modernbert": Family("ModernBertConfig", "ModernBertForMaskedLM", TEXT),
    "deberta_v2": Family("DebertaV2Config", "DebertaV2ForMaskedLM", TEXT),
    "albert": Family("AlbertConfig", "AlbertForMaskedLM", TEXT | {"embedding_size": 16}),
    "electra": Family("ElectraConfig", "ElectraForMaskedLM", TEXT | {"embedding_size": 16}),
    # encoder and decoder
    "t5": Family("T5Config", "T5ForConditionalGeneration", T5, translated),
    "bart": Family("BartConfig", "BartForConditionalGeneration", ENCODER_DECODER, translated),
    "marian": Family("MarianConfig", "MarianMTModel", ENCODER_DECODER, translated),
    "pegasus": Family(
        "PegasusConfig", "PegasusForConditionalGeneration", ENCODER_DECODER, translated
    ),
    # pictures
    "vit": Family("ViTConfig", "ViTForImageClassification", VISION, pictures),
    "dinov2": Family("Dinov2Config", "Dinov2ForImageClassification", VISION, pictures),
    "deit": Family("DeiTConfig", "DeiTForImageClassification", VISION, pictures),
    "beit": Family("BeitConfig", "BeitForImageClassification", VISION, pictures),
    "clip": Family(
        "CLIPConfig",
        "CLIPModel",
        {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16},
        pairs,
    ),
    "siglip": Family(
        "SiglipConfig", "SiglipModel", {"text_config": TEXT, "vision_config": VISION}, pairs
    ),
    # sound
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        ENCODER_DECODER
        | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
        spectrograms,
    ),
    "wav2vec2": Family("Wav2Vec2Config", "Wav2Vec2ForCTC", SPEECH, sounds),
    "hubert": Family("HubertConfig", "HubertForCTC", SPEECH, sounds),
}
CHEAP = [  # one of each kind
    "qwen2_tied",
    "gpt2",
    "qwen3_moe",
    "t5",
    "siglip",
    "wav2vec2",
]


def build(family: Family, policy: MixedPrecisionPolicy) -> nn.Module:
    """A model whose blocks, the entries of its lists of modules, are units."""
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.options)
    model = getattr(transformers, family.model)(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for module in list(model.modules()):
        if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
            fully_shard(module, mp_policy=policy)
    scalars = {p for p in model.parameters() if p.ndim == 0}  # FSDP2 shards none
    for scalar in scalars:
        scalar.requires_grad_(False)
    return fully_shard(model, mp_policy=policy, ignored_params=scalars)


def train(family: Family, policy: MixedPrecisionPolicy, ours: bool) -> dict[str, torch.Tensor]:
    model = build(family, policy)
    gathers = None
    if ours:
        gathers = gather_in_place(model)
        reduce_in_place(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = {}
    for number in range(STEPS):
        transformers.set_seed(number)  # wav2vec2 masks by NumPy's
        loss = model(**family.batch(10 * number + dist.get_rank())).loss
        found[f"loss {number}"] = loss.detach()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient {number} of {name}"] = parameter.grad.to_local().clone()
        optimizer.step()
        optimizer.zero_grad()
    if gathers is not None:
        assert gathers.gathers, "nothing was gathered by copies"
    for name, value in model.state_dict().items():
        local = value.to_local() if isinstance(value, DTensor) else value
        found[name] = local.clone()
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def verdict(family: Family, policy: MixedPrecisionPolicy) -> str:
    """``right``, or what is not; words of an error and who raised it."""
    try:
        stock = train(family, policy, ours=False)
    except Exception as error:
        return f"stock raises {type(error).__name__}: {str(error)[:200]}"
    try:
        found = train(family, policy, ours=True)
    except Exception as error:
        return f"in place raises {type(error).__name__}: {str(error)[:300]}"
    if stock.keys() != found.keys():
        return f"other values: {sorted(stock.keys() ^ found.keys())[:3]}"
    wrong = [name for name, value in stock.items() if not same(value, found[name])]
    if wrong:
        return f"{len(wrong)} of {len(stock)} values differ, first {wrong[0]}"
    return "right"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    names = FAMILIES if sys.argv[1] == "all" else sys.argv[1].split(",")
    failures = []
    for name in names:
        family = FAMILIES[name]
        for policy_name, policy in (("plain", MixedPrecisionPolicy()), ("bf16", HALF)):
            found = verdict(family, policy)
            due = found == "right" or (family.refused and family.refused in found)
            if not due:
                failures.append(f"{name} in {policy_name}: {found}")
            if dist.get_rank() == 0:
                print(f"{name:12} {policy_name:6} {found}", flush=True)
            dist.barrier()
    dist.destroy_process_group()
    assert not failures, "; ".join(failures)


if __name__ == "__main__":
    main()
