"""Small stock models of many families of transformers, with random weights and their defaults."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

WIDTH, LAYERS, WORDS, TOKENS = 32, 3, 96, 12


@dataclass(frozen=True)
class Stock:
    """A family: what kind of model it is, and how its small one is made.

    Attributes:
        name: of the family, as ``AutoConfig.for_model`` has it.
        auto: the class that makes the model of a config, an ``AutoModel...``.
        layers: where its layers are, one path or more, in the order in which they run.
        inputs: the keyword arguments of a forward that returns a loss.
        sizes: of the config, beside ``COMMON``.
        every_bit: whether streamed gradients have those of the stock model. A streamed layer adds
            up its own gradients of a tensor that many layers get: other last bits.
    """

    name: str
    auto: str
    layers: tuple[str, ...]
    inputs: Callable[[], dict]
    sizes: dict = field(default_factory=dict)
    every_bit: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
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


def words() -> torch.Tensor:
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(3, WORDS, (2, TOKENS), generator=numbers)


def masked() -> dict:
    """Tokens and labels; the first sequence is padded on the right."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, -3:] = 0
    return {"input_ids": words(), "attention_mask": mask, "labels": words()}


def text() -> dict:
    """The same for a decoder, which is trained without a cache."""
    return masked() | {"use_cache": False}


def tokens() -> dict:
    """Without a mask, which not every model takes."""
    return {"input_ids": words(), "labels": words(), "use_cache": False}


def pair() -> dict:
    """What goes into an encoder, and the labels of its decoder."""
    return {"input_ids": words(), "labels": answers(), "use_cache": False}


def answers() -> torch.Tensor:
    return words()[:, :6].contiguous()


def image(size: int = 16) -> dict:
    numbers = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, size, size, generator=numbers)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def picture_alone() -> dict:
    return {"pixel_values": image()["pixel_values"]}


def sound() -> dict:
    """Half a second of noise, and the letters that are said in it."""
    numbers = torch.Generator().manual_seed(0)
    return {"input_values": torch.randn(2, 8000, generator=numbers), "labels": words()[:, :4]}


def spectrum() -> dict:
    numbers = torch.Generator().manual_seed(0)
    features = torch.randn(2, 8, 32, generator=numbers)
    return {"input_features": features, "labels": answers(), "use_cache": False}


def spectrum_in_time() -> dict:
    found = spectrum()
    return found | {"input_features": found["input_features"].mT.contiguous()}


CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
PAIRS, IMAGES = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"
SOUND, SPEECH = "AutoModelForCTC", "AutoModelForSpeechSeq2Seq"
DECODER = ("model.layers",)
BOTH = ("model.encoder.layers", "model.decoder.layers")
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": WIDTH}
GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (8, 8)}
CONVOLUTIONS |= {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 2}
CONVOLUTIONS |= {"num_conv_pos_embeddings": 8, "mask_time_length": 2}
PATCHES = {"image_size": 16, "patch_size": 4}
STAGES = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2}
T5 |= {"num_heads": 4, "decoder_start_token_id": 0}
BART = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64}
BART |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"decoder_start_token_id": 2}

