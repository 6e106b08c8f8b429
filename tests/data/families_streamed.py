"""Seventy-six families of transformers: three steps streamed, by the bits of a resident run.

families_streamed.py [NAME...]    by hand; exit status 1 if one is wrong

Where ``every_bit`` is False, weights may differ by ``ROUNDING``: sums of a tensor that many layers
get are in another order.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import numpy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from stock_models import CAUSAL, DECODER, EXPERTS, LINEAR, STOCK, Stock, masked  # noqa: E402
from torch import nn  # noqa: E402

from overlap_recipes.offload import HostAdamW, stream_layers  # noqa: E402

STEPS, ROUNDING = 3, 1e-5
HEADS = {"head_dim": 8}
SLIDING = HEADS | {"sliding_window": 4}
MAMBA = {"mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4}
GROUPS = EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
GROUPS |= {"first_k_dense_replace": 1}
SHARED = EXPERTS | {"shared_intermediate_size": 32}
HYBRID = SHARED | MAMBA | {"mamba_n_heads": 8, "layer_types": ["mamba", "attention", "mamba"]}
MORE = {  # decoders that STOCK has not, by their sizes
    "starcoder2": {},
    "stablelm": {},
    "granite": {},
    "granitemoe": EXPERTS,
    "granitemoeshared": SHARED,
    "granitemoehybrid": HYBRID,
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": GROUPS | HEADS,
    "nemotron": {},
    "olmo": {},
    "olmo3": SLIDING,
    "flex_olmo": EXPERTS,
    "phi": {},
    "phimoe": EXPERTS,
    "cohere2": SLIDING,
    "helium": HEADS,
    "smollm3": {},
    "arcee": {},
    "ernie4_5": HEADS,
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": SLIDING,
    "seed_oss": HEADS,
    "gemma": HEADS,
    "vaultgemma": SLIDING,
    "apertus": {},
    "hunyuan_v1_dense": HEADS,
    "deepseek_v2": GROUPS | LATENT,
    "deepseek_v3": GROUPS | LATENT,
    "qwen3_5_text": LINEAR,
    "diffllama": {},
    "minimax_m2": EXPERTS | HEADS,
    "ministral": SLIDING,
    "bitnet": {},
    "doge": {},
    "jetmoe": EXPERTS | {"kv_channels": 8},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "bamba": MAMBA | {"mamba_n_heads": 8, "attn_layer_indices": [1]},
}
SETTINGS = {"lr": 1e-2, "eps": 1e-4}


def train(stock: Stock, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        numpy.random.seed(step)  # masks of sound
        model(**stock.inputs(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def difference(stock: Stock) -> float:
    """The largest of a weight between the two runs."""
    resident, model = stock.model(), stock.model()
    train(stock, resident, torch.optim.AdamW(resident.parameters(), fused=True, **SETTINGS))
    with (
        stream_layers(model, stock.layers_of(model), "cpu") as streamed,
        HostAdamW(model.parameters(), streamed, **SETTINGS) as optimizer,
    ):
        train(stock, model, optimizer)
    found = []
    for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        found.append((ours - theirs).abs().max().item())
    return max(found)


def main(*chosen: str) -> int:
    torch.set_num_threads(1)
    stocks = [stock for stock in STOCK if stock.layers]
    stocks += [Stock(name, CAUSAL, DECODER, masked, sizes) for name, sizes in MORE.items()]
    wrong = []
    for stock in stocks:
        if chosen and stock.name not in chosen:
            continue
        found = difference(stock)
        print(f"{stock.name}: {'every bit' if found == 0 else found}", flush=True)
        if found > (0 if stock.every_bit else ROUNDING):
            wrong.append(stock.name)
    print(f"wrong: {' '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main(*sys.argv[1:]))
