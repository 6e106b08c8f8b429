"""Programs of users that went wrong once, after public reports: each asserts what is right."""

from pathlib import Path

import pytest

from rankproof.run import run

CASES = Path(__file__).parent / "cases"
DEADLINE_S = 60.0
LOST = "checkpoint/lost_saves.py"
RANKS = "checkpoint/ranks_differ.py"
HEADS_REFUSED = ("layer", "order", "idle", "changed", "scaler")
RIGHT = [
    ("float8_weights", "checkpoint/float8_weights.py", 2, ("resumes",)),
    ("eight_bit_moments", "checkpoint/eight_bit_moments.py", 2, ("resumes",)),
    ("eight_bit_moments_of_uneven_shards", "checkpoint/eight_bit_moments.py", 2, ("uneven",)),
    ("eight_bit_moments_of_stock", "checkpoint/eight_bit_moments.py", 1, ("stock",)),
    ("schedulefree_before_train", "checkpoint/schedulefree_resumes.py", 1, ("not_entered",)),
    ("schedulefree", "checkpoint/schedulefree_resumes.py", 1, ("trains",)),
    ("schedulefree_in_eval_mode", "checkpoint/schedulefree_resumes.py", 1, ("evaluates",)),
    ("schedulefree_with_app_state", "checkpoint/schedulefree_resumes.py", 1, ("plain",)),
    ("int8_moments", "checkpoint/own_moments.py", 2, ("int8",)),
    ("bf16_moments", "checkpoint/own_moments.py", 2, ("bf16",)),
    ("plain_moments_of_a_shard", "checkpoint/own_moments.py", 2, ("local",)),
    ("float8_failure_is_told", "checkpoint/float8_weights.py", 1, ("told",)),
    ("loader_per_rank", "checkpoint/loader_of_each_rank.py", 2, ()),
    ("ranks_apart", "offload/ranks_apart.py", 2, ("layer_drop", "seeds", "gradients")),
    ("ranks_of_a_small_host", "offload/ranks_apart.py", 2, ("small_host",)),
    ("heads_trained", "offload/heads_on_ranks.py", 2, ("heads", "shapes", "nobody", "in_turn")),
    ("heads_refused", "offload/heads_on_ranks.py", 2, HEADS_REFUSED),
    ("asked_to_leave", "checkpoint/asked_to_leave.py", 2, ()),
    ("ranks_that_differ", RANKS, 2, ("refused",)),
    ("ranks_alike", RANKS, 2, ("taken",)),
    ("ranks_that_drift", RANKS, 2, ("later",)),
    ("what_is_of_each_rank", RANKS, 2, ("each",)),
    ("tuple_moments", "checkpoint/own_moments.py", 2, ("tuple",)),
    ("saved_in_a_handler", LOST, 2, ("handler",)),
    ("saved_before_an_error", LOST, 2, ("error",)),
    ("saved_before_an_interrupt", LOST, 2, ("interrupted",)),
    ("saved_before_an_error_on_one_rank", LOST, 2, ("one_rank",)),
]


@pytest.mark.parametrize(
    ("script", "ranks", "args"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT]
)
def test_a_program_that_is_right(script: str, ranks: int, args: tuple[str, ...]) -> None:
    report = run(CASES / script, ranks, launcher="warm", args=args, deadline_s=DEADLINE_S)
    assert report.ok, report.describe()


def test_every_script_is_in_the_table() -> None:
    there = {str(path.relative_to(CASES)) for path in CASES.rglob("*.py")}
    assert there - {row[1] for row in RIGHT} == {"checkpoint/roundtrip.py"}
