"""The articles on sharded training: right where they say so, an error on every rank elsewhere.

``tests/data/sharded_training.py`` is what the ranks run.
"""

import ast
import sys
from pathlib import Path

import pytest

from rankproof.run import Report, run

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tests" / "data" / "sharded_training.py"
PAGES = ROOT / "recipes_source" / "sharding"


def run_ranks(ranks: int, *args: str, keep: Path | None = None) -> Report:
    report = run(TRAINING, ranks, launcher="warm", args=args, keep=keep)
    assert report.ok, report.describe()
    return report


@pytest.mark.parametrize("name", ["stream_context", "fsdp2_settings"])
def test_an_article_from_scratch_needs_torch_alone(name: str) -> None:
    found = set()
    for node in ast.walk(ast.parse((PAGES / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "a file beside it").partition(".")[0])
    assert found - sys.stdlib_module_names == {"torch"}


def test_a_parameter_of_fewer_rows_than_ranks_is_trained() -> None:
    run_ranks(3, "few_rows")


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_comes_between_two_steps_changes_no_bit(ranks: int) -> None:
    """A forward that raised, an evaluation, a forward without backward, a load in place."""
    run_ranks(ranks, "between_steps")


@pytest.mark.parametrize(
    "trouble",
    ["models", "forwards", "backwards", "tensors_kept_beside_results", "updates_between"],
)
def test_what_is_outside_the_scope_raises_on_every_rank(trouble: str) -> None:
    run_ranks(2, trouble)


def test_a_context_goes_with_its_model() -> None:
    run_ranks(1, "let_go")


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (3, 2)])
def test_a_checkpoint_of_async_save_goes_on_at_another_world_size(
    saving: int, loading: int, tmp_path: Path
) -> None:
    run_ranks(saving, "save", keep=tmp_path / "saved")
    run_ranks(loading, "load", "--saved", str(tmp_path / "saved" / "dir"))
