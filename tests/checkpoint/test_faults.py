"""No save is lost, whatever strikes it: trials, power cuts, and edits that both must catch."""

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import asking

TESTS = Path(__file__).parents[1]
TRIALS = 16
CUTS_BY_CHANCE = 3


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., dict]]:
    """Ask one of :mod:`faults.ask`."""
    command = [sys.executable, "-m", "faults.ask"]
    with asking(command, 280, TESTS) as answered:

        def ask(*request: object) -> dict:
            reply = answered(*request)
            assert reply["code"] == 0, reply["said"][-6000:]
            return json.loads(reply["said"].splitlines()[-1])

        yield ask


def wrong(results: list[dict]) -> list[dict]:
    return [result for result in results if result["wrong"] or result["hung"] or result["left"]]


def test_no_save_is_lost_whatever_strikes(ask) -> None:
    """A trial a point and kind; ``make soak`` runs hundreds."""
    results = ask("trials", TRIALS, 1)
    assert len(results) == TRIALS and len({(r["kind"], r["point"]) for r in results}) == TRIALS
    assert not wrong(results), json.dumps(wrong(results), indent=1)


def test_a_job_that_is_asked_to_leave_saves_and_leaves(ask) -> None:
    """SIGTERM to one rank, twice, in the middle of a step, of staging, of an upload."""
    answers = ask("preempted", "step", "state_dict", "staging", "upload", "before the name")
    for name, answer in answers.items():
        assert answer["struck"] and answer["codes"] == [85, 85], (name, answer)
        assert answer["resumed"] == answer["last_saved"], (name, answer)
        assert answer["same_bits"] and answer["same_end"] and not answer["hung"], (name, answer)


def test_a_save_that_takes_too_long_is_given_up_in_time(ask) -> None:
    """The process ends by itself, with a code of its own; the older checkpoint is whole."""
    answer = ask("preempted", "late")["late"]
    assert answer["codes"][1] == 86, answer
    assert (answer["resumed"] or 0) < answer["last_saved"], answer
    assert answer["same_bits"] and answer["same_end"], answer


def test_the_handler_does_not_keep_a_job_whose_rank_has_died(ask) -> None:
    """torchrun's SIGTERM to a rank that hangs in a collective which a dead rank never joins."""
    answer = ask("preempted", "a rank is gone")["a rank is gone"]
    assert answer["codes"] == [1, -9], answer
    assert answer["same_bits"] and answer["same_end"], answer


def test_torchrun_brings_a_killed_job_back_and_ends_one_that_is_asked_to_leave(
    tmp_path: Path,
) -> None:
    """Exit codes are torchrun's: 1 whatever the ranks' own; so a script asks for the last step."""
    from faults import restart

    ends = []
    for struck, codes in (("kill", [0]), ("term", [1, 0])):
        root = tmp_path / struck
        root.mkdir()
        for code in codes:
            ended = restart.start(root, 3, struck)
            assert ended.returncode == code, ended.stderr[-4000:]
        ends.append((root / restart.ENDS).read_text().splitlines())
    (killed,), (left, again) = ends
    assert killed == again and killed.startswith("step 10,")
    assert left.startswith(("step 8,", "step 9,")), "it has not left"


def test_the_command_lists_verifies_and_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import torch
    from kept_saves import KeptSaves, steps_in

    root = tmp_path / "root"
    url = f"file://{tmp_path}/store"
    for place in (root, url):
        with KeptSaves(place) as saves:
            for step in range(1, 6):
                saves.save({"x": torch.full((9,), step)}, step)

    def command(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["checkpoint", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("overlap_recipes.checkpoint", run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    code, said = command("list", str(root))
    assert not code and said.count("whole") == 5 and "resume from: 5" in said, said
    code, said = command("prune", str(root), "--keep-last", "2", "--keep-every", "2", "--dry-run")
    assert not code and re.findall(r"step\d", said) == ["step3", "step1"], said
    assert len(steps_in(root)) == 5
    assert not command("prune", str(root), "--keep-last", "2", "--keep-every", "2")[0]
    assert steps_in(root) == [5, 4, 2]
    assert not command("prune", url, "--keep-last", "1")[0] and steps_in(url) == [5]
    assert not command("verify", str(root))[0] and not command("verify", url)[0]
    exported = str(tmp_path / "hf")
    assert not command("export", str(root / "step5"), exported, "--prefix", "")[0]
    assert (tmp_path / "hf" / "model.safetensors").exists()
    shard = root / "step5" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert not command("list", str(root))[0]
    code, said = command("verify", str(root))
    assert code == 1 and "has changed" in said and "resume from: 4" in said, said
    assert command("verify", str(tmp_path / "mistyped"))[0]
    code, said = command("verify", str(root / "step4"))
    assert code == 1 and "no checkpoint in" in said, said


def test_a_checkpoint_that_cannot_be_deleted_fails_no_save(ask) -> None:
    answer = ask("deletion")
    assert not answer["failed"] and answer["whole"][-2:] == [6, 8], answer
    assert any("cannot be deleted" in log for log in answer["logs"]), answer


def test_a_fork_of_a_killed_rank_does_not_keep_its_lease(ask) -> None:
    """A data loader's worker outlives its rank by seconds; the restarted job is not to wait."""
    assert ask("lease") == "free"


def test_a_kill_catches_edits_and_passes_the_recipes_as_they_are(ask) -> None:
    assert not wrong([ask("killed")]), "the recipes as they are"
    for edit in ("pointer before rename", "delete before durable"):
        result = ask("killed", edit)
        assert result["wrong"], f"{edit} was not caught: {result}"


def test_what_a_power_cut_leaves_loads_or_is_refused(ask) -> None:
    """Every state after every operation; and each flush is needed."""
    edits = [
        "files not flushed",
        "directory not flushed",
        "root not flushed",
        "rename before flush",
        "deletion not flushed",
    ]
    answers = ask("cut", 1, CUTS_BY_CHANCE, *edits)
    assert answers[""]["wrong"] is None, answers[""]
    assert answers[""]["states"] > 100 and answers[""]["committed"] == [2, 4, 6, 8, 10]
    assert all(answers[edit]["wrong"] for edit in edits), answers
