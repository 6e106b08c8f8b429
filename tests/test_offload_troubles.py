"""Offload recipes in trouble: steps that raise, graphs left behind, starts that fail."""

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes_source" / "offload"))

import three_streams
from accumulate_and_average import HostSums, LayerMajor, LayerMajorSums
from host_layers import HostLayers
from pipelined_optimizer import PipelinedAdamW
from weight_streaming import StreamedStack

from harness import streams

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDTH = 16
SETTINGS = {"lr": 1e-2}


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers_of() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(4)
    )


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y - torch.linspace(-1, 1, WIDTH)).square().mean()


def broken_loss(y: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def fails_in_backward(stack: StreamedStack, x, layer: int = 1) -> None:
    """A step whose backward raises when the layers above ``layer`` have been stored."""
    plain = stack.compute_backward

    def compute_backward(at: int, grad_y):
        if at == layer:
            raise MemoryError("no room to run this layer again")
        return plain(at, grad_y)

    stack.compute_backward = compute_backward
    with pytest.raises(MemoryError):
        stack.step(x, loss_of)
    stack.compute_backward = plain


def expected_gradients(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model = nn.Sequential(*layers_of())
    for x in batches:
        loss_of(model(x)).backward()
    return [parameter.grad for parameter in model.parameters()]


# A forward whose backward never comes


def evaluate(stack: StreamedStack) -> None:
    stack.forward(batch(7))


def evaluate_microbatches(stack: StreamedStack) -> None:
    stack.forward([batch(7), batch(8)])


def fail_in_loss(stack: StreamedStack) -> None:
    with pytest.raises(ZeroDivisionError):
        stack.step(batch(7), broken_loss)


def fail_in_loss_of_microbatches(stack: StreamedStack) -> None:
    with pytest.raises(ZeroDivisionError):
        stack.step([batch(7), batch(8)], broken_loss)


@pytest.mark.parametrize("trouble", [evaluate, fail_in_loss, fails_in_backward])
def test_a_step_differentiates_its_own_forward(trouble):
    with closing(StreamedStack(layers_of(), CPU)) as stack:
        trouble(stack) if trouble is not fails_in_backward else trouble(stack, batch(7))
        stack.step(batch(0), loss_of)
        stack.wait_for_gradients()
        found = [parameter.grad for parameter in stack.layers.parameters()]
        assert all(map(torch.equal, found, expected_gradients([batch(0)])))


@pytest.mark.parametrize("trouble", [evaluate_microbatches, fail_in_loss_of_microbatches])
def test_a_layer_major_step_differentiates_its_own_forward(trouble):
    with closing(LayerMajor(layers_of(), CPU)) as stack:
        trouble(stack)
        stack.step([batch(0), batch(1)], loss_of)
        stack.wait_for_gradients()
        found = [parameter.grad for parameter in stack.layers.parameters()]
        assert all(map(torch.equal, found, expected_gradients([batch(0), batch(1)])))


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_several_forwards_may_wait_for_their_backwards(slots):
    with closing(StreamedStack(layers_of(), CPU, slots=slots)) as stack:
        outputs = [stack.forward(batch(seed)).requires_grad_() for seed in range(3)]
        for seed, y in enumerate(outputs):
            loss_of(y).backward()
            stack.backward(y.grad)
            stack.wait_for_gradients()
            found = [parameter.grad for parameter in stack.layers.parameters()]
            assert all(map(torch.equal, found, expected_gradients([batch(seed)])))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator's streams are real")
def test_slots_are_loaded_after_what_had_their_memory_before():
    class InUsedMemory(StreamedStack):
        def in_slots(self, *args):
            slots = super().in_slots(*args)
            for flat in slots[0]:
                flat.zero_()  # as a kernel would that was queued before the memory was freed
            return slots

    with streams.recording() as recorder:
        with closing(InUsedMemory(layers_of(), CPU)) as stack:
            stack.step(batch(0), loss_of)
            stack.wait_for_gradients()
        assert recorder.conflicts == []


# An input that is trained


def test_a_step_passes_the_gradient_on_to_what_made_its_input():
    before = nn.Linear(WIDTH, WIDTH)
    loss_of(nn.Sequential(before, *layers_of())(batch(0))).backward()
    expected = before.weight.grad
    before.zero_grad()
    with closing(StreamedStack(layers_of(), CPU)) as stack:
        stack.step(before(batch(0)), loss_of)
    assert torch.equal(before.weight.grad, expected)


def test_microbatches_of_one_graph_get_their_gradients():
    before, model = nn.Linear(WIDTH, WIDTH), nn.Sequential(*layers_of())
    entered = before(batch(0)).chunk(2)
    (loss_of(model(entered[0])) + loss_of(model(entered[1]))).backward()
    expected = before.weight.grad
    before.zero_grad()
    with closing(LayerMajor(layers_of(), CPU)) as stack:
        stack.step(list(before(batch(0)).chunk(2)), loss_of)
        torch.testing.assert_close(before.weight.grad, expected)
        alone = batch(1).requires_grad_()
        stack.step([batch(2), alone], loss_of)
        assert alone.grad is not None


# Bad input, and memory of a start that failed


@pytest.mark.parametrize("kind", [HostLayers, StreamedStack])
def test_no_layer_is_refused(kind):
    with pytest.raises(ValueError, match="there is no layer"):
        kind([], CPU)


@pytest.mark.parametrize("slots", [0, -1])
def test_no_slot_is_refused(slots):
    with pytest.raises(ValueError, match=f"slots must be 1 or more, not {slots}"):
        StreamedStack(layers_of(), CPU, slots=slots)


@pytest.fixture
def locked(monkeypatch) -> dict[int, bool]:
    """Whether an address that was ever page-locked still is, by a driver that only notes them."""
    addresses: dict[int, bool] = {}

    class Driver:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            addresses[address] = True
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            assert addresses[address], "unlocked twice"
            addresses[address] = False

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return addresses


def shared_layers() -> list[nn.Module]:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return [first, second]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a device, no start fails here")
@pytest.mark.parametrize(
    "start",
    [
        lambda: HostLayers(shared_layers(), CUDA),
        lambda: StreamedStack(layers_of(), CUDA, slot_bytes=1),
        lambda: StreamedStack(layers_of(), CUDA),
        lambda: PipelinedAdamW(layers_of(), CUDA, adamw=SETTINGS),
        lambda: HostSums(layers_of(), CUDA, backwards=1),
    ],
    ids=["shared parameter", "slot too small", "no device", "no device: Adam", "no device: sums"],
)
def test_a_start_that_fails_leaves_no_page_locked(locked, start):
    with pytest.raises((ValueError, RuntimeError, AssertionError)) as failure:
        start()
    del failure  # and with it the frames that hold what was begun
    gc.collect()
    assert locked, "nothing had been locked"
    assert not any(locked.values())


def test_locked_pages_are_not_given_to_forked_processes(locked):
    """Whoever writes first would get a copy, and the device would keep the original."""
    with closing(HostLayers(layers_of(), CUDA)) as model:
        address = model.weights[0].flat.data_ptr()
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            begin, dash, rest = line.split(maxsplit=1)[0].partition("-")
            if dash and int(begin, 16) <= address < int(rest, 16):
                break
        flags = next(line for line in lines if line.startswith("VmFlags:"))
        assert "dc" in flags.split(), flags
    assert not any(locked.values())


# Sums on the host


@pytest.mark.parametrize("backwards", [1, 2])
def test_sums_of_a_backward_that_raised_are_not_given_out(backwards):
    with closing(HostSums(layers_of(), CPU, backwards=backwards)) as stack:
        fails_in_backward(stack, batch(0))
        with pytest.raises(RuntimeError, match="left half-way.*build a new stack"):
            stack.finish()
        for seed in range(5):
            with pytest.raises(RuntimeError, match="left half-way.*build a new stack"):
                stack.step(batch(seed), loss_of)


def test_layer_major_sums_of_a_backward_that_raised_are_not_given_out():
    with closing(LayerMajorSums(layers_of(), CPU, backwards=1)) as stack:
        fails_in_backward(stack, [batch(0), batch(1)])
        with pytest.raises(RuntimeError, match="left half-way.*build a new stack"):
            stack.finish()


def test_sums_go_on_after_a_loss_that_raised():
    with closing(HostSums(layers_of(), CPU, backwards=2)) as stack:
        stack.step(batch(0), loss_of)
        with pytest.raises(ZeroDivisionError):
            stack.step(batch(7), broken_loss)
        stack.step(batch(1), loss_of)
        found = [view for layer in stack.finish() for view in layer.values()]
        assert all(map(torch.equal, found, expected_gradients([batch(0), batch(1)])))


# Adam on the host


NORMS = [None, 0.5, math.inf]


def adam(max_norm: float | None, layers: nn.ModuleList | None = None):
    layers = layers or layers_of()
    return closing(PipelinedAdamW(layers, CPU, adamw=SETTINGS, max_norm=max_norm))


def masters_of(stack: PipelinedAdamW) -> list[torch.Tensor]:
    pairs = zip(stack.gradients, stack.masters, strict=True)
    return [view for host, master in pairs for view in host.views_of(master).values()]


@pytest.mark.parametrize("max_norm", NORMS)
def test_adam_goes_on_after_a_loss_that_raised(max_norm):
    with adam(max_norm) as stack, adam(max_norm) as untroubled:
        for seed in range(3):
            stack.step(batch(seed), loss_of)
            untroubled.step(batch(seed), loss_of)
            with pytest.raises(ZeroDivisionError):
                stack.step(batch(7), broken_loss)
        stack.finish()
        untroubled.finish()
        assert all(map(torch.equal, masters_of(stack), masters_of(untroubled)))


@pytest.mark.parametrize("max_norm", NORMS)
def test_adam_does_not_go_on_after_a_backward_that_raised(max_norm):
    with adam(max_norm) as stack:
        stack.step(batch(0), loss_of)
        fails_in_backward(stack, batch(1))
        for _ in range(5):
            with pytest.raises(RuntimeError, match="left half-way: load a checkpoint"):
                stack.step(batch(2), loss_of)
            with pytest.raises(RuntimeError, match="left half-way: load a checkpoint"):
                stack.finish()


@pytest.mark.parametrize("max_norm", NORMS)
def test_adam_does_not_go_on_after_an_arrival_that_failed(max_norm):
    with adam(max_norm) as stack:
        stack.step(batch(0), loss_of)
        stack.finish()
        plain = stack.receive

        def receive(layer: int) -> None:
            if layer == 2:
                raise OSError("a rank has gone")
            plain(layer)

        stack.receive = receive
        stack.step(batch(1), loss_of)
        stack.receive = plain
        for _ in range(5):
            with pytest.raises(OSError, match="gone"):
                stack.finish()
            with pytest.raises(OSError, match="gone"):
                stack.step(batch(2), loss_of)


def test_adam_does_not_go_on_after_an_update_that_failed():
    """Layer 1 alone is not updated; as often as it is called, the stack says so."""
    with adam(None) as stack:
        stack.step(batch(0), loss_of)
        stack.finish()
        plain = stack.receive

        def receive(layer: int) -> None:
            if layer == 1:
                stack.gradients[layer].flat[0] = torch.nan
            plain(layer)

        stack.receive = receive
        stack.step(batch(1), loss_of)
        stack.receive = plain
        for _ in range(5):
            with pytest.raises(FloatingPointError, match="layer 1: .*checkpoint into a new stack"):
                stack.finish()
            with pytest.raises(FloatingPointError, match="layer 1: .*checkpoint into a new stack"):
                stack.step(batch(2), loss_of)


def test_an_interrupted_wait_for_an_update_is_waited_for_again():
    class Interrupted:
        def __init__(self) -> None:
            self.asked = 0

        def result(self) -> None:
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt

    with adam(None) as stack:
        stack.updated[2] = updated = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            stack.step(batch(0), loss_of)
        stack.step(batch(0), loss_of)
        assert updated.asked > 1


def test_a_finite_sum_too_large_for_fp16_is_no_infinity():
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4096, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.bias

    x = torch.zeros(1, 4096, dtype=torch.float16)
    with adam(None, nn.ModuleList([Bias()])) as stack:
        stack.step(x, lambda y: (y.float() * 40).sum())
        stack.finish()
        assert stack.gradients[0].flat.sum().isinf(), "this sum was meant to overflow"
        assert (stack.masters[0] < 0).all()
        stack.step(x, lambda y: (y.float() * 1e6).sum())
        with pytest.raises(FloatingPointError, match="layer 0"):
            stack.finish()


# Three streams


def test_a_pipeline_for_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    weight = SimpleNamespace(device=torch.device("cuda:1"))
    with pytest.raises(ValueError, match="make cuda:1 current first: .*set_device_index"):
        three_streams.Pipeline(weight)


# The judge of copies


def test_copies_within_the_device_are_not_judged():
    def event(cat: str, name: str, stream: int, begin: float, length: float) -> dict:
        return {"cat": cat, "name": name, "ts": begin, "dur": length, "args": {"stream": stream}}

    call = event("user_annotation", "judged call", 0, 0, 1000)
    held = event("cuda_runtime", "cudaMemcpyAsync", 0, 1, 190)
    load = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 5, 180)
    within = event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 200, 700)
    verdict = three_streams.judge([call, held, load, within])
    assert set(verdict.copies) == {"HtoD"}
    assert verdict.holds_host, "a copy within the device hid that the host was held"
    assert not three_streams.judge([call, within]).copies
