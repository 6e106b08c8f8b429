"""Sums and Adam on the host: the bits of an ordinary run, in any timing, and clear errors."""

import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes_source" / "offload"))

import accumulate_and_average
import pipelined_optimizer
from accumulate_and_average import HostSums, LayerMajor, LayerMajorSums
from pipelined_optimizer import PipelinedAdamW

from harness.recipe import Control
from harness.run import run

FOLDER = Path(pipelined_optimizer.__file__).parent
CPU = torch.device("cpu")
WIDTH = 16
STEPS = 20
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
NORMS = (None, 0.5, math.inf)
PATIENCE_S = 60  # only a failing test waits this long


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers_of(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """Five layers, of several kinds and sizes; one without parameters, one frozen."""
    torch.manual_seed(0)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    mlp = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))
    kinds = [nn.Linear(WIDTH, WIDTH), mlp, nn.Tanh(), nn.LayerNorm(WIDTH), frozen]
    return nn.ModuleList(kinds).to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y.float() - torch.linspace(-1, 1, WIDTH)).square().mean()


class Ordinary:
    """Resident training: fp32 masters, one fused AdamW, clipped by rows or as usual."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.layers = layers_of(dtype)
        self.weights = [p for p in self.layers.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **SETTINGS)
        self.norms: list[torch.Tensor] = []

    def step(self, batches: list[torch.Tensor], max_norm: float | None, by_rows=True) -> None:
        for master in self.masters:
            master.grad = None
        for x in batches:
            for layer in self.layers:
                x = layer(x)
            self.layers.zero_grad()
            loss_of(x).backward()
            for master, weight in zip(self.masters, self.weights, strict=True):
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
        if max_norm is not None and by_rows:
            norm = get_total_norm(pipelined_optimizer.row_norms(p.grad for p in self.masters))
            clip_grads_with_norm_(self.masters, max_norm, norm)
        elif max_norm is not None:
            self.norms.append(nn.utils.clip_grad_norm_(self.masters, max_norm))
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)


def masters_of(stack: PipelinedAdamW) -> list[torch.Tensor]:
    pairs = zip(stack.gradients, stack.masters, strict=True)
    return [view for host, master in pairs for view in host.views_of(master).values()]


def assert_same(stack: PipelinedAdamW, ordinary: Ordinary) -> None:
    assert all(map(torch.equal, masters_of(stack), ordinary.masters))
    weights = zip(stack.layers.parameters(), ordinary.layers.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in weights)


def pipelined(max_norm: float | None = None, kind=PipelinedAdamW, dtype=torch.float32, **settings):
    return closing(kind(layers_of(dtype), CPU, adamw=SETTINGS, max_norm=max_norm, **settings))


# Bits


@pytest.mark.parametrize("chunk", [2**22, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("max_norm", NORMS)
def test_twenty_steps_give_the_bits_of_the_resident_run(max_norm, dtype, chunk, monkeypatch):
    monkeypatch.setattr(pipelined_optimizer, "CHUNK", chunk)
    ordinary = Ordinary(dtype)
    with pipelined(max_norm, dtype=dtype) as stack:
        first = stack.step(batch(0, dtype), loss_of)
        for seed in range(1, STEPS):
            last = stack.step(batch(seed, dtype), loss_of)
        stack.finish()
        for seed in range(STEPS):
            ordinary.step([batch(seed, dtype)], max_norm)
        assert_same(stack, ordinary)
        assert last < first


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_twenty_steps_on_several_ranks(ranks):
    """The recipe's own comparison with a resident data-parallel run, of more steps."""
    name = "pipelined_optimizer"
    longer = Control(name, "", "STEPS = 5\n", f"STEPS = {STEPS}\n", frozenset(), ranks)
    report = run(FOLDER / f"{name}.py", ranks, launcher="warm", control=longer)
    assert report.ok, report.describe()


