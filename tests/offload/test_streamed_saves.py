"""A streamed run is saved and resumed bit for bit: killed, on one rank or two, with one copy."""

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import streamed_run
import torch
from streamed_run import SAVED, STEPS, resume, running, train_and_save

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.offload import HostAdamW, eight_bit, stream_layers

SCRIPT = Path(streamed_run.__file__)
REPO = SCRIPT.parents[2]
MOMENTS = ("fp32", "8bit")

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same(found: tuple, expected: tuple) -> None:
    """Losses and every tensor, to the bit."""
    losses, tensors = found
    assert losses == expected[0][-len(losses) :]
    different = [name for name in expected[1] if not torch.equal(tensors[name], expected[1][name])]
    assert different == [] and tensors.keys() == expected[1].keys()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, tuple]:
    """Losses and tensors of a run in one go, which saves none the less; by kind of moments."""
    found = {}
    for moments in MOMENTS:
        with running(moments=moments) as run:
            losses = train_and_save(run, tmp_path_factory.mktemp("saved") / "saved", killed=False)
            found[moments] = losses, run.results()
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of runs that were killed in a later step."""
    found = {}
    for moments in MOMENTS:
        folder = tmp_path_factory.mktemp("killed") / "saved"
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder), moments],
            env=os.environ | {"PYTHONPATH": str(REPO)},
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        found[moments] = folder
    return found


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_stock_qwen3_that_was_killed_resumes_with_the_losses_and_weights_of_one_run(
    killed, uninterrupted, moments
):
    with running(seed=7, moments=moments) as run:
        losses = resume(run, killed[moments])
        assert_same((losses, run.results()), uninterrupted[moments])


EIGHT_BITS = {"moments": "8bit", "in_backward": True, "budget_layers": 2}


@pytest.mark.parametrize("options", [{"in_backward": True}, {"budget_layers": 2}, EIGHT_BITS])
def test_a_run_with_other_settings_resumes_bit_for_bit(options, tmp_path):
    with running(**options) as run:
        expected = train_and_save(run, tmp_path / "saved", killed=False), run.results()
    with running(seed=7, **options) as run:
        losses = resume(run, tmp_path / "saved")
        assert_same((losses, run.results()), expected)


def test_one_rank_resumes_on_two_and_two_on_one(killed, uninterrupted, tmp_path):
    """Both take the same batch: the mean of their gradients has the bits of each."""
    torch.multiprocessing.start_processes(
        streamed_run.on_two_ranks, (str(tmp_path), killed), nprocs=2, start_method="spawn"
    )
    for way, options in streamed_run.WAYS.items():
        moments = options["moments"]
        here = tmp_path / way
        for rank in range(2):
            for found in torch.load(here / f"of_rank{rank}"):
                assert_same(found, uninterrupted[moments])
        with running(seed=7, moments=moments) as run:
            losses = resume(run, here / "saved")
            assert_same((losses, run.results()), uninterrupted[moments])


def masters_of(run) -> list[torch.Tensor]:
    found = []
    for parameter in run.optimizer.group_of:
        kept = run.optimizer.state[parameter]
        if "master" in kept:
            found.append(kept["master"].reshape(-1))
        else:
            weight = parameter.detach().reshape(-1)
            found.append(eight_bit.master_of(weight, kept["rest"].reshape(-1), kept["digest"]))
    return found


@pytest.mark.parametrize(("here", "there"), [MOMENTS, MOMENTS[::-1]])
def test_a_checkpoint_of_other_moments_is_converted(killed, here, there):
    with running(moments=there) as other, running(seed=7, moments=here) as run:
        for step in range(1, SAVED + 1):
            other.train(step)
        other.streamed.wait()
        with CheckpointManager(killed[there], run.state, grace_s=None) as checkpoints:
            assert checkpoints.resume() == SAVED
        assert all(map(torch.equal, masters_of(run), masters_of(other)))
        run.train(SAVED + 1)


def test_a_load_in_memory_takes_what_was_saved():
    with running() as run, running(seed=7) as other:
        for step in range(SAVED):
            run.train(step)
        saved = TrainingState(run.model, run.optimizer).state_dict()
        TrainingState(other.model, other.optimizer).load_state_dict(copy.deepcopy(saved))
        assert_same(([], other.results()), ([], run.results()))


def test_a_state_of_an_adamw_of_torch_keeps_the_steps_of_each_parameter():
    """A layer had one number for all of them: another correction of the moments."""
    models = streamed_run.qwen3().float(), streamed_run.qwen3().float()
    ordinary = torch.optim.AdamW(models[0].parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        models[0](**streamed_run.batch(step)).loss.backward()
        if step < SAVED:
            models[0].model.layers[1].mlp.up_proj.weight.grad = None
        ordinary.step()
        ordinary.zero_grad()
    model = models[1]
    with (
        stream_layers(model, model.model.layers, "cpu") as streamed,
        HostAdamW(model.parameters(), streamed) as optimizer,
    ):
        model.load_state_dict(models[0].state_dict())
        optimizer.load_state_dict(ordinary.state_dict())
        for each, steps in zip(models, (ordinary, optimizer), strict=True):
            each(**streamed_run.batch(STEPS)).loss.backward()
            steps.step()
    assert all(map(torch.equal, models[0].parameters(), model.parameters()))