STOCK = [
    # decoders
    Stock("llama", CAUSAL, DECODER, text),
    Stock("qwen3", CAUSAL, DECODER, text, {"head_dim": 8}),
    Stock("mistral", CAUSAL, DECODER, text, {"sliding_window": 4}),
    Stock("gemma2", CAUSAL, DECODER, text, {"head_dim": 8, "sliding_window": 4}),
    Stock("gemma3_text", CAUSAL, DECODER, text, {"head_dim": 8, "sliding_window": 4}),
    Stock("phi3", CAUSAL, DECODER, text),
    Stock("olmo2", CAUSAL, DECODER, text),
    Stock("cohere", CAUSAL, DECODER, text),
    Stock("starcoder2", CAUSAL, DECODER, text),
    Stock("stablelm", CAUSAL, DECODER, text),
    Stock("gpt2", CAUSAL, ("transformer.h",), text, GPT),
    Stock("gpt_neox", CAUSAL, ("gpt_neox.layers",), text),
    Stock("gptj", CAUSAL, ("transformer.h",), text, GPT | {"rotary_dim": 4}),
    Stock("gpt_bigcode", CAUSAL, ("transformer.h",), text, GPT),
    Stock(
        "opt", CAUSAL, ("model.decoder.layers",), text, {"ffn_dim": 64, "word_embed_proj_dim": 32}
    ),
    Stock("bloom", CAUSAL, ("transformer.h",), text, {"n_layer": LAYERS, "n_head": 4}),
    Stock("falcon", CAUSAL, ("transformer.h",), text),
    Stock(
        "mpt", CAUSAL, ("transformer.blocks",), text, {"d_model": 32, "n_heads": 4, "n_layers": 3}
    ),
    # experts
    Stock("mixtral", CAUSAL, DECODER, text, EXPERTS),
    Stock("qwen3_moe", CAUSAL, DECODER, text, EXPERTS | {"head_dim": 8}),
    Stock("qwen2_moe", CAUSAL, DECODER, text, EXPERTS | {"shared_expert_intermediate_size": 32}),
    Stock("olmoe", CAUSAL, DECODER, text, EXPERTS),
    Stock("gpt_oss", CAUSAL, DECODER, text, EXPERTS | {"head_dim": 8}),
    Stock("granitemoe", CAUSAL, DECODER, text, EXPERTS),
    # state space and recurrent
    Stock("mamba", CAUSAL, ("backbone.layers",), tokens, {"state_size": 4}),
    Stock(
        "mamba2",
        CAUSAL,
        ("backbone.layers",),
        tokens,
        {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    Stock(
        "recurrent_gemma", CAUSAL, DECODER, tokens, {"lru_width": 32, "attention_window_size": 8}
    ),
    Stock("rwkv", CAUSAL, ("rwkv.blocks",), tokens, {"attention_hidden_size": 32}),
    # shared keys and values
    Stock(
        "gemma3n_text",
        CAUSAL,
        DECODER,
        text,
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": WORDS,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    # encoders
    Stock("bert", MASKED, ("bert.encoder.layer",), masked),
    Stock("roberta", MASKED, ("roberta.encoder.layer",), masked),
    Stock(
        "distilbert",
        MASKED,
        ("distilbert.transformer.layer",),
        masked,
        {"dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4},
    ),
    Stock(
        "deberta-v2",
        MASKED,
        ("deberta.encoder.layer",),
        masked,
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    Stock("electra", MASKED, ("electra.encoder.layer",), masked, {"embedding_size": 32}),
    Stock("modernbert", MASKED, ("model.layers",), masked),
    Stock(
        "albert", MASKED, ("albert.encoder.albert_layer_groups",), masked, {"embedding_size": 16}
    ),
    Stock(
        "funnel",
        MASKED,
        ("funnel.encoder.blocks.0", "funnel.encoder.blocks.1", "funnel.decoder.layers"),
        masked,
        {
            "num_hidden_layers": None,
            "d_model": 32,
            "d_head": 8,
            "d_inner": 64,
            "n_head": 4,
            "block_sizes": [1, 2],
            "num_decoder_layers": 2,
        },
        every_bit=False,
    ),
    # encoder and decoder
    Stock("t5", PAIRS, ("encoder.block", "decoder.block"), pair, T5, every_bit=False),
    Stock("mt5", PAIRS, ("encoder.block", "decoder.block"), pair, T5, every_bit=False),
    Stock(
        "switch_transformers",
        PAIRS,
        ("encoder.block", "decoder.block"),
        pair,
        T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        every_bit=False,
    ),
    Stock("bart", PAIRS, BOTH, pair, BART, every_bit=False),
    Stock("marian", PAIRS, BOTH, pair, BART, every_bit=False),
    Stock("pegasus", PAIRS, BOTH, pair, BART, every_bit=False),
    Stock("m2m_100", PAIRS, BOTH, pair, BART, every_bit=False),
    # vision
    Stock("vit", IMAGES, ("vit.layers",), image, PATCHES),
    Stock(
        "deit",
        IMAGES,
        ("deit.layers",),
        image,
        PATCHES | {"architectures": ["DeiTForImageClassification"]},
    ),
    Stock("dinov2", IMAGES, ("dinov2.encoder.layer",), image, PATCHES),
    Stock("beit", IMAGES, ("beit.layers",), image, PATCHES),
    Stock(
        "convnext",
        IMAGES,
        ("convnext.encoder.stages",),
        lambda: image(32),
        STAGES | {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    Stock(
        "resnet",
        IMAGES,
        ("resnet.encoder.stages",),
        lambda: image(32),
        STAGES
        | {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    ),
    Stock(
        "swin",
        IMAGES,
        ("swin.encoder.layers",),
        lambda: image(32),
        STAGES
        | {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    Stock(
        "vit_mae",
        "AutoModelForPreTraining",
        ("vit.layers",),
        picture_alone,
        PATCHES
        | {
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_intermediate_size": 32,
            "decoder_num_attention_heads": 4,
        },
    ),
    # audio
    Stock("wav2vec2", SOUND, ("wav2vec2.encoder.layers",), sound, CONVOLUTIONS),
    Stock("hubert", SOUND, ("hubert.encoder.layers",), sound, CONVOLUTIONS),
    Stock("wavlm", SOUND, ("wavlm.encoder.layers",), sound, CONVOLUTIONS),
    Stock(
        "whisper",
        SPEECH,
        BOTH,
        spectrum,
        BART | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        every_bit=False,
    ),
    Stock(
        "speech_to_text",
        SPEECH,
        BOTH,
        spectrum_in_time,
        BART
        | {
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 64,
            "max_target_positions": 16,
        },
        every_bit=False,
    ),
]
