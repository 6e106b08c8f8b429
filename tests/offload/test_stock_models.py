"""Stock models of many families, streamed against resident: outputs, buffers and every gradient.

Ten are in every run; the others are behind ``--all-models``.
"""

import pytest
from stock_models import STOCK, Stock

from overlap_recipes.offload import check_first_step, stream_layers

EVERY_RUN = {
    "llama",
    "gpt2",
    "mixtral",
    "mamba",
    "recurrent_gemma",
    "bert",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
}

pytestmark = pytest.mark.usefixtures("one_thread")


def check(stock: Stock) -> bool:
    """Whether every bit is that of the resident model; raises what differs."""
    model = stock.model()
    inputs = stock.inputs()
    with stream_layers(model, stock.layers_of(model), "cpu") as streamed:
        same = check_first_step(streamed, lambda: model(**inputs))
        assert streamed.stores > 0, "no streamed layer had a gradient"
    return same


def chosen() -> list:
    found = []
    for stock in STOCK:
        marks = [] if stock.name in EVERY_RUN else [pytest.mark.all_models]
        found.append(pytest.param(stock, id=stock.name, marks=marks))
    return found


@pytest.mark.parametrize("stock", chosen())
def test_a_stock_model_computes_streamed_what_it_does_resident(stock):
    assert check(stock) is stock.every_bit


def test_the_table_has_each_family_once_and_those_of_every_run():
    names = [stock.name for stock in STOCK]
    assert len(set(names)) == len(names) >= 24
    assert set(names) >= EVERY_RUN and len(EVERY_RUN) == 10
