"""The README's tables of results and versions: written, checked, and marked when out of date."""

import json

import pytest
from results_site import (
    RECIPE,
    STALE,
    edit_code,
    edit_prose,
    lint,
    measure,
    measured_steps,
    recipe_of,
)

from benchmarks import readme_table, result_files
from harness.sources import code_sha256


def test_the_readme_is_written_checked_and_a_hand_edit_fails(repo):
    readme = repo / "README.md"
    assert lint(repo).returncode == 0
    assert readme_table.NO_RESULTS in readme.read_text()
    assert lint(repo, "--check").returncode == 0

    measure(repo)
    process = lint(repo, "--check")
    assert process.returncode == 1 and "run: make readme" in process.stdout
    assert lint(repo).returncode == 0
    written = readme.read_text()
    assert "| `overlapped` | 1.20 ms |" in written and "`none`" not in written
    assert written.startswith("# Title\n\n") and written.endswith("\n\nAfter.\n")
    assert lint(repo, "--check").returncode == 0

    readme.write_text(written.replace("1.20 ms", "1.10 ms"))
    assert lint(repo, "--check").returncode == 1
    assert "1.10 ms" in readme.read_text()


def test_the_readme_shows_what_varies_in_tokens_as_a_table_over_tokens(repo):
    measured_steps(repo)
    assert lint(repo).returncode == 0
    written = (repo / "README.md").read_text()
    assert "| | 2,048 | 4,096 |" in written and "| `streamed` | 25.0 % | 50.0 % |" in written


@pytest.mark.parametrize("over_tokens", [False, True])
def test_the_readme_marks_what_was_measured_on_an_earlier_version(repo, over_tokens):
    if over_tokens:
        steps = {"tokens": 2048, "kept": 0.2, "samples": {}}
        rows = [steps | {"name": "overlapped", "recipes": []}, steps | {"name": "async_save"}]
        path = measure(repo, rows=rows, benchmark="offload_step")
        path.rename(path.with_name("offload_step.test-x2.json"))
    else:
        measure(repo)
    readme = repo / "README.md"
    note = "\n\n† Measured on an earlier version of `async_save`: the code has changed since."
    assert lint(repo).returncode == 0 and "†" not in readme.read_text()

    edit_prose(repo)
    assert lint(repo, "--check").returncode == 0

    edit_code(repo)
    process = lint(repo, "--check")
    assert process.returncode == 1 and "run: make readme" in process.stdout
    assert lint(repo).returncode == 0
    written = readme.read_text()
    assert "| `async_save` † | " in written and "| `overlapped` | " in written
    assert written.count(note) == 1


def test_the_readme_marks_a_single_figure_of_an_earlier_version(repo):
    row = {"name": "async_save", "kept": 0.2, "samples": {}}
    of_today = {"code_sha256": {"async_save": code_sha256(recipe_of(repo))}}
    earlier = {"code_sha256": {"async_save": "0" * 64}}
    rows = [row | {"tokens": 2048} | of_today, row | {"tokens": 4096} | earlier]
    path = measure(repo, rows=rows, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    assert lint(repo).returncode == 0
    written = (repo / "README.md").read_text()
    assert "| `async_save` | 20.0 % | 20.0 % † |" in written and f"† {STALE}" in written


def test_the_readme_says_which_torch_the_recipes_ran_on(repo):
    recipe_of(repo).with_name("pinned_staging.py").write_text(RECIPE)

    def run(name: str, ok: bool) -> dict:
        hashes = result_files.hashes_of([name], repo)
        return {"code_sha256": hashes, "ok": ok, "date": "2026-01-02", "failures": []}

    (repo / "guide").mkdir()
    recipes = {
        "async_save": run("async_save", True),
        "pinned_staging": run("pinned_staging", False),
    }
    record = {"2.9.1": {"ranks": 2, "recipes": recipes}}
    (repo / "guide" / "versions.json").write_text(json.dumps(record))
    readme = repo / "README.md"
    assert lint(repo).returncode == 0
    row = "| CPU, 2 ranks | 2.9.1 | 1 of 2 | `pinned_staging` | 2026-01-02"
    assert f"{row} |" in readme.read_text()
    edit_code(repo)
    assert lint(repo, "--check").returncode == 1 and lint(repo).returncode == 0
    assert f"{row}, 1 of them in an earlier version |" in readme.read_text()


def test_a_readme_without_markers_is_an_error(repo):
    (repo / "README.md").write_text("# Title\n")
    process = lint(repo, "--check")
    assert process.returncode == 1 and "<!-- results:begin -->" in process.stderr
