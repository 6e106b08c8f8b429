"""Checkpoints that earlier versions of this code have written load with today's, bit for bit."""

import shutil
from pathlib import Path

import pytest

from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"
GOLDEN = sorted((DATA / "golden").iterdir())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda folder: folder.name)
def test_a_checkpoint_of_earlier_code_loads_bit_for_bit(golden: Path, ranks: int) -> None:
    report = run(DATA / "load_golden.py", ranks, launcher="warm", args=(str(golden),))
    assert report.ok, report.describe()


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda folder: folder.name)
def test_a_golden_checkpoint_with_another_bit_is_not_taken_for_it(
    golden: Path, tmp_path: Path
) -> None:
    copy = tmp_path / golden.name
    shutil.copytree(golden, copy)
    expected = copy / "expected.json"
    text = expected.read_text()
    at = text.index('"/model/1.weight": "') + len('"/model/1.weight": "')
    other = "0" if text[at] != "0" else "1"
    expected.write_text(text[:at] + other + text[at + 1 :])
    report = run(DATA / "load_golden.py", 1, launcher="warm", args=(str(copy),))
    assert [f.text for f in report.failures] == [
        "AssertionError: not as saved: ['/model/1.weight']"
    ]
