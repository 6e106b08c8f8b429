"""What a trainer's own asynchronous save does, found without a GPU."""

import pytest
from selection import REPO

from harness.run import run

PINNED = REPO / "tests" / "data" / "torchtitan_pinned.py"


def test_torchtitans_pinned_copy_does_not_wait_for_the_step() -> None:
    """Its staging thread reads what ``optimizers.step()`` wrote, and no event orders the two.

    On a GPU with work queued the checkpoint then holds the weights of the step before.
    """
    pytest.importorskip("torchtitan")
    report = run(PINNED, 1, launcher="warm", order=True)
    assert report.kinds == {"unordered_access"}, report.describe()
    conflict = report.failures[0].text
    step = PINNED.read_text().splitlines().index("        optimizers.step()") + 1
    assert "_state_dict_stager.py" in conflict
    assert f"torchtitan_pinned.py:{step} writes" in conflict


def test_an_event_behind_the_step_orders_it() -> None:
    pytest.importorskip("torchtitan")
    report = run(PINNED, 1, launcher="warm", order=True, args=("--ordered",))
    assert report.ok, report.describe()
