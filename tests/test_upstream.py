"""Each reproducer of a defect of torch finds what the record has for the torch that is here."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "upstream"))
from record import RECORD, outcome, scripts  # noqa: E402

VERSION = torch.__version__.partition("+")[0]
FOUND = json.loads(RECORD.read_text(encoding="utf-8")).get(VERSION, {}).get("found", {})


@pytest.mark.skipif(not FOUND, reason=f"nobody has recorded torch {VERSION}")
@pytest.mark.parametrize("script", scripts(), ids=lambda script: script.stem)
def test_a_reproducer_finds_what_was_recorded(script: Path, plain_python, tmp_path: Path) -> None:
    """In a fork of an interpreter that has imported torch, unless it starts ranks itself."""
    if script.parent.name == "two_ranks":
        found = outcome(script)
    else:
        found = plain_python(str(script), str(tmp_path))["said"].strip().splitlines()[-1]
    assert found == FOUND[script.stem]
