"""PyTorch's ``DefaultStager`` orders nothing: the recorder names the edge that is missing."""

from pathlib import Path

from harness.run import run

SCRIPT = Path(__file__).parent / "data" / "stager_order.py"


def test_the_recorder_names_the_step_that_default_stager_does_not_wait_for() -> None:
    report = run(SCRIPT, 1, launcher="warm", order=True, deadline_s=60)
    assert report.kinds == {"unordered_access"}, report.describe()
    assert "optimizer.step()" in report.describe() or "stager_order.py" in report.describe()
