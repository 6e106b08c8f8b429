"""Train a stock Llama on all ranks, export it beside training, and keep what its logits were."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from overlap_recipes.checkpoint.export import Exports, for_transformers, weights

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}

if __name__ == "__main__":
    root = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(40).reshape(2, 20) % 100

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    options = for_transformers(model)
    with Exports(torch.device("cpu"), model.buffers(), file_bytes=100_000, **options) as exports:
        exports.save(weights(model), root / "hf")
        step()  # the weights that were exported are gone
    if dist.get_rank() == 0:
        torch.save({"tokens": tokens, "logits": logits}, root / "expected.pt")
    dist.destroy_process_group()
