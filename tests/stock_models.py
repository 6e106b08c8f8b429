"""Small stock models of many families of transformers, with random weights and their defaults.

Offload, FSDP2 in place and saves are tried with them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers
from torch import nn

WIDTH, LAYERS, WORDS, TOKENS = 32, 3, 96, 12


@dataclass(frozen=True)
class Stock:
    """A family, by its name for ``AutoConfig.for_model``, and how its small model is made."""

    name: str
    auto: str
    layers: tuple[str, ...]  # paths, in the order in which they run
    inputs: Callable[[int], dict]  # of a forward that returns a loss, by a seed
    sizes: dict = field(default_factory=dict)  # of the config, beside ``COMMON``
    every_bit: bool = True  # or gradients of a tensor that many layers get differ in their last

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        sizes = {name: size for name, size in (COMMON | self.sizes).items() if size is not None}
        config = transformers.AutoConfig.for_model(self.name, **sizes)
        return getattr(transformers, self.auto).from_config(config).train()

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        found = []
        for path in self.layers:
            found.extend(model.get_submodule(path))
        return found


COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def words(seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(3, WORDS, (2, TOKENS), generator=numbers)


def masked(seed: int) -> dict:
    """Tokens and labels; the first sequence is padded on the right. A decoder keeps its cache."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, -3:] = 0
    return {"input_ids": words(seed), "attention_mask": mask, "labels": words(seed)}


def text(seed: int) -> dict:
    """The same without a cache."""
    return masked(seed) | {"use_cache": False}


def tokens(seed: int) -> dict:
    """Without a mask, which not every model takes."""
    return {"input_ids": words(seed), "labels": words(seed), "use_cache": False}


def pair(seed: int) -> dict:
    """What goes into an encoder, and the labels of its decoder."""
    return {"input_ids": words(seed), "labels": answers(seed), "use_cache": False}


def answers(seed: int) -> torch.Tensor:
    return words(seed)[:, :6].contiguous()


def image(seed: int, size: int = 16) -> dict:
    numbers = torch.Generator().manual_seed(seed)
    pixels = torch.randn(2, 3, size, size, generator=numbers)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def image_and_text(seed: int) -> dict:
    pixels = image(seed)["pixel_values"]
    return {"input_ids": words(seed), "pixel_values": pixels, "return_loss": True}


def sound(seed: int) -> dict:
    """Half a second of noise, and the letters that are said in it."""
    numbers = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 8000, generator=numbers)
    return {"input_values": noise, "labels": words(seed)[:, :4]}


def spectrum(seed: int) -> dict:
    numbers = torch.Generator().manual_seed(seed)
    features = torch.randn(2, 8, 32, generator=numbers)
    return {"input_features": features, "labels": answers(seed), "use_cache": False}


CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
PAIRS, IMAGES = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"
SOUND, SPEECH = "AutoModelForCTC", "AutoModelForSpeechSeq2Seq"
DECODER = ("model.layers",)
BOTH = ("model.encoder.layers", "model.decoder.layers")
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": WIDTH}
GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
SLIDING = {"head_dim": 8, "sliding_window": 4}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (8, 8)}
CONVOLUTIONS |= {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 2}
CONVOLUTIONS |= {"num_conv_pos_embeddings": 8, "mask_time_length": 2}
PATCHES = {"image_size": 16, "patch_size": 4}
RESNET = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))
RESNET |= {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2}
T5 |= {"num_heads": 4, "decoder_start_token_id": 0}
BART = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64}
BART |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"decoder_start_token_id": 2}
WHISPER = BART | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
GEMMA_3N = {"num_hidden_layers": 4, "head_dim": 8, "num_kv_shared_layers": 2, "laurel_rank": 4}
GEMMA_3N |= {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8}
GEMMA_3N |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA_3N |= {"activation_sparsity_pattern": [0.0] * 4}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4}
JAMBA |= {"use_mamba_kernels": False}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, "head_dim": 8}
LINEAR |= {"num_hidden_layers": 4}
TOWER = {key: COMMON[key] for key in list(COMMON)[:4]}
CLIP = dict.fromkeys(COMMON) | {"text_config": COMMON, "vision_config": TOWER | PATCHES}

STOCK = [
    # decoders
    Stock("llama", CAUSAL, DECODER, text),
    Stock("qwen2", CAUSAL, DECODER, text, {"tie_word_embeddings": True}),
    Stock("qwen3", CAUSAL, DECODER, text, {"head_dim": 8}),
    Stock("mistral", CAUSAL, DECODER, text, {"sliding_window": 4}),
    Stock("gemma2", CAUSAL, DECODER, text, SLIDING),
    Stock("gemma3_text", CAUSAL, DECODER, text, SLIDING),
    Stock("phi3", CAUSAL, DECODER, text),
    Stock("cohere", CAUSAL, DECODER, text),
    Stock("gpt2", CAUSAL, ("transformer.h",), masked, GPT),
    Stock("gpt_neox", CAUSAL, ("gpt_neox.layers",), text),
    Stock("falcon", CAUSAL, ("transformer.h",), text),
    # experts
    Stock("mixtral", CAUSAL, DECODER, text, EXPERTS),
    Stock("qwen3_moe", CAUSAL, DECODER, text, EXPERTS | {"head_dim": 8}),
    Stock("gpt_oss", CAUSAL, DECODER, text, EXPERTS | {"head_dim": 8}),
    # state space and recurrent
    Stock("mamba", CAUSAL, ("backbone.layers",), tokens, {"state_size": 4}),
    Stock("rwkv", CAUSAL, ("rwkv.blocks",), tokens, {"attention_hidden_size": 32}),
    Stock(
        "recurrent_gemma", CAUSAL, DECODER, tokens, {"lru_width": 32, "attention_window_size": 8}
    ),
    # with caches of several kinds, and with shared keys and values
    Stock("jamba", CAUSAL, DECODER, masked, JAMBA),
    Stock("qwen3_next", CAUSAL, DECODER, masked, EXPERTS | LINEAR),
    Stock("minimax", CAUSAL, DECODER, masked, EXPERTS | {"head_dim": 8}),
    Stock("lfm2", CAUSAL, DECODER, masked, {"layer_types": ["conv", "full_attention", "conv"]}),
    Stock("gemma3n_text", CAUSAL, DECODER, text, GEMMA_3N),
    # encoders
    Stock("bert", MASKED, ("bert.encoder.layer",), masked),
    Stock("modernbert", MASKED, ("model.layers",), masked),
    Stock(
        "albert", MASKED, ("albert.encoder.albert_layer_groups",), masked, {"embedding_size": 16}
    ),
    # encoder and decoder
    Stock("t5", PAIRS, ("encoder.block", "decoder.block"), pair, T5, every_bit=False),
    Stock("bart", PAIRS, BOTH, pair, BART, every_bit=False),
    # vision
    Stock("vit", IMAGES, ("vit.layers",), image, PATCHES),
    Stock("dinov2", IMAGES, ("dinov2.encoder.layer",), image, PATCHES),
    Stock("resnet", IMAGES, ("resnet.encoder.stages",), partial(image, size=32), RESNET),
    Stock("clip", "AutoModel", (), image_and_text, CLIP),
    # audio
    Stock("wav2vec2", SOUND, ("wav2vec2.encoder.layers",), sound, CONVOLUTIONS),
    Stock("whisper", SPEECH, BOTH, spectrum, WHISPER, every_bit=False),
]
BY_NAME = {stock.name: stock for stock in STOCK}
