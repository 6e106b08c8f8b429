"""A folder of safetensors becomes a sharded model, each rank its rows, or the load is refused."""

import pytest
from selection import REPO

from harness.run import run

SCRIPT = REPO / "tests" / "data" / "load_hub_folder.py"


def test_logits_are_those_of_from_pretrained_and_what_differs_is_named() -> None:
    pytest.importorskip("transformers", "5")
    report = run(SCRIPT, 2, launcher="warm", deadline_s=120)
    assert report.ok, report.describe()
