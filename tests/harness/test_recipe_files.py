"""Files of recipes: their hash, a kept run, and who starts their ranks."""

import dataclasses

import pytest
from written_recipes import CONTROL, write

from rankproof.judge import Failure
from rankproof.kept import KeptRun
from rankproof.kept import _present_code as kept_code
from rankproof.recipe import load_recipe
from rankproof.run import Report, run
from rankproof.sources import code_sha256
from rankproof.starts import own_ranks


def test_a_run_is_kept_until_code_edit_or_ranks_change_and_only_if_it_ended_as_it_must(
    tmp_path,
) -> None:
    write(tmp_path, "r.toml", CONTROL)
    store, path = tmp_path / "store", write(tmp_path, "r.py", "x = 1\n")

    def kept(ranks: int = 1, control: str = "", **changed: object) -> KeptRun:
        kept_code.cache_clear()
        recipe = load_recipe(path, tmp_path)
        edit = dataclasses.replace(recipe.control(control), **changed) if control else None
        return KeptRun(store, recipe, ranks, edit)

    passed = Report("r", str(path), 1, "torchrun", "command")
    raised = dataclasses.replace(passed, failures=[Failure("raised", "AssertionError: x is 2")])
    assert kept().report() is None
    kept().keep(passed)
    kept(control="n").keep(raised)
    assert kept().report() == passed and kept(control="n").report() == raised
    assert kept(ranks=2).report() is None
    assert kept(control="n", says="other words").report() == raised
    assert kept(control="n", replace="x = 3").report() is None
    settings = write(tmp_path, "rankproof.toml", 'off = ["left_thread"]')
    assert kept().report() is None
    settings.unlink()
    path.write_text("x = 1  # another comment\n")
    assert kept().report() == passed
    path.write_text("x = 2\n")
    assert kept().report() is None
    path.write_text("x = 1\n")
    assert kept().report() == passed
    kept().keep(raised)
    kept(control="n").keep(passed)
    assert kept().report() is None and kept(control="n").report() is None


def test_a_script_that_was_not_run_has_not_passed_and_is_not_kept(tmp_path) -> None:
    text = "import torch.multiprocessing as mp\n\nif __name__ == '__main__':\n    mp.spawn(print)\n"
    recipe = load_recipe(write(tmp_path, "spawns.py", text))
    kept = KeptRun(tmp_path / "store", recipe, 2, launcher="warm")
    assert (report := kept.run()).verdict == "not judged"
    assert not kept.as_it_must(report) and kept.report() is None
    kept = KeptRun(tmp_path / "store", recipe, 2, launcher="auto")
    assert kept.as_it_must(kept.run())


def test_the_code_hash_follows_code_and_not_prose(tmp_path) -> None:
    path = write(tmp_path, "r.py", '"""Title."""\n\n# %%\n# Prose.\n\nx = 1\n')
    before = code_sha256(path)
    path.write_text('"""Another title."""\n\n# %%\n# Other prose.\nx = 1\n')
    assert code_sha256(path) == before
    path.write_text('"""Another title."""\n\nx = 2\n')
    assert code_sha256(path) != before


@pytest.mark.parametrize(
    ("text", "starts", "sets"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(work)\n", "spawn, line 2", ""),
        ("import multiprocessing as mp\nmp.Process(target=work).start()\n", "", ""),
        (
            "import os, multiprocessing as mp\nos.environ['MASTER_PORT'] = '1'\n"
            "mp.get_context('spawn').Process(target=work).start()\n",
            "Process, line 3",
            "MASTER_PORT, line 2",
        ),
        ("import os\nos.environ.setdefault('MASTER_PORT', '29500')\n", "", ""),
        ("join('gloo', init_method='tcp://' + host + ':6585')\n", "", "init_method, line 1"),
        ("join('gloo', init_method='env://')\n", "", ""),
    ],
)
def test_who_starts_the_ranks_is_read_from_what_a_script_imports(
    text: str, starts: str, sets: str
) -> None:
    assert own_ranks(text) == (starts, sets)


def test_a_module_beside_a_script_is_looked_at(tmp_path) -> None:
    beside = "import torch.multiprocessing as mp\n\ndef launch(f):\n    mp.spawn(f, nprocs=2)\n"
    write(tmp_path, "launching.py", beside)
    text = "import launching\n\nif __name__ == '__main__':\n    launching.launch(print)\n"
    report = run(write(tmp_path, "trains.py", text), 2, launcher="auto")
    assert (report.ok, report.launcher) == (True, "python"), report.describe()
