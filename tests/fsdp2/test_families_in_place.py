"""Stock transformers models train the same bits in place as on stock FSDP2.

Small random configurations of ``tests/data/in_place_families.py``: six of them, one of
each kind, or all with ``--all-models``.
"""

import sys
from pathlib import Path

import pytest

from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"
sys.path.insert(0, str(DATA))

from in_place_families import CHEAP, FAMILIES  # noqa: E402


@pytest.mark.parametrize("half", [0, 1])
def test_every_family_has_the_bits_of_stock_fsdp2(half: int, pytestconfig: pytest.Config) -> None:
    families = CHEAP
    if pytestconfig.getoption("--all-models"):
        families = list(FAMILIES)
    names = ",".join(families[half::2])
    program = DATA / "in_place_families.py"
    report = run(program, 2, launcher="warm", args=(names,), deadline_s=60 * len(families))
    assert report.ok, report.describe()


def test_families_are_many_and_the_cheap_ones_among_them() -> None:
    assert len(FAMILIES) >= 24
    assert set(CHEAP) <= set(FAMILIES)
