"""GPT-2 trains with ``use_cache=True``, transformers' default: the page promises every bit.

A resident layer reads its keys from the cache, where they lie in another order in memory than
those of a layer without one. It depends on the processor whether that changes the last bits of a
gradient, so this compares how the keys lie, too.
"""

import resident
import torch
import torch.nn.functional
from transformers import GPT2Config, GPT2LMHeadModel

from overlap_recipes.offload.streamed_model import StreamedModel

LAYERS = 3

stock_attention = torch.nn.functional.scaled_dot_product_attention
strides_of_keys: list[tuple[int, ...]] = []


def noting_attention(query, key, value, *args, **kwargs) -> torch.Tensor:
    strides_of_keys.append(key.stride())
    return stock_attention(query, key, value, *args, **kwargs)


def train(model: GPT2LMHeadModel, tokens: torch.Tensor) -> list[tuple[int, ...]]:
    """Forward and backward; returns how the keys of each layer lay in forward."""
    strides_of_keys.clear()
    torch.manual_seed(1)  # of dropout
    model(input_ids=tokens, labels=tokens).loss.backward()
    return strides_of_keys[:LAYERS]


def main() -> None:
    torch.nn.functional.scaled_dot_product_attention = noting_attention
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).train()
    twin = resident.twin_of(model)
    tokens = torch.randint(3, 64, (2, 10))
    streamed = StreamedModel(model, model.transformer.h, resident.HOST)
    wanted = train(twin, tokens)
    found = train(model, tokens)
    resident.assert_same_bits_of_gradients(model, twin)
    assert found[0] == wanted[0], f"the strides of keys are {found[0]}, resident {wanted[0]}"
    streamed.close()


if __name__ == "__main__":
    main()
