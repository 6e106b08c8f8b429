"""Programs of users that go wrong today: each must fail, and in the way that is named here.

A script of ``tests/cases`` asserts what is right. While it fails as the table says, its test is an
expected failure; failing in any other way, it is an ordinary one. Who cures a case sees XPASS, and
moves it from ``DEFECTS`` to ``RIGHT``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.run import Report, run

CASES = Path(__file__).parent / "cases"
DEADLINE_S = 60.0
EXPORT = "checkpoint/export_for_transformers.py"


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
    Case(
        "schedulefree",
        "checkpoint/schedulefree_resumes.py",
        1,
        "A schedule-free run cannot be resumed, and the error names another cause.",
        r"ValueError: no room here for the checkpoint's state of \['0.weight', '0.bias', ",
        ("trains",),
    ),
    Case(
        "schedulefree_in_eval_mode",
        "checkpoint/schedulefree_resumes.py",
        1,
        "A schedule-free run that was saved in its eval mode cannot be resumed.",
        r"ValueError: no room here for the checkpoint's state of \['0.weight', '0.bias', ",
        ("evaluates",),
    ),
    Case(
        "schedulefree_before_train",
        "checkpoint/schedulefree_resumes.py",
        1,
        "A load lets a schedule-free optimizer step, which is not in its train mode yet.",
        r"Exception: Optimizer was not in train mode when step is called",
        ("not_entered",),
    ),
    Case(
        "schedulefree_with_app_state",
        "checkpoint/schedulefree_resumes.py",
        1,
        "AppState cannot resume a schedule-free run either.",
        r"ValueError: no room here for the checkpoint's state of \['0.weight', '0.bias', ",
        ("plain",),
    ),
    Case(
        "int8_moments",
        "checkpoint/own_moments.py",
        2,
        "Moments in int8 come back in float32.",
        r"AssertionError: rank 0: state.0.bias.moment is torch.float32 .*, saved torch.int8 .*",
        ("int8",),
    ),
    Case(
        "bf16_moments",
        "checkpoint/own_moments.py",
        2,
        "Moments in bfloat16 come back in float32.",
        r"AssertionError: rank 0: state.0.bias.moment is torch.float32 .*, saved torch.bfloat16 .*",
        ("bf16",),
    ),
    Case(
        "plain_moments_of_a_shard",
        "checkpoint/own_moments.py",
        2,
        "Plain tensors that belong to a rank's shard come back with another rank's numbers.",
        r"AssertionError: rank 0: state.0.bias.moment is torch.float32 .*, saved torch.float32 .*",
        ("local",),
    ),
    Case(
        "loader",
        "checkpoint/loader_of_each_rank.py",
        2,
        "A loader resumes at the position of another rank, in silence.",
        r"AssertionError: rank 0: the next batch is \[1013, 1014\], due was \[7, 8\]",
        ("0",),
    ),
    Case(
        "planner_and_frozen_base",
        "checkpoint/advised_planner.py",
        1,
        "The planner that the log advises leaves a renamed frozen base random, in silence.",
        r"AssertionError: loaded without an error: backbone is -?0\.\d+, saved -?0\.\d+",
        ("base",),
    ),
    Case(
        "planner_and_buffer",
        "checkpoint/advised_planner.py",
        1,
        "The planner that the log advises leaves a renamed buffer as it was, in silence.",
        r"AssertionError: loaded without an error: amax is 0.000, saved 3.000",
        ("buffer",),
    ),
    Case(
        "names_with_a_dash",
        "checkpoint/own_names.py",
        1,
        "Saves in directories named step-<N> are never found: the run starts anew.",
        r"AssertionError: resumed at step 0, the newest save is of step 5",
        ("step-{}",),
    ),
    Case(
        "names_with_zeros",
        "checkpoint/own_names.py",
        1,
        "Saves in directories with leading zeros stop the restart, which looks for other names.",
        r"FileNotFoundError: .*/step5' -> '.*/step5\.set-aside-",
        ("step{:06d}",),
    ),
    Case(
        "float8_weights",
        "checkpoint/float8_weights.py",
        1,
        "A model whose parameters are torchao's float8 tensors cannot be saved.",
        r"RuntimeError: rank 0: TypeError: save the plain tensor in a DTensor of .*Float8",
        ("resumes",),
    ),
    Case(
        "float8_failure_is_told",
        "checkpoint/float8_weights.py",
        1,
        "Training goes on though every save fails in a way that no later one can mend.",
        r"AssertionError: 0 of 3 saves are there, and none of 3 calls raised",
        ("told",),
    ),
    Case(
        "resume_with_unused",
        "checkpoint/resume_with_unused.py",
        1,
        "resume() takes no planner, so a run with an unused parameter cannot restart.",
        r"CheckpointException.* Missing key in .*: run.optim.state.unused.weight.step",
    ),
    # offload
    Case(
        "same_twice_x0",
        "offload/same_twice.py",
        1,
        "A streamed layer that is given one tensor twice counts its gradient twice.",
        r"AssertionError: gradient of embedding.weight is -?\d\S*, resident -?\d",
        ("x0",),
    ),
    Case(
        "same_twice_with_a_budget",
        "offload/same_twice.py",
        1,
        "How often a gradient counts depends on how many layers stay on the device.",
        r"AssertionError: gradient of embedding.weight is -?\d\S*, resident -?\d",
        ("budget",),
    ),
    Case(
        "same_twice_qkv",
        "offload/same_twice.py",
        1,
        "A streamed attention whose query is its key and value has wrong gradients.",
        r"AssertionError: gradient of embedding.weight is -?\d\S*, resident -?\d",
        ("qkv",),
    ),
    Case(
        "same_twice_decoder",
        "offload/same_twice.py",
        1,
        "A streamed TransformerDecoderLayer whose memory is its input has wrong gradients.",
        r"AssertionError: gradient of embedding.weight is -?\d\S*, resident -?\d",
        ("decoder",),
    ),
    Case(
        "decode_with_gradients",
        "offload/decode_with_gradients.py",
        1,
        "A decode loop with gradients enabled loses its cache in silence: other tokens.",
        r"AssertionError: the cache has 0 tokens, resident 15; the tokens are ",
    ),
    Case(
        "batch_norm",
        "offload/changed_buffers.py",
        1,
        "BatchNorm's statistics see every batch twice.",
        r"AssertionError: buffer layers.0.1.running_mean is -?\d\S*, resident -?\d",
        ("batch_norm",),
    ),
    Case(
        "spectral_norm",
        "offload/changed_buffers.py",
        1,
        "The power iteration of spectral_norm runs twice a step.",
        r"AssertionError: buffer layers.\d.parametrizations.weight.0._[uv] is -?\d\S*, resident -?",
        ("spectral_norm",),
    ),
    Case(
        "counted_tokens",
        "offload/changed_buffers.py",
        1,
        "A router counts every token twice.",
        r"AssertionError: buffer layers.0.tokens counts 128 tokens, resident 64",
        ("counts",),
    ),
    Case(
        "steering_router",
        "offload/changed_buffers.py",
        1,
        "A router that steers by its counts sends tokens elsewhere when it runs again.",
        r"AssertionError: gradient of \S+ is -?\d\S*, resident -?\d",
        ("steers",),
    ),
    Case(
        "gpt2_with_cache",
        "offload/gpt2_with_cache.py",
        1,
        "GPT-2 with its default cache does not compute alike: last bits of gradients can differ.",
        r"AssertionError: the strides of keys are \(960, 8, 96, 1\), resident \(320, 80, 8, 1\)"
        r"|AssertionError: gradient of \S+ is off by \S+e-\d+, due is every bit",
    ),
    Case(
        "recurrent_gemma",
        "offload/recurrent_gemma.py",
        1,
        "RecurrentGemma with its defaults ends in an error that names no cause.",
        r"CheckpointError: torch.utils.checkpoint: Recomputed values .* different metadata",
    ),
    # sharding
    Case(
        "view_in_place",
        "sharding/view_in_place.py",
        2,
        "In place, += on a view of a unit's output gives wrong gradients; stock FSDP2 raises.",
        r"AssertionError: gradient of \S+ is -?\d\S*, unsharded -?\d\S* \(\d+ gradients are wrong",
    ),
    Case(
        "gradients_on_one_rank_each",
        "sharding/gradient_on_one_rank.py",
        2,
        "In place, parameters with a gradient on one rank only get wrong ones in silence.",
        r"AssertionError: gradient of \S+ is -?\d\S*, unsharded -?\d\S* \(12 gradients are wrong\)",
        ("one_each", "place"),
    ),
    Case(
        "gradient_on_one_rank",
        "sharding/gradient_on_one_rank.py",
        2,
        "In place, one parameter without a gradient on a rank makes every gradient wrong.",
        r"AssertionError: gradient of \S+ is -?\d\S*, unsharded -?\d\S* \(18 gradients are wrong\)",
        ("both_and_one", "place"),
    ),
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
    ("config_of_an_export", EXPORT, 1, ("config", "llama", "bf16")),
    ("names_of_exported_experts", EXPORT, 1, ("names", "mixtral")),
    ("terminated_grader", "checkpoint/terminated_grader.py", 1, ()),
    ("same_twice_cloned", "offload/same_twice.py", 1, ("cloned",)),
    ("unused_one_each", "sharding/gradient_on_one_rank.py", 2, ("one_each", "place", "unused")),
    ("unused_one", "sharding/gradient_on_one_rank.py", 2, ("both_and_one", "place", "unused")),
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
