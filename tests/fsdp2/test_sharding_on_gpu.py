"""The sharding recipes on two CUDA devices: races that show."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from selection import with_library
from widened_races import CONTROLS, RACES, script

PROGRAM = Path(__file__).with_name("widened_races.py")
LIMIT_S = 280  # for the ranks; the machine itself takes about a minute


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("ranks") / "found.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(PROGRAM), str(output)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=with_library()
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices with peer access")
@pytest.mark.parametrize("race", [race.name for race in RACES])
def test_the_recipe_is_right_where_its_control_is_wrong(found, race):
    assert found["right"][race], "wrong in the widened window, with every ordering in place"
    assert found["wrong"][race], "right without the ordering: the window was missed"


def test_every_edit_is_one_of_its_recipes_controls():
    from rankproof.recipe import load_recipe

    for race in RACES:
        assert load_recipe(script(race.recipe), CONTROLS).control(race.control)
