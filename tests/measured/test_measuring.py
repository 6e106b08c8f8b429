"""What all benchmarks share: intervals of medians, turns, tasks in order."""

import random
from pathlib import Path

import pytest

from benchmarks.measuring import Results, median_interval


def test_the_interval_holds_the_median_of_heavy_tails() -> None:
    draw, held, runs = random.Random(0), 0, 300
    for _ in range(runs):
        low, high = median_interval([draw.gauss(0, 1) ** 3 for _ in range(12)], draws=400)
        held += low <= 0 <= high
    assert held / runs >= 0.92


def test_rows_of_another_commit_stay_until_they_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(commit: str) -> Results:
        monkeypatch.setenv("MEASURED_COMMIT", commit)
        head = {"benchmark": "any", "device": "CPU", "ranks": 1}
        return Results(tmp_path, head, ours=("ours",), varied=("tokens",))

    first = results("abc")
    for row in ({"name": "ours", "tokens": 1}, {"name": "theirs"}):
        first.add(row)
    assert results("abc").data == first.data and results("abc").has("ours", tokens=1)
    second = results("def")
    assert [row["name"] for row in second.present()] == ["theirs"], "a peer's is of any commit"
    second.add({"name": "ours", "tokens": 2})
    third = results("def")
    codes = {row.get("tokens"): row["commit"] for row in third.data["rows"] if row["ours"]}
    assert codes == {1: "abc", 2: "def"}
    assert not third.has("ours", tokens=1) and third.has("ours", tokens=2)
    third.add({"name": "ours", "tokens": 1})
    assert len(third.data["rows"]) == 3 and third.find("ours", tokens=1)["commit"] == "def"
