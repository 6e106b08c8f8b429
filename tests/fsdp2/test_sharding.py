"""The articles on sharded training: right where they say so, an error on every rank elsewhere."""

import ast
import sys
from pathlib import Path

import pytest

from rankproof.run import run

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tests" / "data" / "sharded_training.py"
PAGES = ROOT / "recipes_source" / "sharding"


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
        (1, ("between_steps",)),
        (2, ("between_steps", "models", "forwards", "backwards")),
        (2, ("tensors_kept_beside_results", "updates_between")),
        (3, ("few_rows",)),
    ],
)
def test_programs_train_the_right_bits_or_raise_on_every_rank(ranks, programs) -> None:
    """Each says what it is about, in the file that the ranks run, which names it if it fails."""
    report = run(TRAINING, ranks, launcher="warm", args=programs)
    assert report.ok, report.describe()
