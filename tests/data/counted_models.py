"""Parameters of the stock models, and the bytes a token that autograd keeps: a JSON list.

A process of its own: FSDP2 that has run under the recorder leaves PyTorch's meta kernels others.
"""

import json

import torch
from torch.nn import functional

from benchmarks.will_it_hide import STOCK
from benchmarks.workloads import HOST_BOUND, VOCABULARY_ON_ONE, llama, stock


class Attention(torch.autograd.Function):
    """Keeps what a fused attention keeps, on a device that has none."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_, **__) -> torch.Tensor:
    return Attention.apply(q, k, v)


def counts(name: str, ranks: int) -> dict[str, float]:
    torch.distributed.is_initialized = lambda: ranks > 1
    torch.distributed.get_world_size = lambda: ranks
    if name in HOST_BOUND:
        model = stock(name, "meta")
    else:
        vocabulary = VOCABULARY_ON_ONE if ranks == 1 and name == "llama-1b" else None
        model = llama(name, "meta", vocabulary=vocabulary)
    model = model.to(torch.bfloat16)
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, torch.nn.Parameter):
            kept[whole.untyped_storage()._cdata] = (whole.nbytes, tensor)
        return tensor

    ids = torch.zeros(2, 1024, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layer_parameters": sum(p.numel() for p in model.model.layers.parameters()),
        "activation_bytes": sum(nbytes for nbytes, _ in kept.values()) / ids.numel(),
    }


if __name__ == "__main__":
    functional.scaled_dot_product_attention = attention
    print(json.dumps([counts(name, ranks) for name, ranks in STOCK]))
