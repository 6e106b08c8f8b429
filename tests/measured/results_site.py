"""A repository of one recipe, what was measured of it, and the pages that show that."""

import json
import os
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

REPO = Path(__file__).resolve().parents[2]
RECIPE = '''"""A recipe."""


def save(app):
    """Save it."""
    return app  # at once
'''


def recipe_of(repo: Path) -> Path:
    return repo / "recipes_source" / "checkpoint" / "async_save.py"


OURS = ("async_save", "pinned", "overlapped")
OF_TODAY = {"version": "0.2.1", "commit": "abc"}


def row(name: str, stall: float | None, **more) -> dict:
    return {"name": name, "staging_cost_s": stall, "samples": {"staging_cost_s": [stall] * 3}} | {
        "storage": "memory",
        "step": "long",
        **OF_TODAY,
        "ours": name in OURS,
        **more,
    }


def measure(repo: Path, ranks: int = 2, rows: list[dict] | None = None, **more) -> Path:
    """Write a result file of made-up values into a repository made for a test."""
    rows = rows or [
        row("overlapped", 0.0012, bound_s=0.116, bound_from="state over the pinned rate"),
        row("none", None, step_s=0.3),
        row("async_save", 3.8, loaded_back_bitwise=True, note="the shipped defaults"),
        row("a_peer", 0.3, loaded_back_bitwise=False),
    ]
    data = {
        "benchmark": "checkpoint_stall",
        "torch": "2.11.0",
        "device": "Test GPU",
        "driver": "1.2",
        "ranks": ranks,
        "date": "2026-01-02",
        "workload": {"model": "a stack of layers", "state_bytes_per_rank": 6_440_000_000}
        | {"tokens_per_step": {"long": 65536, "short": 8192}},
        "link": {"pinned_d2h_bytes_per_s": 55.4e9},
        "rows": rows,
        "not_run": {"another_peer": "ImportError: no wheel, see --help"},
    } | more
    path = repo / "benchmarks" / "results" / f"checkpoint_stall.test-x{ranks}.json"
    path.write_text(json.dumps(data))
    return path


def render(repo: Path, page: str) -> tuple[str, str]:
    """Build (or build again) a site of a page and a recipe's page; return HTML and warnings."""
    source = repo / "site"
    (source / "recipes" / "checkpoint").mkdir(parents=True, exist_ok=True)
    (source / "conf.py").write_text(
        f'extensions = ["lanes", "results", "timeline"]\nresults_repo = {str(repo)!r}\n'
    )
    files = {
        "index.rst": "Title\n=====\n\n.. toctree::\n\n   recipes/checkpoint/async_save\n\n" + page,
        "recipes/checkpoint/async_save.rst": "Async save\n==========\n",
    }
    for name, text in files.items():
        if not (source / name).exists() or (source / name).read_text() != text:
            (source / name).write_text(text)
    warnings = repo / "warnings"
    with warnings.open("w") as stream, docutils_namespace():
        trees = repo / "trees"
        Sphinx(source, source, repo / "out", trees, "html", status=None, warning=stream).build()
    return (repo / "out" / "index.html").read_text(), warnings.read_text()


def change_cost(repo: Path, rows: str, version: str = "0.3.0") -> None:
    """Give the changelog a version since which ``rows`` cost otherwise, on top of what it has."""
    changelog = repo / "guide" / "changelog.rst"
    before = changelog.read_text()
    title = f"2026-07-01, version {version}"
    entry = f"{title}\n{'-' * len(title)}\n\n* **Changes a cost** ({rows}). Two threads write.\n\n"
    changelog.write_text(entry + before)


def lint(repo: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.first_tables", "--repo", str(repo)]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)


STALE = "Measured on an earlier version"
