"""The sharding recipes on two CUDA devices: gathers behind products, and races that show.

``ranks_program.py`` is what the ranks run, once for all tests here, which look at what rank 0 wrote
down. How overlap is judged is in ``overlap_in_traces.py``, how races are made to show in
``widened_races.py``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edited_recipes import CONTROLS, PROOFS, load, of_library, script
from overlap_in_traces import Overlap, gain_us
from torch.optim.optimizer import _global_optimizer_post_hooks
from watched_schedules import BROKEN, RUNS, SCHEDULES, UNITS
from widened_races import IN_PLACE, RACES

PROGRAM = Path(__file__).with_name("ranks_program.py")
LIMIT_S = 280  # for the ranks; the machine itself takes about a minute
two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices with peer access"
)


def on_two_ranks(output: Path, *options: str) -> dict:
    """What two ranks of ``PROGRAM`` wrote to ``output``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(PROGRAM), str(output), *options]
    log = output.with_name("ranks.log")
    with log.open("w") as written:
        ranks = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            status = ranks.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its ranks
            ranks.wait()
            status = f"still running after {LIMIT_S} s"
    assert status == 0, f"{status}\n{log.read_text()[-6000:]}"
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return on_two_ranks(tmp_path_factory.mktemp("ranks") / "found.json")


@two_devices
@pytest.mark.parametrize("race", [race.name for race in RACES + IN_PLACE])
def test_the_recipe_is_right_where_its_control_is_wrong(found, race):
    assert found["right"][race], "wrong in the widened window, with every ordering in place"
    assert found["wrong"][race], "right without the ordering: the window was missed"


def overlaps(found: dict, name: str) -> list[Overlap]:
    return [Overlap(**run) for run in found["overlaps"][name]]


@two_devices
@pytest.mark.parametrize("name", SCHEDULES)
def test_gathers_run_behind_products_twenty_times_in_twenty_and_it_pays(found, name):
    runs = overlaps(found, name)
    of_runs = [run.faults(SCHEDULES[name].least_hidden) for run in runs]
    assert len(of_runs) == RUNS
    assert not any(of_runs), (
        f"{sum(map(bool, of_runs))} of {RUNS}, first {next(filter(None, of_runs))}"
    )
    assert gain_us(runs) > 0, f"a step costs {-gain_us(runs):.0f} µs more than a serial one"


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two devices, or none")
def test_a_step_gathers_as_often_as_its_bound_supposes_and_no_reduction_is_missed(tmp_path):
    found = on_two_ranks(tmp_path / "found.json", "--gathers")
    for name, schedule in SCHEDULES.items():
        (run,) = overlaps(found, name)
        assert run.gathers == schedule.gathers * schedule.calls, name
        assert run.reductions == UNITS * schedule.calls, name


@two_devices
def test_gathers_on_the_compute_stream_are_found_out(found):
    for run in overlaps(found, "broken"):
        faults = run.faults(BROKEN.least_hidden)
        assert any("is hidden" in fault for fault in faults), faults


def test_every_edit_still_fits_its_recipe():
    from rankproof.recipe import load_recipe

    edits = {(race.recipe, race.control) for race in RACES + IN_PLACE}
    edits.add(("stream_context", BROKEN.control))
    for recipe, control in edits:
        found = load_recipe(script(recipe), CONTROLS)
        edit = found.control(control)
        edit.apply((edit.file or found.path).read_text())


def test_a_recipe_that_is_imported_anew_leaves_no_hook_of_optimizers_behind(monkeypatch):
    monkeypatch.syspath_prepend(PROOFS)
    before = {id(optimizer_hook) for optimizer_hook in _global_optimizer_post_hooks.values()}
    for _ in range(3):
        load("in_place_gather")
        of_library("shared_slots").counted()
    added = [h for h in _global_optimizer_post_hooks.values() if id(h) not in before]
    assert len(added) == 1, f"{len(added)} hooks of {[h.__module__ for h in added]}"
