"""The first code block of a page on offload runs as a reader pastes it, and it trains."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist
from host_training import CPU, batch, linear, llama
from torch import nn

PAGES = Path(__file__).parents[2] / "recipes_source" / "offload"

pytestmark = pytest.mark.usefixtures("one_thread", "importable")


def snippets(page: str) -> list[str]:
    """The code blocks of a page's prose."""
    lines = [line.removeprefix("# ").rstrip("#\n") for line in page.splitlines()]
    found = []
    for number, line in enumerate(lines):
        if line == ".. code-block:: python":
            block = []
            for following in lines[number + 1 :]:
                if following and not following.startswith(" "):
                    break
                block.append(following)
            found.append(dedent("\n".join(block)).strip())
    return found


STOCK = ("train_what_does_not_fit",)  # pages that take a stock Llama
PASTED = ["activation_offload", *STOCK]


@pytest.mark.parametrize("name", PASTED)
def test_what_a_reader_copies_runs(name):
    """With what is said to be the reader's own; it trains, and leaves no group."""
    device = torch.accelerator.current_accelerator(check_available=True) or CPU
    torch.manual_seed(0)
    model = llama() if name in STOCK else linear(16, 24, 24, 16).to(device)
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    made = batch if name in STOCK else lambda _: torch.randn(2, 16)
    batches = [made(seed) for seed in range(3)]
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    def train_step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()
        optimizer.step()

    yours: dict[str, object] = {
        "torch": torch,
        "device": device,
        "model": model,
        "layers": list(model) if isinstance(model, nn.Sequential) else model.model.layers,
        "optimizer": optimizer,
        "batch": batches[0],
        "batches": batches,
        "loss_of": loss_of,
        "train_step": train_step,
        "budget": 1 << 20,
        "window": 1 << 16,
    }
    snippet, *_ = snippets((PAGES / f"{name}.py").read_text())
    exec(compile(snippet, name, "exec"), yours)
    assert not any(map(torch.equal, before, (p.cpu() for p in model.parameters())))
    assert not dist.is_initialized()


TRAINS = """
model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
activations = HostActivations(torch.device("cpu"), 8 << 20)
with activations.saving():
    loss = model(torch.randn(1024, 512)).square().mean()
loss.backward()
print(activations.moved > 0)
"""


def test_activations_of_a_script_that_ends_say_nothing(tmp_path):
    """The class in the script itself, as its page says, the object global: Python clears both."""
    page = (PAGES / "activation_offload.py").read_text()
    end = page.index("# %%\n# Run it, and prove it")
    script = tmp_path / "train.py"
    script.write_text(page[:end] + TRAINS)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
    assert "Exception ignored" not in ran.stderr
