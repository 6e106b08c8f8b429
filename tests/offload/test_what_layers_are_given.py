"""Layers get what the model gives them: one tensor twice, caches, dicts that they fill."""

from contextlib import closing
from copy import deepcopy

import pytest
import torch
from host_training import batch, llama, streamed_of, transformers
from streamed_toys import WIDTH, Loop, close, gradients_of, same, train, with_each_budget
from torch import nn

from overlap_recipes.offload.streamed_model import resident_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixing(nn.Linear):
    """Mixes its input with what all layers began with."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * x0
        return x + super().forward(x).relu().square()


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, batch_first=True)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().forward(q, k, v, need_weights=False)[0]


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


def mix(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    x0 = x
    for layer in layers:
        x = layer(x, x0)
    return x


def attend(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = x + layer(x, k=x, v=x)
    return x


def decode(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x, x)
    return x


@pytest.mark.parametrize(
    ("make", "run"), [(Mixing, mix), (Attention, attend), (decoder_layer, decode)]
)
def test_a_tensor_given_twice_counts_once_for_each_use_whatever_the_budget(make, run):
    """It counted twice in a streamed layer, so that a budget changed training."""
    model = Loop(make, run)
    expected = train(model)
    found = []
    for streamed in with_each_budget(model):
        found.append(train(streamed))
    for gradients in found:
        assert close(gradients, expected)
        assert same(gradients, found[0])


@pytest.mark.parametrize("budget_layers", [0, 2])
def test_a_cache_is_not_continued_where_a_layer_runs_twice(budget_layers):
    model = llama().eval()
    ids = batch(0)["input_ids"]
    refused = pytest.raises(ValueError, match="under torch.no_grad.*use_cache=False")
    with closing(streamed_of(model, budget=budget_layers * resident_bytes(model.model.layers[0]))):
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        with refused:
            model(ids, past_key_values=cache)
        cache = model(ids, use_cache=True).past_key_values
        for again in (cache, deepcopy(cache)):
            with refused:
                model(ids[:, -1:], past_key_values=again)
            with refused, torch.no_grad():
                model(ids[:, -1:], past_key_values=again)
        model(ids, use_cache=False).logits.sum().backward()


def test_a_frozen_layer_leaves_the_cache_of_those_that_are_trained_empty():
    model = llama()
    model.requires_grad_(False)
    model.model.layers[3].requires_grad_(True)
    with closing(streamed_of(model)):
        model(**batch(0), use_cache=True).loss.backward()


def test_a_loss_with_what_a_router_hands_out_is_refused_with_advice():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, output_router_logits=True)
    model = transformers.MixtralForCausalLM(config).train()
    resident = deepcopy(model)
    with closing(streamed_of(model)):
        with pytest.raises(RuntimeError, match="output_router_logits=False"):
            model(**batch(0)).loss.backward()
        model.zero_grad()
        for each in (resident, model):
            each(**batch(0), output_router_logits=False).loss.backward()
        assert same(gradients_of(model), gradients_of(resident))


class Scored(nn.Linear):
    """Gives a score beside its result, of another argument, as a router of experts does."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, routed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x).relu(), routed.sin()


def test_what_comes_before_a_result_that_nobody_uses_has_no_gradient():
    """One of zeros would let AdamW decay it."""

    def run(layers: nn.ModuleList, embedded: torch.Tensor) -> torch.Tensor:
        x = torch.ones_like(embedded)
        for layer in layers:
            x, _ = layer(x, embedded)
        return x

    for model in with_each_budget(Loop(Scored, run)):
        train(model)
        assert model.embedding.weight.grad is None
        assert model.layers[0].weight.grad is not None
