"""Files of recipes: which are found, what one imports and needs, its hash, its size, a kept run."""

import dataclasses
from pathlib import Path

import pytest
from written_recipes import CONTROL, write

from rankproof import kept as kept_module
from rankproof.judge import Failure
from rankproof.kept import KeptRun
from rankproof.kept import _present_code as kept_code
from rankproof.kept import _version_of as version_of
from rankproof.recipe import discover, load_recipe
from rankproof.run import Report, run
from rankproof.sources import code_sha256
from rankproof.starts import own_ranks, takes_dir


@pytest.mark.parametrize(
    ("source", "saves"),
    [
        ("from torch.distributed import checkpoint as dcp", True),
        ("import torch.distributed.checkpoint as dcp", True),
        ("from torch.distributed.checkpoint.state_dict_saver import save", True),
        ("import helper_that_saves", True),
        ("from torch.distributed import checkpoints_of_another_kind", False),
        ("import torch.distributed as dist  # not torch.distributed.checkpoint", False),
    ],
)
def test_a_recipe_that_may_save_is_found_by_what_it_imports(tmp_path, source, saves) -> None:
    write(tmp_path, "helper_that_saves.py", "from torch.distributed.checkpoint import save\n")
    assert load_recipe(write(tmp_path, "recipe.py", source + "\n")).saves == saves


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
    path.write_text("x = 1  # another comment\n")
    assert kept().report() == passed
    path.write_text("x = 2\n")
    assert kept().report() is None
    path.write_text("x = 1\n")
    assert kept().report() == passed
    kept().keep(raised)
    kept(control="n").keep(passed)
    assert kept().report() is None and kept(control="n").report() is None


def test_a_run_is_kept_until_its_gate_or_a_package_that_it_needs_changes(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "r.toml", f'needs = ["psutil"]\n{CONTROL}')
    gates = write(tmp_path, "gates.py", "def hold(ledger):\n    pass\n")
    recipe = load_recipe(write(tmp_path, "r.py", "x = 1\n"), tmp_path)
    held = dataclasses.replace(recipe.control("n"), gate=f"{gates}:hold")

    def key() -> str:
        return KeptRun(tmp_path / "store", recipe, 1, held).key

    before = key()
    gates.write_text("def hold(ledger):\n    return\n")
    with_another_gate = key()
    assert with_another_gate != before
    version_of.cache_clear()
    monkeypatch.setattr(kept_module, "version", lambda package: "0")
    assert key() != with_another_gate
    version_of.cache_clear()


def test_a_kept_run_has_the_arguments_and_the_habits_of_its_settings(tmp_path) -> None:
    settings = 'off = ["left_process_group"]\nargs = {"trains.py" = "--steps 3"}\n'
    write(tmp_path, "rankproof.toml", settings)
    text = """
        import sys
        import torch.distributed as dist

        dist.init_process_group("gloo")
        assert sys.argv[1:] == ["--steps", "3"]
    """
    script = write(tmp_path, "trains.py", text)
    kept = KeptRun(tmp_path / "store", load_recipe(script), 1, launcher="warm")
    report = kept.run()
    assert report.verdict == "passed", report.describe()
    assert kept.report() == report
    write(tmp_path, "rankproof.toml", settings.replace("3", "4"))
    assert KeptRun(tmp_path / "store", load_recipe(script), 1, launcher="warm").report() is None
    write(tmp_path, "rankproof.toml", settings.partition("\n")[2])
    assert KeptRun(tmp_path / "store", load_recipe(script), 1, launcher="warm").report() is None


def test_a_script_that_was_not_run_has_not_passed_and_is_not_kept(tmp_path) -> None:
    text = "import torch.multiprocessing as mp\n\nif __name__ == '__main__':\n    mp.spawn(print)\n"
    recipe = load_recipe(write(tmp_path, "spawns.py", text))
    kept = KeptRun(tmp_path / "store", recipe, 2, launcher="warm")
    report = kept.run()
    assert report.verdict == "not judged"
    assert not kept.as_it_must(report)
    assert kept.report() is None
    as_it_needs = KeptRun(tmp_path / "store", recipe, 2, launcher="auto")
    assert as_it_needs.as_it_must(as_it_needs.run())


def test_hidden_folders_and_virtual_environments_hold_no_recipes(tmp_path) -> None:
    for folder in ("recipes", ".hidden", "environment"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "recipe.py", "")
    (tmp_path / "environment" / "pyvenv.cfg").touch()
    assert [recipe.folder for recipe in discover(tmp_path)] == ["recipes"]


def test_the_code_hash_follows_code_and_not_prose(tmp_path) -> None:
    path = write(tmp_path, "r.py", '"""Title."""\n\n# %%\n# Prose.\n\nx = 1\n')
    before = code_sha256(path)
    path.write_text('"""Another title."""\n\n# %%\n# Other prose.\nx = 1\n')
    assert code_sha256(path) == before
    path.write_text('"""Another title."""\n\nx = 2\n')
    assert code_sha256(path) != before


def gallery(root: Path) -> Path:
    for folder in ("first", "second"):
        (root / folder).mkdir()
        (root / folder / "GALLERY_HEADER.rst").touch()
    write(root / "first", "taken.py", "value = 1\n")
    return write(root / "second", "takes.py", "import taken\nassert taken.value == 1\n")


def test_a_recipe_may_import_one_of_another_folder_of_its_gallery(tmp_path) -> None:
    path = gallery(tmp_path)
    before = load_recipe(path).sources.hashes()
    assert before.keys() == {"takes", "taken"}
    report = run(path, 1, launcher="warm")
    assert report.ok, report.describe()
    (tmp_path / "first" / "taken.py").write_text("value = 2\n")
    assert load_recipe(path).sources.hashes() != before


@pytest.mark.parametrize(
    ("text", "starts", "sets"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(work)\n", "spawn, line 2", ""),
        ("from torch.multiprocessing import spawn as go\ngo(work)\n", "spawn, line 2", ""),
        ("import torch\ntorch.multiprocessing.spawn(work)\n", "spawn, line 2", ""),
        ("import numpy\nnumpy.random.SeedSequence(1).spawn(2)\n", "", ""),
        ("import multiprocessing as mp\nmp.Process(target=work).start()\n", "", ""),
        (
            "import os, multiprocessing as mp\nos.environ['MASTER_PORT'] = '1'\n"
            "mp.get_context('spawn').Process(target=work).start()\n",
            "Process, line 3",
            "MASTER_PORT, line 2",
        ),
        ("import os\nif 'RANK' not in os.environ:\n    os.environ['RANK'] = '0'\n", "", ""),
        ("import os\nos.environ.setdefault('MASTER_PORT', '29500')\n", "", ""),
        ("join('gloo', init_method='tcp://' + host + ':6585')\n", "", "init_method, line 1"),
        ("join('gloo', init_method=f'tcp://{host}')\n", "", "init_method, line 1"),
        ("option('--url', default='tcp://localhost:29500')\n", "", "default, line 1"),
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


@pytest.mark.parametrize(
    ("option", "takes"),
    [
        ('parser.add_argument("--dir", type=Path)', True),
        ('parser.add_argument("-d", "--dir", default="out")', True),
        ('click.option("--dir")', True),
        ('parser.add_argument("--dir", action="store_true")', False),
        ('parser.add_argument("--dir", type=int)', False),
        ('subprocess.run(["ls", "--dir"])', False),
    ],
)
def test_a_directory_is_passed_to_a_script_that_takes_one(option: str, takes: bool) -> None:
    assert takes_dir(option) is takes
