"""Every way of saving, in a loop of a stock Llama that does all that may disturb a save."""

from pathlib import Path

import pytest

from rankproof.run import run

SCRIPT = Path(__file__).parents[2] / "tools" / "stress_saves.py"


@pytest.mark.parametrize(
    "saves,ways",
    [
        (12, ["overlapped", "async_save", "pinned_staging", "default_stager"]),
        pytest.param(200, ["overlapped"], marks=pytest.mark.all_models),
    ],
)
def test_every_checkpoint_is_right_and_memory_is_flat(saves: int, ways: list[str]) -> None:
    args = ("--saves", str(saves), "--ways", *ways)
    report = run(SCRIPT, 2, launcher="warm", args=args, deadline_s=400)
    assert report.ok, report.describe()
    assert report.outputs[0].count("every bit right") == len(ways)
