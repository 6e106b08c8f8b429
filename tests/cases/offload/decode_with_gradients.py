"""transformers#28056, #42586: a decode loop of the user's own, without ``torch.no_grad``.

The tokens must be those of the resident model, or an error must say what to do.
"""

import resident
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from overlap_recipes.offload.streamed_model import StreamedModel

TOKENS = 6


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def greedy(model: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[list[int], int]:
    """The next tokens, and how many tokens the cache has seen."""
    found = []
    cache = None
    for _ in range(TOKENS):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens = output.logits[:, -1:].argmax(-1)
        found.append(tokens.item())
    return found, cache.get_seq_length()


def main() -> None:
    model = build()
    twin = resident.twin_of(model)
    prompt = torch.randint(3, 64, (1, 10))
    wanted = greedy(twin, prompt)
    streamed = StreamedModel(model, model.model.layers, resident.HOST)
    try:
        found = greedy(model, prompt)
    except ValueError as error:
        assert "no_grad" in str(error), error
        return
    finally:
        streamed.close()
    assert found[1] == wanted[1], (
        f"the cache has {found[1]} tokens, resident {wanted[1]}; the tokens are {found[0]}, "
        f"resident {wanted[0]}"
    )
    assert found[0] == wanted[0], f"the tokens are {found[0]}, resident {wanted[0]}"


if __name__ == "__main__":
    main()
