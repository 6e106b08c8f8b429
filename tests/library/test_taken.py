"""The library as readers take it: the wheel, and its folder under a name of their own."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from site_wheel import build_wheel

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "data" / "library_job.py"
MOST_BYTES = 280_000  # of the wheel
STEPS = 6
KILLED_BEHIND = 4
NOT_IN_A_WHEEL = ("recipes_source", "tests", "harness", "benchmarks", "proofs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def take_the_wheel(wheel: Path, into: Path) -> str:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(into)
    return "overlap_recipes"


def copy_the_folder(into: Path) -> str:
    theirs = into / "theirs" / "vendored"
    theirs.mkdir(parents=True)
    for folder in (theirs, theirs.parent):
        (folder / "__init__.py").touch()
    shutil.copytree(ROOT / "overlap_recipes", theirs / "saving")
    return "theirs.vendored.saving"


def losses(package: str, taken: Path, root: Path, *more: object, killed: bool = False) -> dict:
    """Run the job; the losses that its ranks printed, by rank and step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", JOB, package, root, STEPS, *more]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {"PYTHONPATH": str(taken), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=taken, env=env, capture_output=True, text=True
    )
    assert (done.returncode != 0) == killed, done.stdout + done.stderr
    found = re.findall(r"rank (\d) step (\d+) (-?0x[0-9a-f.]+p[+-]\d+)", done.stdout)
    return {(int(rank), int(step)): loss for rank, step, loss in found}


def test_the_wheel_is_small_and_has_the_library_alone(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        texts = [files.read(name).decode() for name in names if name.endswith(".py")]
    folders = {name.partition("/")[0] for name in names}
    assert {folder.partition("-")[0] for folder in folders} == {"overlap_recipes"}
    for word in NOT_IN_A_WHEEL:
        assert not any(word in text for text in texts), f"the library speaks of {word}"


def test_a_stock_model_is_saved_killed_and_resumed_with_what_was_taken(
    wheel: Path, tmp_path: Path
) -> None:
    """By the wheel with the losses of a run that nothing interrupts, by the copied folder."""
    folders = [tmp_path / name for name in ("copied", "installed")]
    for folder in folders:
        folder.mkdir()
    copied, installed = folders
    whole = losses(copy_the_folder(copied), copied, copied / "run")
    assert len(whole) == 2 * STEPS
    package = take_the_wheel(wheel, installed)
    before = losses(package, installed, installed / "run", KILLED_BEHIND, killed=True)
    behind = losses(package, installed, installed / "run")
    assert min(step for _, step in behind) == KILLED_BEHIND + 1, "not the last durable save"
    assert before | behind == whole, "another run"


def test_the_library_imports_torch_and_the_standard_library_alone() -> None:
    """And nothing is printed, started or written by an import of all that needs no package."""
    code = """
import sys, threading
import overlap_recipes.checkpoint, overlap_recipes.offload, overlap_recipes.fsdp2
import overlap_recipes.checkpoint.stores, overlap_recipes.checkpoint.export
import overlap_recipes.trainers
others = {"transformers", "accelerate", "lightning", "torchtitan"}
others |= {"fsspec", "obstore", "safetensors"}
assert not others & set(sys.modules), others & set(sys.modules)
assert threading.active_count() == 1
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr
