"""Programs of users that go wrong today: each must fail, and in the way that is named here.

A script of ``tests/cases`` asserts what is right. While it fails as the table says, its test is an
expected failure; failing in any other way, it is an ordinary one. Who cures a case sees XPASS, and
moves it from ``DEFECTS`` to ``RIGHT``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankproof.run import Report, run

CASES = Path(__file__).parent / "cases"
DEADLINE_S = 60.0
EXPORT = "checkpoint/export_for_transformers.py"
ONE_RANK = "sharding/gradient_on_one_rank.py"
LOST = "checkpoint/lost_saves.py"
RANKS = "checkpoint/ranks_differ.py"
PENALTY = "sharding/penalty.py"


class Defect(Exception):
    """A case has failed in the way that is known."""


@dataclass(frozen=True)
class Case:
    """A script and its arguments; ``kind`` and ``pattern`` are those of today's failure."""

    name: str
    script: str  # below tests/cases
    ranks: int
    reason: str  # one sentence: what goes wrong
    pattern: str
    args: tuple[str, ...] = ()
    kind: str = "raised"


DEFECTS = [
    # checkpoint
    # offload
    # sharding
    Case(
        "stock_gradients_on_one_rank_each",
        "sharding/gradient_on_one_rank.py",
        2,
        "PyTorch's own: stock FSDP2 mixes gradients of different parameters in silence.",
        r"AssertionError: gradient of \S+ is -?\d\S*, unsharded -?\d\S* \(12 gradients are wrong\)",
        ("one_each", "stock"),
    ),
    Case(
        "stock_gradient_on_one_rank",
        "sharding/gradient_on_one_rank.py",
        2,
        "PyTorch's own: stock FSDP2 dies of collectives of different sizes.",
        r"ended by SIGABRT",
        ("both_and_one", "stock"),
        kind="killed",
    ),
]

RIGHT = [
    ("float8_weights", "checkpoint/float8_weights.py", 2, ("resumes",)),
    ("eight_bit_moments", "checkpoint/eight_bit_moments.py", 2, ("resumes",)),
    ("eight_bit_moments_of_uneven_shards", "checkpoint/eight_bit_moments.py", 2, ("uneven",)),
    ("eight_bit_moments_of_stock", "checkpoint/eight_bit_moments.py", 1, ("stock",)),
    ("resume_with_unused", "checkpoint/resume_with_unused.py", 1, ()),
    ("schedulefree_before_train", "checkpoint/schedulefree_resumes.py", 1, ("not_entered",)),
    ("schedulefree", "checkpoint/schedulefree_resumes.py", 1, ("trains",)),
    ("schedulefree_in_eval_mode", "checkpoint/schedulefree_resumes.py", 1, ("evaluates",)),
    ("schedulefree_with_app_state", "checkpoint/schedulefree_resumes.py", 1, ("plain",)),
    ("int8_moments", "checkpoint/own_moments.py", 2, ("int8",)),
    ("bf16_moments", "checkpoint/own_moments.py", 2, ("bf16",)),
    ("plain_moments_of_a_shard", "checkpoint/own_moments.py", 2, ("local",)),
    ("planner_and_frozen_base", "checkpoint/advised_planner.py", 1, ("base",)),
    ("planner_and_buffer", "checkpoint/advised_planner.py", 1, ("buffer",)),
    ("float8_failure_is_told", "checkpoint/float8_weights.py", 1, ("told",)),
    ("loader_per_rank", "checkpoint/loader_of_each_rank.py", 2, ("per_rank",)),
    ("loader_as_shared", "checkpoint/loader_of_each_rank.py", 2, ("shared",)),
    ("same_twice_cloned", "offload/same_twice.py", 1, ("cloned",)),
    ("same_twice_x0", "offload/same_twice.py", 1, ("x0",)),
    ("same_twice_with_a_budget", "offload/same_twice.py", 1, ("budget",)),
    ("same_twice_qkv", "offload/same_twice.py", 1, ("qkv",)),
    ("same_twice_decoder", "offload/same_twice.py", 1, ("decoder",)),
    ("batch_norm", "offload/changed_buffers.py", 1, ("batch_norm",)),
    ("spectral_norm", "offload/changed_buffers.py", 1, ("spectral_norm",)),
    ("counted_tokens", "offload/changed_buffers.py", 1, ("counts",)),
    ("steering_router", "offload/changed_buffers.py", 1, ("steers",)),
    ("recurrent_gemma", "offload/recurrent_gemma.py", 1, ()),
    ("decode_with_gradients", "offload/decode_with_gradients.py", 1, ()),
    ("gpt2_with_cache", "offload/gpt2_with_cache.py", 1, ()),
    ("layer_drop", "offload/ranks_apart.py", 2, ("layer_drop",)),
    ("other_seeds", "offload/ranks_apart.py", 2, ("seeds",)),
    ("gradients_before_the_check", "offload/ranks_apart.py", 2, ("gradients",)),
    ("heads_on_ranks", "offload/heads_on_ranks.py", 2, ("heads",)),
    ("heads_of_other_shapes", "offload/heads_on_ranks.py", 2, ("shapes",)),
    ("head_of_no_rank", "offload/heads_on_ranks.py", 2, ("nobody",)),
    ("head_of_one_rank_in_turn", "offload/heads_on_ranks.py", 2, ("in_turn",)),
    ("layer_of_one_rank", "offload/heads_on_ranks.py", 2, ("layer",)),
    ("layers_in_another_order", "offload/heads_on_ranks.py", 2, ("order",)),
    ("no_backward_on_one_rank", "offload/heads_on_ranks.py", 2, ("idle",)),
    ("gradients_changed_on_one_rank", "offload/heads_on_ranks.py", 2, ("changed",)),
    ("scaler_on_ranks", "offload/heads_on_ranks.py", 2, ("scaler",)),
    ("view_in_place", "sharding/view_in_place.py", 2, ()),
    ("view_in_place_twice", "sharding/unseen_output.py", 2, ("twice",)),
    ("view_in_place_frozen", "sharding/unseen_output.py", 2, ("frozen",)),
    ("output_of_a_class", "sharding/unseen_output.py", 2, ("own_class",)),
    ("kept_on_the_module", "sharding/unseen_output.py", 2, ("kept",)),
    ("kept_in_a_list", "sharding/unseen_output.py", 2, ("kept_in_a_list",)),
    ("kept_elsewhere", "sharding/unseen_output.py", 2, ("kept_elsewhere", "refused")),
    ("gradients_on_one_rank_each", ONE_RANK, 2, ("one_each", "place")),
    ("gradient_on_one_rank", ONE_RANK, 2, ("both_and_one", "place")),
    ("no_gradient_of_a_unit", ONE_RANK, 2, ("idle", "place")),
    ("unused_unit", ONE_RANK, 2, ("idle", "place", "unused")),
    ("unused_one_each", ONE_RANK, 2, ("one_each", "place", "unused")),
    ("unused_one", ONE_RANK, 2, ("both_and_one", "place", "unused")),
    ("config_of_an_export", EXPORT, 1, ("config", "llama", "bf16")),
    ("names_of_exported_experts", EXPORT, 1, ("names", "mixtral")),
    ("terminated_grader", "checkpoint/terminated_grader.py", 1, ()),
    ("asked_to_leave", "checkpoint/asked_to_leave.py", 2, ()),
    ("ranks_that_differ", RANKS, 2, ("refused",)),
    ("ranks_alike", RANKS, 2, ("taken",)),
    ("ranks_that_drift", RANKS, 2, ("later",)),
    ("tuple_moments", "checkpoint/own_moments.py", 2, ("tuple",)),
    ("saved_in_a_handler", LOST, 2, ("handler",)),
    ("saved_before_an_error", LOST, 2, ("error",)),
    ("saved_before_an_interrupt", LOST, 2, ("interrupted",)),
    ("saved_before_an_error_on_one_rank", LOST, 2, ("one_rank",)),
    ("penalty", PENALTY, 2, ("score",)),
    ("penalty_and_loss", PENALTY, 2, ("same",)),
    ("penalty_and_loss_of_another_forward", PENALTY, 2, ("another",)),
]


