"""Train a small Llama to convergence with moments in 8 bits, and with moments in fp32.

    python -m benchmarks.eight_bit_loss            # three seeds; minutes on a CPU
    python -m benchmarks.eight_bit_loss --small --out /tmp/rehearsal

The model learns sequences of a fixed permutation of its words, with noise: what is left of the loss
is the noise. Layers are streamed in bf16, gradients are clipped, the rate falls by a cosine. A row
has the mean loss of the last ``LAST`` steps on batches that are drawn anew, by ``seed`` and
``moments``; samples: the loss of every step.
"""

import statistics

import torch
import transformers

from benchmarks import measuring
from overlap_recipes.offload import HostAdamW, stream_layers

WORDS, LENGTH, SEQUENCES = 64, 16, 16
NOISE = 0.1  # of the words are drawn at random
SEEDS = (0, 1, 2)
STEPS, LAST = 200, 40
SMALL_STEPS = 60
RATE, MAX_NORM = 3e-3, 1.0


def new_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=WORDS,
    )
    return transformers.LlamaForCausalLM(config).bfloat16().train()


def batch(generator: torch.Generator) -> torch.Tensor:
    """Each word is followed by the one that the permutation says, or by any."""
    permutation = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    words = [torch.randint(WORDS, (SEQUENCES,), generator=generator)]
    for _ in range(LENGTH - 1):
        by_chance = torch.randint(WORDS, (SEQUENCES,), generator=generator)
        is_noise = torch.rand(SEQUENCES, generator=generator) < NOISE
        words.append(torch.where(is_noise, by_chance, permutation[words[-1]]))
    return torch.stack(words, 1)


def losses_of(moments: str, seed: int, device: torch.device, steps: int) -> list[float]:
    model = new_model(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    found = []
    with (
        stream_layers(model, model.model.layers, device) as streamed,
        HostAdamW(
            model.parameters(), streamed, lr=RATE, max_norm=MAX_NORM, moments=moments
        ) as optimizer,
    ):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            ids = batch(generator).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            found.append(loss.item())
    return found


def main() -> None:
    options = measuring.command_line(__doc__).parse_args()
    steps = SMALL_STEPS if options.small else STEPS
    with measuring.started_rank() as device:
        workload = {
            "model": "Llama of 2 layers, width 64",
            "precision": "bfloat16 weights and gradients, float32 masters",
            "steps": steps,
        }
        head = measuring.header("eight_bit_loss", device, workload, {})
        results = measuring.Results(options.out, head, ("8bit", "fp32"), ("seed",))
        for seed in SEEDS:
            for moments in ("fp32", "8bit"):
                if results.find(moments, seed=seed):
                    continue
                losses = losses_of(moments, seed, device, steps)
                fields = {
                    "name": moments,
                    "seed": seed,
                    "last_loss": statistics.mean(losses[-LAST:]),
                    "steps": steps,
                    "model": "llama-2-layers",
                    "loop": "reads",
                    "compiled": False,
                    "samples": {"loss": losses},
                }
                results.add(fields)
                measuring.tell(f"seed {seed}, {moments}: {fields['last_loss']:.4f}")


if __name__ == "__main__":
    main()
