"""The models and loops that every benchmark trains: stock models in stock loops.

``llama`` builds transformers' ``LlamaForCausalLM`` from a config, with random weights and SDPA;
``stock`` builds it, too, and models whose eager steps the host bounds, as most are. ``shard`` puts
``fully_shard`` on one; ``StockLoop`` trains it as a script does::

    model = shard(llama("llama-1b", device))
    loop = StockLoop(model, tokens=16384, length=4096, reads=True)
    loop.step()

A loop that *reads* moves scalars from the device in mid-step and waits for them: a stock Llama does
so in every forward without cache and mask, where it looks for packed sequences, and so does
``loss.item()``. One that is *free* reads nothing: the Llama is told that nothing is packed, and
nobody looks at the loss. All else is the same. ``tests/measured/test_workloads.py`` counts reads.

Needs transformers (written for 5.17 to 5.23); recipes do not.
"""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    masking_utils,
)
from transformers.models.auto import AutoModelForCausalLM

LEARNING_RATE = 1e-4  # at its highest
WARM_UP = 1000  # steps in which the rate rises: each step has another
LARGEST_NORM = 1.0  # gradients are clipped to it


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes: widths in features, ``vocabulary`` in tokens."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool


LLAMAS = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 128_256, tied=True),  # Llama 3.2 1B
    "llama-8b-blocks": Shape(4096, 14_336, 12, 32, 8, 32_000, tied=False),  # 12 of Llama 3 8B's 32
    "llama-8b": Shape(4096, 14_336, 32, 32, 8, 128_256, tied=False),  # Llama 3 8B
    "llama-tiny": Shape(64, 128, 2, 4, 2, 256, tied=True),  # for tests and rehearsals on a CPU
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


def qwen3(width: int, mlp: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    """A Qwen3 of 8 key and value heads."""
    return Qwen3Config(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=tied,
        **TOKENS,
    )


HOST_BOUND: dict[str, PreTrainedConfig] = {
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, tied=True),
    "gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25, vocab_size=50_257, **TOKENS),
    "mixtral-1.2b": MixtralConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
        vocab_size=32_000,
        **TOKENS,
    ),
    "gpt2-tiny": GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, **TOKENS),
}
"""What a Qwen3 1.7B, a GPT-2 XL and a Mixtral of 1.2 billion parameters are; one for tests."""
LARGE = {
    "qwen3-4b": qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-14b": qwen3(5120, 17_408, 40, 40, tied=False),
}
"""What a Qwen3 4B and a Qwen3 14B are, for layers on the host."""
VOCABULARY_ON_ONE = 32_000  # of llama-1b on one GPU: 12.7 GB of weights and Adam's state
"""Llama 3.2 1B's 128,256 tokens would make a third of its parameters on one GPU the embedding."""


def llama(
    name: str,
    device: torch.device | str,
    *,
    vocabulary: int | None = None,
    layers: int | None = None,
) -> LlamaForCausalLM:
    """A stock Llama with random float32 weights on ``device``; the same on every rank.

    Args:
        name: of :data:`LLAMAS`.
        vocabulary, layers: other than its shape's. Without ``vocabulary``, ``llama-1b`` has
            :data:`VOCABULARY_ON_ONE` where one rank trains it.
    """
    shape = LLAMAS[name]
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if vocabulary is None and name == "llama-1b" and alone:
        vocabulary = VOCABULARY_ON_ONE
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=vocabulary or shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131_072,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).train()


def stock(name: str, device: torch.device | str, *, layers: int | None = None) -> PreTrainedModel:
    """A stock model with random float32 weights on ``device``; the same on every rank.

    Args:
        name: of :data:`LLAMAS`, :data:`HOST_BOUND` or :data:`LARGE`.
        layers: other than its own number of them.
    """
    if name in LLAMAS:
        return llama(name, device, layers=layers)
    config = deepcopy((HOST_BOUND | LARGE)[name])
    if layers is not None:
        config.num_hidden_layers = layers
        config.layer_types = config.layer_types[:1] * layers
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Its decoder layers."""
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def compile_blocks(model: PreTrainedModel, **options: object) -> PreTrainedModel:
    """Compile each decoder layer by itself, in place; before :func:`shard`.

    ``options`` go to ``torch.compile``.
    """
    for layer in layers_of(model):
        layer.compile(**options)
    return model


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """``fully_shard`` each layer and the rest, in place: float32 weights, bfloat16 compute.

    Works for one rank too, where it gives the precision alone.
    """
    precision = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


def rising_rate(step: int) -> float:
    """The share of the learning rate in ``step``: another one in each."""
    return min(1.0, (step + 1) / WARM_UP)


def nothing_packed(position_ids: torch.Tensor) -> None:
    """Answers transformers' ``find_packed_sequence_indices`` without looking."""


class StockLoop:
    """Train ``model`` on random tokens: clip, update, next rate, and a look at the loss.

    Args:
        model: returns an output with a ``loss`` for ``input_ids`` and ``labels``.
        tokens: of a step, on this rank; ``length`` of them make a sequence.
        reads: see above.
        optimizer: fused AdamW unless given.
        clip: whether gradients are clipped.

    Attributes:
        steps: taken so far.
        loss: of the last step, where the loop reads it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: int,
        length: int,
        *,
        reads: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
        clip: bool = True,
    ) -> None:
        self.model, self.reads, self.clip = model, reads, clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer or torch.optim.AdamW(
            self.parameters, lr=LEARNING_RATE, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rising_rate)
        self.device = self.parameters[0].device
        self.set_batch(tokens, length)
        self.steps = 0
        self.loss: float | None = None

    def set_batch(self, tokens: int, length: int) -> None:
        """Draw the batch of all further steps, from now on of so many tokens."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        draw = torch.Generator().manual_seed(1 + rank)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        shape = (max(1, tokens // length), length)
        batch = torch.randint(vocabulary, shape, generator=draw)
        self.batch = batch.pin_memory() if self.device.type == "cuda" else batch

    def forward_backward(self) -> torch.Tensor:
        """Leave the gradients of a step; return its loss (a scalar on the device)."""
        ids = self.batch.to(self.device, non_blocking=True)
        blind = mock.patch.object(masking_utils, "find_packed_sequence_indices", nothing_packed)
        with nullcontext() if self.reads else blind:
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        loss = self.forward_backward()
        self.update()
        self.steps += 1
        if self.reads:
            self.loss = loss.item()
