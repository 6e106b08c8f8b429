"""What was exported beside training is loaded by those who have none of our code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from selection import REPO

SCRIPT = REPO / "tests" / "data" / "export_llama.py"


def test_from_pretrained_gives_the_logits_of_the_trained_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, SCRIPT, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = torch.load(tmp_path / "expected.pt")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(input_ids=expected["tokens"]).logits, expected["logits"])