def run_case(script: Path, ranks: int, args: tuple[str, ...]) -> Report:
    return run(script, ranks, launcher="warm", args=args, deadline_s=DEADLINE_S)


def is_known(report: Report, case: Case) -> bool:
    """Whether a run failed in the way that the table names."""
    for failure in report.failures:
        if failure.kind == case.kind and re.match(case.pattern, failure.text):
            return True
    return False


def judge(report: Report, case: Case) -> None:
    """Return if a run passed; else raise ``Defect`` for the known failure, and fail for others."""
    if report.ok:
        return
    if is_known(report, case):
        raise Defect(case.reason)
    pytest.fail(report.describe())


def expected_failure(case: Case):
    mark = pytest.mark.xfail(strict=True, raises=Defect, reason=case.reason)
    return pytest.param(case, id=case.name, marks=mark)


@pytest.mark.parametrize("case", [expected_failure(case) for case in DEFECTS])
def test_a_program_that_goes_wrong_today(case: Case) -> None:
    judge(run_case(CASES / case.script, case.ranks, case.args), case)


@pytest.mark.parametrize(
    ("script", "ranks", "args"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT]
)
def test_a_program_that_is_right(script: str, ranks: int, args: tuple[str, ...]) -> None:
    report = run_case(CASES / script, ranks, args)
    assert report.ok, report.describe()


ANY_FAILURE = Case("any", "any.py", 1, "Fails.", "AssertionError: the value is 3, due is 2")


def report_of(source: str, folder: Path) -> Report:
    script = folder / ANY_FAILURE.script
    script.write_text(source)
    return run_case(script, ANY_FAILURE.ranks, ANY_FAILURE.args)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise AssertionError('the value is 4, due is 2')\n", "the value is 4, due is 2"),
        ("raise ValueError('the value is 3, due is 2')\n", "ValueError: the value is 3"),
    ],
    ids=["import", "value", "type"],
)
def test_another_failure_is_an_ordinary_one(source: str, said: str, tmp_path: Path) -> None:
    report = report_of(source, tmp_path)
    with pytest.raises(pytest.fail.Exception, match=said):
        judge(report, ANY_FAILURE)


def test_the_known_failure_is_a_defect(tmp_path: Path) -> None:
    report = report_of("raise AssertionError('the value is 3, due is 2')\n", tmp_path)
    with pytest.raises(Defect):
        judge(report, ANY_FAILURE)


def test_a_script_that_passes_is_no_expected_failure(tmp_path: Path) -> None:
    judge(report_of("value = 2\n", tmp_path), ANY_FAILURE)  # so pytest counts it as XPASS
    (mark,) = expected_failure(ANY_FAILURE).marks
    assert mark.name == "xfail"
    assert mark.kwargs["strict"] is True
    assert mark.kwargs["raises"] is Defect


def test_every_script_is_in_the_tables() -> None:
    helpers = {"roundtrip.py", "resident.py", "unsharded.py"}
    there = set()
    for path in CASES.rglob("*.py"):
        if path.name not in helpers:
            there.add(str(path.relative_to(CASES)))
    named = {case.script for case in DEFECTS} | {row[1] for row in RIGHT}
    assert there == named
