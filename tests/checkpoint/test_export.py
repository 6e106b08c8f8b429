"""What was exported beside training is loaded by those who have none of our code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from selection import REPO, with_library
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from harness.run import run

pytest.importorskip("safetensors")
sys.path.insert(0, str(REPO / "recipes_source" / "checkpoint"))

from export import read_all  # noqa: E402

from overlap_recipes.checkpoint.export import DTYPES, Exports, convert, weights  # noqa: E402

SCRIPT = REPO / "tests" / "data" / "export_llama.py"


def test_from_pretrained_gives_the_logits_of_the_trained_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, SCRIPT, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env=with_library(),
    )
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


def test_every_cut_of_a_tensor_comes_to_its_place() -> None:
    report = run(REPO / "tests" / "data" / "export_shards.py", 4, launcher="warm", deadline_s=60)
    assert report.ok, report.describe()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))


def test_a_model_in_wrappers_loses_no_weight() -> None:
    """Compiled as a whole or by layer, or recomputed: the names differ, the state does not."""
    expected = weights(Tied()).keys()
    assert len(expected) == 6 and "head.weight" not in expected
    by_layer, recomputed = Tied(), Tied()
    for n, layer in enumerate(by_layer.layers):
        by_layer.layers[n] = torch.compile(layer)
        recomputed.layers[n] = checkpoint_wrapper(recomputed.layers[n])
    for model in (torch.compile(Tied()), by_layer, recomputed):
        assert weights(model).keys() == expected


def exported(state: dict, directory: Path, **options) -> dict[str, torch.Tensor]:
    with Exports(torch.device("cpu"), **options) as exports:
        exports.save(state, directory)
    return read_all(directory)


def test_every_dtype_and_layout_comes_back(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    state = {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES}
    state |= {"turned": matrix.t(), "skipped": matrix[:, ::2], "expanded": matrix[:1].expand(5, 4)}
    state |= {"scalar": torch.tensor(7), "empty": torch.zeros(0, 3)}
    found = exported(state, tmp_path / "hf")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with pytest.raises(RuntimeError, match=r"no dtype for \['x'\]"):
        exported({"x": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "complex")


def test_an_export_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    """A restarted run comes to a step again."""
    exported({"x": torch.zeros(3), "y": torch.zeros(3)}, tmp_path / "hf", file_bytes=12)
    assert exported({"x": torch.ones(3)}, tmp_path / "hf")["x"].sum() == 3
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_conversion_of_nothing_or_over_something_is_refused(tmp_path: Path) -> None:
    state = {"app": {"model": {"w": torch.ones(3), "w._extra_state": [1, 2]}}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    convert(tmp_path / "saved", tmp_path / "hf")
    assert list(read_all(tmp_path / "hf")) == ["w"]
    for directory, prefix in (("other", "run.model."), ("hf", "app.model.")):
        with pytest.raises(BaseException, match="no tensors, another export"):
            convert(tmp_path / "saved", tmp_path / directory, prefix)
