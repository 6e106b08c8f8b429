"""Scripts of ``tests/data`` that put recipes into trouble; an argument names which."""

from pathlib import Path

from rankproof.run import Report, run


def survives(script: str, trouble: str, ranks: int = 1) -> Report:
    """The report of ``tests/data/<script>.py``, which must pass."""
    path = Path(__file__).parent / "data" / f"{script}.py"
    report = run(path, ranks, launcher="warm", args=(trouble,), deadline_s=120)
    assert report.ok, report.describe()
    return report
