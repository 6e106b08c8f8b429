"""Weight streaming on a CUDA device: its event edges, its overlap, its copies, its memory.

The edges are broken by the edits in ``tests/controls/weight_streaming.toml``, which the recorder of
stream order catches on a CPU. Here the stream that must be waited for is delayed, so that a missing
wait gives wrong gradients every time.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from harness.recipe import load_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes_source" / "offload" / "weight_streaming.py"
DELAY_CYCLES = 300_000_000  # of the device's clock: more than 0.15 s; queueing a step takes 0.01 s
LAYERS = 6
FEATURES = 1024
WIDE = 8192  # features where copies and products must be long enough to overlap
PRODUCT_US = 500  # a product of two such matrices takes longer, everything else takes less
BLOCKING = ("cudaMalloc", "cudaFree", "cudaHost", "cuMem")


def load(tmp_path: Path, control: str | None = None):
    """The recipe's module, with a control's edit if one is named."""
    source = RECIPE.read_text()
    if control is not None:
        source = load_recipe(RECIPE, ROOT / "tests" / "controls").control(control).apply(source)
    name = f"weight_streaming_{control}"
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def importable():
    """The recipes that an edited copy imports."""
    sys.path.insert(0, str(RECIPE.parent))
    yield
    sys.path.remove(str(RECIPE.parent))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def mlp(features: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    first, second = (nn.Linear(features, features, bias=False, dtype=dtype) for _ in range(2))
    return nn.Sequential(first, nn.GELU(), second)


def delay(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Hold ``stream``; the event is reached when it runs again."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
    event = torch.cuda.Event()
    event.record(stream)
    return event


def gradients_right(module, device: torch.device, delayed: str) -> bool:
    """Whether a step with one stream delayed gives the resident run's gradients, bit by bit."""
    torch.manual_seed(0)
    layers = [mlp(FEATURES) for _ in range(LAYERS)]
    with closing(module.StreamedStack(layers, device)) as stack:
        for judged in (False, True):  # the first step loads kernels and allocates
            x = torch.randn(64, FEATURES, device=device)
            expected = module.resident_gradients(stack.layers, x, module.loss_of)
            torch.cuda.synchronize()
            streams = {"compute": torch.cuda.current_stream(), "h2d": stack.h2d, "d2h": stack.d2h}
            held = delay(streams[delayed]) if judged else None
            stack.step(x, module.loss_of)
            assert held is None or not held.query(), "the delay was over: nothing was tested"
            stack.wait_for_gradients()
            same = [
                torch.equal(stack.layers[layer].get_parameter(name).grad, gradient)
                for layer, gradients in enumerate(expected)
                for name, gradient in gradients.items()
            ]
            torch.cuda.synchronize()
    return all(same)


@pytest.mark.parametrize("delayed", ["compute", "h2d", "d2h"])
def test_gradients_are_right_whichever_stream_is_late(tmp_path, device, delayed):
    assert gradients_right(load(tmp_path), device, delayed)


@pytest.mark.parametrize(
    ("control", "delayed"),
    [
        ("compute_not_ordered_after_load", "h2d"),
        ("load_not_ordered_after_compute", "compute"),
        ("store_not_ordered_after_gradients", "compute"),
        ("gradients_not_ordered_after_store", "d2h"),
        ("host_not_ordered_after_store", "d2h"),
    ],
)
def test_every_edge_removed_is_detected(tmp_path, device, control, delayed):
    assert not gradients_right(load(tmp_path, control), device, delayed)


def labelled(function: Callable, label: str) -> Callable:
    def call(layer: int, *args):
        with record_function(f"{label} {layer}"):
            return function(layer, *args)

    return call


@pytest.fixture(scope="module")
def trace(tmp_path_factory, importable) -> list[dict]:
    """Events of one step of 8 layers, each method's launches labelled with its layer."""
    tmp_path = tmp_path_factory.mktemp("trace")
    module = load(tmp_path)
    device = torch.device("cuda", torch.cuda.current_device())
    layers = (mlp(WIDE, torch.bfloat16) for _ in range(8))
    with closing(module.StreamedStack(layers, device)) as stack:
        for method in ("load", "store", "compute_forward", "compute_backward"):
            setattr(stack, method, labelled(getattr(stack, method), method))
        x = torch.randn(8192, WIDE, device=device, dtype=torch.bfloat16)
        for _ in range(2):
            stack.step(x, module.loss_of)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            with record_function("step"):
                stack.step(x, module.loss_of)
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def label_of(trace: list[dict], name: str) -> list[dict]:
    return [e for e in trace if e.get("cat") == "user_annotation" and e["name"] == name]


