"""A folder of safetensors becomes a sharded model, each rank its rows, or the load is refused."""

import json
from pathlib import Path

import pytest
import torch
from selection import REPO
from torch import nn

from overlap_recipes.checkpoint.hub_folder import load_folder
from rankproof.run import run

SCRIPT = REPO / "tests" / "data" / "load_hub_folder.py"
INDEX = "model.safetensors.index.json"


def test_logits_are_those_of_from_pretrained_and_what_differs_is_named() -> None:
    pytest.importorskip("transformers", "5")
    report = run(SCRIPT, 2, launcher="warm", deadline_s=120)
    assert report.ok, report.describe()


def write(file: Path, place: dict, value: float = 1.0) -> None:
    """A file of safetensors with ``weight``, of which the header says ``place`` besides."""
    header = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | place
    said = {key: entry for key, entry in header.items() if entry is not None}
    text = json.dumps({"weight": said}).encode()
    numbers = torch.full((2, 2), value).numpy().tobytes()
    file.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def loaded(folder: Path) -> torch.Tensor:
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    load_folder(model, folder, torch.device("cpu"))
    return model.weight.detach()


def test_an_index_chooses_among_files(tmp_path):
    write(tmp_path / "a.safetensors", {}, 1.0)
    write(tmp_path / "b.safetensors", {}, 2.0)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": "b.safetensors"}}))
    assert loaded(tmp_path).tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_an_older_index_beside_a_file_that_from_pretrained_takes_is_refused(tmp_path):
    write(tmp_path / "model-00001-of-00001.safetensors", {}, 1.0)
    write(tmp_path / "model.safetensors", {}, 2.0)
    of_others = {"weight": "model-00001-of-00001.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": of_others}))
    with pytest.raises(ValueError, match=r"model\.safetensors.*remove one of the two"):
        loaded(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": ["weight"]}'])
def test_an_index_that_is_cut_is_named(tmp_path, text):
    write(tmp_path / "a.safetensors", {})
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{INDEX} is cut"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "place",
    [{"data_offsets": [-16, 0]}, {"dtype": None}, {"shape": None}, {"data_offsets": None}],
    ids=["before the first byte", "no dtype", "no shape", "no offsets"],
)
def test_a_header_with_a_wrong_place_names_its_file(tmp_path, place):
    write(tmp_path / "a.safetensors", place)
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        loaded(tmp_path)
