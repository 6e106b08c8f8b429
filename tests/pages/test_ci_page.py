"""The page on CI: its settings and its workflow's commands, run on a project that is not ours."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "guide" / "ci.rst"
SCRIPT = """
import argparse
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
weight = torch.zeros(4)
for step in range(1, steps + 1):
    weight += step
    future = dcp.async_save({"weight": weight.clone()}, checkpoint_id=f"checkpoints/step{step}")
    AWAIT
dist.destroy_process_group()
"""


def block(language: str) -> str:
    """The page's code block in a language."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)", text, re.MULTILINE)
    return textwrap.dedent(found[1])


def command_of_the_workflow() -> list[str]:
    """The step that judges; the steps before it install."""
    steps = yaml.safe_load(block("yaml"))["jobs"]["ranks"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    *installs, judges = commands
    assert all(command.startswith("pip install ") for command in installs)
    assert judges.startswith("rankproof ")
    return judges.split()[1:]


def test_the_workflow_passes_a_script_that_awaits_its_saves_and_no_other(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    settings = block("toml")
    tomllib.loads(settings)
    (examples / "rankproof.toml").write_text(settings)
    (examples / "train.py").write_text(SCRIPT.replace("AWAIT", "future.result()"))
    forgets = SCRIPT.replace("AWAIT", "if step < steps: future.result()")
    (examples / "forgets.py").write_text(forgets.replace("required=True", "default=2"))
    command = [sys.executable, "-m", "rankproof", *command_of_the_workflow()]
    env = os.environ | {"PYTHONPATH": str(ROOT / "harness")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    cases = list(ElementTree.parse(tmp_path / "ranks.xml").iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    passed = [case.get("name") for case in cases if case.find("failure") is None]
    assert len(failed) == len(passed) == 1
    assert "forgets" in failed[0]
    assert "train" in passed[0]