def test_clipping_agrees_with_clip_grad_norm():
    """Up to the rounding of a norm, which is taken by rows here; 20 steps multiply it."""
    ordinary, found = Ordinary(), []
    with pipelined(0.02) as stack:
        for seed in range(STEPS):
            stack.step(batch(seed), loss_of)
            stack.finish()
            found.append(stack.norm)
    for seed in range(STEPS):
        ordinary.step([batch(seed)], 0.02, by_rows=False)
    norms = torch.stack(ordinary.norms)
    assert (norms > 0.02).all(), "nothing was clipped"
    torch.testing.assert_close(torch.stack(found), norms, rtol=1e-5, atol=0)
    for ours, theirs in zip(masters_of(stack), ordinary.masters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_norm", NORMS)
def test_layer_major_microbatches_with_adam_on_the_host(max_norm):
    class Both(LayerMajor, PipelinedAdamW):
        pass

    ordinary, dtype = Ordinary(torch.bfloat16), torch.bfloat16
    with pipelined(max_norm, Both, dtype, gradient_dtype=torch.float32) as stack:
        for step in range(STEPS):
            microbatches = [batch(3 * step + i, dtype) for i in range(3)]
            losses = stack.step(microbatches, loss_of)
            ordinary.step(microbatches, max_norm)
        assert losses.shape == (3,)
        stack.finish()
        assert_same(stack, ordinary)


@pytest.mark.parametrize("chunk", [2**18, 7])
def test_sums_have_the_bits_of_ordinary_accumulation(chunk, monkeypatch):
    monkeypatch.setattr(accumulate_and_average, "CHUNK", chunk)
    model = nn.Sequential(*layers_of())
    major = LayerMajorSums(layers_of(), CPU, backwards=1)
    with closing(HostSums(layers_of(), CPU, backwards=3)) as stack, closing(major):
        for step in range(2):
            model.zero_grad()
            batches = [batch(3 * step + i) for i in range(3)]
            for x in batches:
                loss_of(model(x)).backward()
                stack.step(x, loss_of)
            major.step(batches, loss_of)
            expected = [p.grad for p in model.parameters() if p.requires_grad]
            for sums in (stack.finish(), major.finish()):
                found = [view for layer in sums for view in layer.values()]
                assert all(map(torch.equal, found, expected))


def test_layer_major_losses_are_differentiated_one_after_the_other():
    """A head in the loss function gets the bits of ordinary accumulation, and one graph lives."""
    torch.manual_seed(0)
    head, batches = nn.Linear(WIDTH, WIDTH).bfloat16(), [batch(i, torch.bfloat16) for i in range(5)]
    model, seen = nn.Sequential(*layers_of(torch.bfloat16)), []
    for x in batches:
        loss_of(head(model(x))).backward()
    expected = head.weight.grad.clone()
    head.zero_grad()

    def loss_of_head(y: torch.Tensor) -> torch.Tensor:
        assert all(before.grad is not None for before in seen), "the graph before is still there"
        seen.append(y)
        return loss_of(head(y))

    with closing(LayerMajor(layers_of(torch.bfloat16), CPU)) as stack:
        assert stack.step(batches, loss_of_head).shape == (5,)
    assert torch.equal(head.weight.grad, expected)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated and not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("max_norm", NORMS)
def test_nothing_is_computed_from_the_padding(max_norm, poisoned_memory):
    """Between the parameters of a layer; what the device's slots held there goes everywhere."""
    ordinary, dtype = Ordinary(torch.bfloat16), torch.bfloat16
    major = LayerMajorSums(layers_of(dtype), CPU, backwards=1)
    with pipelined(max_norm, dtype=dtype) as stack, closing(major):
        for seed in range(3):
            stack.step(batch(seed, dtype), loss_of)
            ordinary.step([batch(seed, dtype)], max_norm)
        stack.finish()
        stack.check_finite()
        assert_same(stack, ordinary)
        assert stack.masters[0].isnan().any(), "the padding was meant to hold NaN"
        major.step([batch(0, dtype)], loss_of)
        sums = [view for layer in major.finish() for view in layer.values()]
        assert all(total.isfinite().all() for total in sums)
        assert major.sums[0].isnan().any(), "the padding was meant to hold NaN"


# Timing: each test holds one side until the other has done what it must be able to do


def test_upper_layers_are_updated_while_backward_is_still_running():
    class Held(PipelinedAdamW):
        def compute_backward(self, layer, grad_y):
            if layer == 0:
                wait(self.received[:1], PATIENCE_S)
                self.updated[len(self.layers) - 1].result(PATIENCE_S)
            return super().compute_backward(layer, grad_y)

    with pipelined(kind=Held) as stack:
        stack.step(batch(0), loss_of)
        stack.finish()
    with pipelined(1.0, Held) as stack, pytest.raises(KeyError):  # deferred: none is scheduled yet
        stack.step(batch(0), loss_of)


def test_the_lowest_layer_that_has_arrived_is_updated_first():
    class Held(PipelinedAdamW):
        def receive(self, layer):
            if layer < len(self.layers) - 1:
                uppermost_taken.wait(PATIENCE_S)
            super().receive(layer)

        def update(self, layer):
            if not order:
                uppermost_taken.set()
                all_arrived.wait(PATIENCE_S)
            order.append(layer)
            super().update(layer)

    order, uppermost_taken, all_arrived = [], threading.Event(), threading.Event()
    with pipelined(kind=Held) as stack:
        stack.step(batch(0), loss_of)
        wait(stack.received)
        all_arrived.set()
        stack.finish()
    assert order == [4, 0, 1, 2, 3]  # layer 4 had been taken when the others arrived


def test_forward_begins_while_upper_layers_are_still_being_updated():
    class Held(PipelinedAdamW):
        def update(self, layer):
            if layer == len(self.layers) - 1:
                begun.wait(PATIENCE_S)
                waited.append(begun.is_set())
            super().update(layer)

        def compute_forward(self, layer, x):
            if layer == 0 and self.updated:
                begun.set()
            return super().compute_forward(layer, x)

    begun, waited = threading.Event(), []
    ordinary = Ordinary()
    with pipelined(math.inf, Held) as stack:
        for seed in range(2):
            stack.step(batch(seed), loss_of)
            ordinary.step([batch(seed)], None)
        stack.finish()
        assert_same(stack, ordinary)
    assert waited == [True, True]


def test_a_backward_does_not_wait_for_its_sums():
    class Held(HostSums):
        def add(self, layer, backward):
            queued.wait(PATIENCE_S)
            super().add(layer, backward)

    queued = threading.Event()
    with closing(Held(layers_of(), CPU, backwards=1)) as stack:
        stack.step(batch(0), loss_of)
        assert not any(added.done() for added in stack.added.values())
        queued.set()
        stack.finish()


# Errors


@pytest.mark.parametrize("max_norm", NORMS)
def test_training_goes_on_after_a_batch_that_overflows(max_norm):
    """With a limit on the norm, as if the batch had not been; without, the message says which."""
    ordinary = Ordinary()
    with pipelined(max_norm) as stack:
        for seed in range(4):
            stack.step(batch(seed), loss_of)
            ordinary.step([batch(seed)], max_norm)
            stack.finish()
            if max_norm is not None:
                stack.step(batch(seed) * torch.inf, loss_of)
                with pytest.raises(FloatingPointError, match="nothing updated, skip"):
                    stack.finish()
        assert_same(stack, ordinary)
        if max_norm is None:
            before = [master.clone() for master in masters_of(stack)]
            stack.step(batch(4) * torch.inf, loss_of)
            for _ in range(5):
                with pytest.raises(FloatingPointError, match="layer 0: .*checkpoint"):
                    stack.forward(batch(5))
            assert all(map(torch.equal, before, masters_of(stack)))


def test_an_error_is_raised_only_when_the_host_is_done_with_the_gradients(monkeypatch):
    """The caller may train on at once, and that overwrites them."""

    class Held(PipelinedAdamW):
        def receive(self, layer):
            if layer == 3:
                raise OSError("the host is on fire")
            if layer == 0:
                awaited.wait(PATIENCE_S)
            super().receive(layer)

    def wait_noted(futures):
        awaited.set()
        return wait(futures)

    awaited = threading.Event()
    monkeypatch.setattr(pipelined_optimizer, "wait", wait_noted)
    with pipelined(kind=Held) as stack:
        stack.step(batch(0), loss_of)
        received = stack.received
        with pytest.raises(OSError, match="fire"):
            stack.finish()
        assert all(future.done() for future in received)


def test_what_a_worker_raises_reaches_the_training_thread(monkeypatch):
    def fail(*_):
        raise OSError("the host is on fire")

    with closing(HostSums(layers_of(), CPU, backwards=1)) as stack:
        stack.add = fail
        stack.step(batch(0), loss_of)
        with pytest.raises(OSError, match="fire"):
            stack.finish()
        with pytest.raises(OSError, match="fire"):
            stack.step(batch(0), loss_of)
    with pipelined() as stack:
        stack.update = fail
        stack.step(batch(0), loss_of)
        with pytest.raises(OSError, match="fire"):
            stack.step(batch(0), loss_of)


# The rest of a training


def test_a_checkpoint_of_the_host_tensors_continues_bit_by_bit(tmp_path):
    def state_of(stack: PipelinedAdamW) -> dict:
        stack.finish()
        return {
            "masters": stack.masters,
            "optimizers": [[o.state_dict() for o in chunks] for chunks in stack.optimizers],
        }

    ordinary, dtype = Ordinary(torch.bfloat16), torch.bfloat16
    with pipelined(0.5, dtype=dtype) as stack:
        for seed in range(3):
            stack.step(batch(seed, dtype), loss_of)
        dcp.save(state_of(stack), checkpoint_id=tmp_path)
    with pipelined(0.5, dtype=dtype) as stack:
        stack.step(batch(9, dtype), loss_of)  # makes the moments that the load fills
        state = state_of(stack)
        dcp.load(state, checkpoint_id=tmp_path)
        for layer, chunks in enumerate(state["optimizers"]):
            for optimizer, loaded in zip(stack.optimizers[layer], chunks, strict=True):
                optimizer.load_state_dict(loaded)
            size = stack.masters[layer].numel()
            stack.weights[layer].flat[:size].copy_(stack.masters[layer])
        stack.step(batch(3, dtype), loss_of)
        stack.finish()
        for seed in range(4):
            ordinary.step([batch(seed, dtype)], 0.5)
        assert_same(stack, ordinary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_that_are_loaded_into_a_stack_are_trained_on(dtype):
    ordinary = Ordinary(dtype)
    pretrained = {name: x + 0.25 for name, x in ordinary.layers.state_dict().items()}
    with pipelined(0.5, dtype=dtype) as stack:
        stack.layers.load_state_dict(pretrained)
        stack.reload()
        ordinary.layers.load_state_dict(pretrained)
        for master, weight in zip(ordinary.masters, ordinary.weights, strict=True):
            master.data.copy_(weight)
        for seed in range(3):
            stack.step(batch(seed, dtype), loss_of)
            ordinary.step([batch(seed, dtype)], 0.5)
        stack.finish()
        assert_same(stack, ordinary)


def test_the_host_threads_get_cores_of_their_own(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(pipelined_optimizer, "host_threads", lambda: 3)
    with pipelined() as stack:
        assert stack.updates.submit(torch.get_num_threads).result() == 3
        assert stack.arrivals.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)


def test_threads_that_wait_for_events_use_the_device_of_their_rank(monkeypatch):
    told = {}

    def set_device(device: str) -> None:
        told[threading.current_thread().name] = device

    monkeypatch.setattr(torch.cpu, "current_device", lambda: "this rank's")
    monkeypatch.setattr(torch.cpu, "set_device", set_device)
    with closing(HostSums(layers_of(), CPU, backwards=1)) as sums, pipelined() as adam:
        for stack, waits in ((sums, "add"), (adam, "receive")):
            plain = getattr(stack, waits)

            def checked(*args, plain=plain):
                assert told[threading.current_thread().name] == "this rank's"
                plain(*args)

            setattr(stack, waits, checked)
            stack.step(batch(0), loss_of)
            stack.finish()
    assert len(told) == 2, "and no other thread, least of all the one that trains"


def test_bytes_for_a_parameter():
    """16 on the host in bf16, as the page says; layouts are padded, so layers are large here."""
    layers = [nn.Linear(256, 256, bias=False).bfloat16() for _ in range(3)]
    with closing(PipelinedAdamW(deepcopy(layers), CPU, adamw=SETTINGS)) as stack:
        stack.step(torch.randn(2, 256).bfloat16(), lambda y: y.float().square().mean())
        stack.finish()
        pinned = [host.flat for host in stack.weights + stack.gradients]
        states = [o.state[p] for c in stack.optimizers for o in c for p in o.state]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        held = sum(tensor.nbytes for tensor in pinned + stack.masters + moments)
    assert held == 16 * sum(p.numel() for layer in layers for p in layer.parameters())
