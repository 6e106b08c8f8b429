"""RecurrentGemma with its defaults: its layers keep their recurrent state between calls.

It must train as the resident one does, or an error must name ``use_cache``, which turns that off.
"""

import resident
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from overlap_recipes.offload.streamed_model import StreamedModel


def build() -> RecurrentGemmaForCausalLM:
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        lru_width=32,
        attention_window_size=16,
    )
    return RecurrentGemmaForCausalLM(config).train()


def main() -> None:
    model = build()
    twin = resident.twin_of(model)
    tokens = torch.randint(3, 64, (2, 10))
    streamed = StreamedModel(model, model.model.layers, resident.HOST)
    twin(input_ids=tokens, labels=tokens).loss.backward()
    try:
        model(input_ids=tokens, labels=tokens).loss.backward()
    except (RuntimeError, TypeError, ValueError) as error:
        if "use_cache" in str(error):
            return
        raise
    finally:
        streamed.close()
    resident.assert_same_bits_of_gradients(model, twin)


if __name__ == "__main__":
    main()
