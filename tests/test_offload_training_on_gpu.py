"""Sums and Adam on the host of a CUDA device: right with any stream late, and not by luck.

A missing wait for an event is caught by the recorder of stream order on a CPU. Here the copies to
the host are delayed, so that the same edit gives wrong sums and weights every time.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from harness.recipe import load_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes_source" / "offload"
DELAY_CYCLES = 300_000_000  # of the device's clock: more than 0.15 s; queueing a step takes 0.01 s
STREAMS = ("compute", "h2d", "d2h")


@pytest.fixture
def device() -> Iterator[torch.device]:
    index = torch.cuda.current_device()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cuda", index)
    dist.destroy_process_group()


def load(tmp_path: Path, monkeypatch, recipe: str, control: str | None = None) -> ModuleType:
    """The recipe's module, with a control's edit if one is named."""
    monkeypatch.syspath_prepend(FOLDER)
    path = FOLDER / f"{recipe}.py"
    source = path.read_text()
    if control is not None:
        source = load_recipe(path, ROOT / "tests" / "controls").control(control).apply(source)
    edited = tmp_path / f"{recipe}_{control}.py"
    edited.write_text(source)
    spec = importlib.util.spec_from_file_location(edited.stem, edited)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, edited.stem, module)
    spec.loader.exec_module(module)
    return module


def delay_each_step(stack, delayed: str) -> None:
    """Hold a stream at the beginning of each step but the first, which loads kernels."""
    streams = {"compute": torch.cuda.current_stream(), "h2d": stack.h2d, "d2h": stack.d2h}
    stream, plain = streams[delayed], stack.step

    def step(*args):
        held = None
        if stack.stores:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(DELAY_CYCLES)
            held = torch.cuda.Event()
            held.record(stream)
        loss = plain(*args)
        assert held is None or not held.query(), "the delay was over: nothing was tested"
        return loss

    stack.step = step


def prove_adam(module: ModuleType, device: torch.device, delayed: str) -> None:
    stack = module.PipelinedAdamW(module.build_layers(), device, adamw=module.SETTINGS)
    with closing(stack):
        delay_each_step(stack, delayed)
        module.prove(stack)


def prove_sums(module: ModuleType, device: torch.device, delayed: str) -> None:
    """Two steps of one microbatch, compared with the resident run and with layer-major."""
    stack = module.HostSums(module.build_layers(), device, backwards=1)
    major = module.LayerMajorSums(
        module.build_layers(), device, backwards=1, gradient_dtype=torch.float32
    )
    with closing(stack), closing(major):
        delay_each_step(stack, delayed)
        for step in range(2):
            batches = module.batches_of(0, step, device)[:1]
            stack.step(batches[0], module.streaming.loss_of)
            major.step(batches, module.streaming.loss_of)
            module.prove(stack, major, [module.resident_sums(stack.layers, batches)])


PROOFS = {"pipelined_optimizer": prove_adam, "accumulate_and_average": prove_sums}


@pytest.mark.parametrize("delayed", STREAMS)
@pytest.mark.parametrize("recipe", PROOFS)
def test_right_whichever_stream_is_late(tmp_path, monkeypatch, device, recipe, delayed):
    PROOFS[recipe](load(tmp_path, monkeypatch, recipe), device, delayed)


@pytest.mark.parametrize(
    ("recipe", "control"),
    [
        ("pipelined_optimizer", "update_before_arrival"),
        ("accumulate_and_average", "add_before_arrival"),
    ],
)
def test_reading_before_arrival_is_detected(tmp_path, monkeypatch, device, recipe, control):
    with pytest.raises(AssertionError, match="layer"):
        PROOFS[recipe](load(tmp_path, monkeypatch, recipe, control), device, "d2h")