def launched_by(trace: list[dict], name: str) -> list[list[tuple[float, float]]]:
    """For each time ``name`` was called: what its launches did on the device, as (begin, end)."""
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in trace
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]
    }
    work = [e for e in trace if e.get("cat") in ("kernel", "gpu_memcpy")]
    return [
        [
            (e["ts"], e["ts"] + e["dur"])
            for e in work
            if call["ts"] <= launches.get(e["args"]["correlation"], -1) <= call["ts"] + call["dur"]
        ]
        for call in sorted(label_of(trace, name), key=lambda e: e["ts"])
    ]


def test_backward_computes_loads_and_stores_at_one_time(trace):
    for layer in range(2, 6):
        (products,) = launched_by(trace, f"compute_backward {layer}")
        load = launched_by(trace, f"load {layer - 1}")[-1]  # that of backward
        (store,) = launched_by(trace, f"store {layer + 1}")
        together = [
            min(end, load[0][1], store[0][1]) - max(begin, load[0][0], store[0][0])
            for begin, end in products
            if end - begin > PRODUCT_US
        ]
        assert max(together) > 0, f"layer {layer}: no instant with all three"


def test_every_copy_is_pinned_and_one_a_layer_and_direction(trace):
    copies = [e for e in trace if e.get("cat") == "gpu_memcpy" and "DtoD" not in e["name"]]
    loads = [e for e in copies if "HtoD" in e["name"]]
    stores = [e for e in copies if "DtoH" in e["name"]]
    assert (len(loads), len(stores)) == (2 * 8 - 2, 8)
    assert all("Pinned" in e["name"] for e in copies), {e["name"] for e in copies}
    assert len({e["args"]["stream"] for e in loads} | {e["args"]["stream"] for e in stores}) == 2


def test_no_allocation_and_no_wait_inside_a_step(trace):
    (step,) = label_of(trace, "step")
    calls = {
        e["name"]
        for e in trace
        if e.get("cat") == "cuda_runtime" and step["ts"] <= e["ts"] <= step["ts"] + step["dur"]
    }
    assert any("Launch" in name for name in calls), "the step's calls were not recorded"
    assert not [name for name in calls if name.startswith(BLOCKING) or "Synchronize" in name]
    assert "cudaMemcpy" not in calls


def test_device_memory_grows_by_saved_inputs_alone(tmp_path, device):
    module = load(tmp_path)
    peaks = {}
    for count in (4, 4, 12):  # the first also allocates what lasts, such as workspaces
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layers = (mlp(FEATURES) for _ in range(count))
        with closing(module.StreamedStack(layers, device)) as stack:
            x = torch.randn(256, FEATURES, device=device)
            for _ in range(2):
                stack.step(x, module.loss_of)
            torch.cuda.synchronize()
            peaks[count] = torch.cuda.max_memory_allocated() - before
            del stack
    assert 0 <= peaks[12] - peaks[4] <= 8 * x.nbytes


def test_a_refusal_to_lock_is_reported_once(monkeypatch, device):
    """By the error that says what to do, not by the next kernel as well."""
    host_layers = importlib.import_module("host_layers")
    register = torch.cuda.cudart().cudaHostRegister

    class Driver:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            return register(address, nbytes, 1 << 20)  # no such flag: the driver refuses

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    with pytest.raises(RuntimeError, match="cannot lock .* more bytes"):
        host_layers.HostLayers([mlp(FEATURES)], device)
    assert torch.ones(2, device=device).sum().item() == 2


def test_host_memory_is_page_locked_and_unlocked(tmp_path, device):
    module = load(tmp_path)
    for _ in range(2):  # the second registers memory again
        with closing(module.StreamedStack([mlp(FEATURES)], device)) as stack:
            buffers = stack.weights + stack.gradients
            assert all(buffer.flat.is_pinned() for buffer in buffers)
        assert not any(buffer.flat.is_pinned() for buffer in buffers)
