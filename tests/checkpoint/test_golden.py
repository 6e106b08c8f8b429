"""Checkpoints that earlier versions of this code have written load with today's, bit for bit."""

import shutil
from pathlib import Path

import pytest

from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"
GOLDEN = sorted((DATA / "golden").iterdir())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_checkpoints_of_earlier_code_load_bit_for_bit(ranks: int) -> None:
    folders = tuple(map(str, GOLDEN))
    report = run(DATA / "load_golden.py", ranks, launcher="warm", args=folders, deadline_s=120)
    assert report.ok, report.describe()
    assert len(GOLDEN) == 4


def test_a_golden_checkpoint_with_another_bit_is_not_taken_for_it(tmp_path: Path) -> None:
    golden = GOLDEN[0]
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
