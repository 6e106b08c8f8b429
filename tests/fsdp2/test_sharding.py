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


@pytest.mark.parametrize(
    ("ranks", "programs"),
    [
        (1, ("between_steps", "let_go")),
        (2, ("between_steps", "models", "forwards", "backwards")),
        (2, ("tensors_kept_beside_results", "updates_between")),
        (3, ("few_rows",)),
    ],
)
def test_programs_train_the_right_bits_or_raise_on_every_rank(ranks, programs) -> None:
    """Each says what it is about, in the file that the ranks run, which names it if it fails."""
    run_ranks(ranks, *programs)


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (3, 2)])
def test_a_checkpoint_of_async_save_goes_on_at_another_world_size(
    saving: int, loading: int, tmp_path: Path
) -> None:
    run_ranks(saving, "save", keep=tmp_path / "saved")
    run_ranks(loading, "load", "--saved", str(tmp_path / "saved" / "dir"))
