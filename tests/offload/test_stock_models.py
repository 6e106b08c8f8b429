"""Stock models of many families, streamed against resident: outputs, buffers and every gradient."""

import pytest
import torch

pytest.importorskip("transformers")

from stock_models import BY_NAME, STOCK, Stock  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from overlap_recipes.offload import check_first_step, resident_bytes, stream_layers  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def check(stock: Stock, **inputs: object) -> bool:
    """Whether every bit is that of the resident model; raises what differs."""
    model = stock.model()
    layers = stock.layers_of(model)
    inputs = stock.inputs(0) | inputs
    budget = resident_bytes(layers[0]) if len(layers) > 1 else 0
    with stream_layers(model, layers, "cpu", budget=budget) as streamed:
        same = check_first_step(streamed, lambda: model(**inputs))
        assert streamed.stores > 0, "no streamed layer had a gradient"
    return same


@pytest.mark.parametrize("name", [stock.name for stock in STOCK if stock.layers])
def test_a_stock_model_computes_streamed_what_it_does_resident(name):
    """With a layer on the device, where it has more."""
    assert check(BY_NAME[name]) is BY_NAME[name].every_bit


@pytest.mark.parametrize(
    ("name", "has_config"), [("jamba", True), ("llama", True), ("llama", False)]
)
def test_a_model_trains_with_a_cache_that_it_is_given(name, has_config):
    model = BY_NAME[name].model()
    inputs = BY_NAME[name].inputs(0) | {"use_cache": True}

    def gradients() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config) if has_config else DynamicCache()
        model.zero_grad()
        model(**inputs, past_key_values=cache).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    layers = model.model.layers
    with stream_layers(model, layers, "cpu", budget=resident_bytes(layers[0])):
        found = gradients()
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
