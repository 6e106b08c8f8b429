"""What several ranks hold is read once in all, by ranks that read about as much as each other."""

from pathlib import Path

import pytest

from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    "ranks, what",
    [
        (2, ("ddp", "mixed", "targets", "damage")),
        (3, ("trouble", "others", "unlike")),
        (4, ("hsdp",)),
    ],
)
def test_each_byte_is_read_once_and_every_rank_has_it(ranks: int, what: tuple[str, ...]) -> None:
    report = run(DATA / "shared_loads.py", ranks, launcher="warm", args=what, deadline_s=200)
    assert report.ok, report.describe()
