"""Scripts of ``tests/data`` that put recipes into trouble; arguments name which, in turn."""

from pathlib import Path

from rankproof.run import Report, run


def survives(script: str, *troubles: str, ranks: int = 1) -> Report:
    """The report of ``tests/data/<script>.py``, which must pass."""
    path = Path(__file__).parent / "data" / f"{script}.py"
    report = run(path, ranks, launcher="warm", args=troubles, deadline_s=120)
    assert report.ok, report.describe()
    return report
