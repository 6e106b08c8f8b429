"""What a host has left is asked before the kernel ends the job; what is closed, it has again."""

import ctypes
import gc
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from overlap_recipes import host_memory
from overlap_recipes.offload import ActivationOffload, HostAdamW, stream_layers
from overlap_recipes.page_locked import PageLocked

MB = 2**20


def host(root, available=None, cgroup="", files=None):
    """A root folder that says so."""
    (root / "proc/self").mkdir(parents=True)
    if available is not None:
        (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


JOB = {"job/memory.max": "1000", "job/memory.current": "900"}
FILES = {"job/memory.stat": "anon 500\ninactive_file 300\nactive_file 100\n"}
OUTER = {"memory.max": "700", "memory.current": "650"}
NO_LIMIT = {"job/memory.max": "max", "job/memory.current": "900"}
FIRST_VERSION = {"memory/a/memory.limit_in_bytes": "50", "memory/a/memory.usage_in_bytes": "20"}
OF_TWO_FOLDERS = {"memory/a/memory.stat": "inactive_file 3\ntotal_inactive_file 10\n"}


@pytest.fixture
def leaves(tmp_path, monkeypatch):
    """Called with bytes: this host has a cgroup that has as many left."""
    host(tmp_path, cgroup="0::/job\n", files=NO_LIMIT)
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)

    def leaves(nbytes: int) -> None:
        folder = tmp_path / "sys/fs/cgroup/job"
        (folder / "memory.max").write_text(str(nbytes))
        (folder / "memory.current").write_text("0")

    return leaves


@pytest.mark.parametrize(
    ("options", "free"),
    [
        ({}, None),
        ({"available": 2}, 2048),
        ({"available": 2, "cgroup": "0::/job\n", "files": JOB}, 100),
        ({"available": 2, "cgroup": "0::/job\n", "files": JOB | FILES}, 500),
        ({"available": 2, "cgroup": "0::/job\n", "files": JOB | FILES | OUTER}, 50),
        ({"available": 2, "cgroup": "0::/job\n", "files": NO_LIMIT}, 2048),
        ({"available": 2, "cgroup": "3:cpu:/a\n4:memory:/a\n", "files": FIRST_VERSION}, 30),
        ({"cgroup": "4:memory:/a\n", "files": FIRST_VERSION | OF_TWO_FOLDERS}, 40),
        ({"available": 2, "cgroup": "0::/elsewhere\n"}, 2048),
    ],
)
def test_the_least_of_what_is_said_counts(tmp_path, options, free):
    rooms = host_memory.rooms(host(tmp_path, **options))
    assert min((room.free for room in rooms), default=None) == free


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).bfloat16()


LAYER = 64 * 64 + 64  # parameters


def test_layers_that_do_not_fit_are_refused(leaves):
    """Their gradients are new; the weights are there already."""
    three = model()
    leaves(3 * 2 * LAYER - 1)
    told = r"weights and gradients of layers take .* MB of host memory, and .* MB .*/job.*budget"
    with pytest.raises(RuntimeError, match=told), stream_layers(three, list(three), "cpu"):
        pass
    with stream_layers(three, list(three)[1:], "cpu"):
        pass


def test_weights_that_lie_in_a_file_are_counted(leaves, tmp_path):
    """What is mapped from a file is no memory that the host gets back."""
    large = nn.Linear(2048, 2048, bias=False)
    weights = torch.from_file(str(tmp_path / "weights"), shared=True, size=2048 * 2048)
    large.weight.data = weights.view(2048, 2048)
    model = nn.Sequential(large)
    leaves(int(1.5 * large.weight.nbytes))
    with pytest.raises(RuntimeError, match="weights and gradients of layers take 33.6 MB"):
        stream_layers(model, [large], "cpu").__enter__()


@pytest.mark.parametrize("is_held", [True, False])
def test_an_optimizer_that_does_not_fit_is_refused(leaves, is_held):
    """It was ended by SIGKILL, where an earlier one of the model was held yet."""
    three = model()
    with stream_layers(three, list(three), "cpu") as streamed:
        with HostAdamW(three.parameters(), streamed) as first:
            pass
        if not is_held:
            del first
        leaves(3 * 12 * LAYER - 1)
        told = "masters and moments of layers take .* MB of host memory"
        if is_held:
            told += ".*an earlier HostAdamW of this model is held yet: del it"
        with pytest.raises(RuntimeError, match=told) as refused:
            HostAdamW(three.parameters(), streamed)
        assert is_held or "earlier" not in str(refused.value)
        leaves(3 * 12 * LAYER)
        with HostAdamW(three.parameters(), streamed):
            pass


def test_ranks_that_have_no_group_yet_take_a_hosts_memory_together(leaves, monkeypatch):
    three = model()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    leaves(2 * 3 * 2 * LAYER - 1)
    with pytest.raises(RuntimeError, match="take"), stream_layers(three, list(three), "cpu"):
        pass


def test_a_pool_of_activations_that_does_not_fit_is_refused(leaves):
    leaves(MB)
    with pytest.raises(RuntimeError, match=r"1\.0 MB are left .*/job.* or pass a smaller budget"):
        ActivationOffload("cpu", budget=2 * MB, window=1)


def test_what_others_take_while_memory_is_locked_counts(leaves, monkeypatch):
    """As the ranks of a host do in their first saves, each of them a piece at a time."""
    leaves(16 * MB)
    memset = ctypes.memset
    touched = []

    def memset_while_others_take(*args) -> None:
        touched.append(args)
        leaves((16 - 4 * len(touched)) * MB)
        memset(*args)

    monkeypatch.setattr(ctypes, "memset", memset_while_others_take)
    with pytest.raises(RuntimeError, match=r"cannot lock .* bytes .*\(8\.4 MB are left"):
        PageLocked(12 * MB, torch.device("cpu"), piece=MB)
    assert len(touched) == 2


HERE = host_memory.Room("the host", ("a",), 100)


def test_a_device_that_shares_the_hosts_memory_is_refused(monkeypatch):
    """There offload costs time and memory, and gives none."""
    three = model()
    monkeypatch.setattr(host_memory, "is_shared_with", lambda device: True)
    refused = pytest.raises(RuntimeError, match="shares the host's memory.*unified_memory=True")
    with refused, stream_layers(three, list(three), "cpu"):
        pass
    with stream_layers(three, list(three), "cpu", unified_memory=True):
        assert torch.isfinite(three(torch.ones(2, 64).bfloat16())).all()
    with refused:
        ActivationOffload("cpu", budget=1, window=1)
    ActivationOffload("cpu", budget=1, window=1, unified_memory=True).close()


def own_bytes() -> int:
    """Of the host's memory, by Pss; what malloc has free is given to the kernel first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"Pss: +(\d+) kB", rollup).group(1))


def large_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)]).bfloat16()


def test_a_block_that_has_ended_gives_its_memory_back():
    """In a process of its own: what earlier tests have left there goes at any time."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        alone.submit(end_a_block).result(timeout=120)


def end_a_block() -> None:
    """Though the caller still has what it was given; the state of Adam, with the optimizer."""
    six = large_model()
    parameters = 6 * 2048 * 2048
    small = model()
    for each in (small, six):  # what torch itself takes is there after that
        with stream_layers(small, list(small), "cpu"):
            each(torch.ones(2, each[0].in_features).bfloat16()).sum().backward()
        each.zero_grad()
    before = own_bytes()
    with stream_layers(six, list(six), "cpu") as streamed:
        with HostAdamW(six.parameters(), streamed) as optimizer:
            six(torch.ones(2, 2048).bfloat16()).sum().backward()
            optimizer.step()
        assert own_bytes() - before > 13 * parameters
    after = own_bytes() - before
    assert 12 * parameters < after < 13 * parameters, f"{after / parameters:.1f} bytes each"
    del optimizer
    after = own_bytes() - before
    assert after < parameters, f"{after / parameters:.1f} bytes each are kept by {streamed}"


def test_a_pool_that_is_closed_gives_its_memory_back():
    before = own_bytes()
    offload = ActivationOffload("cpu", budget=128 * MB, window=1)
    assert own_bytes() - before > 100 * MB
    offload.close()
    assert own_bytes() - before < 10 * MB, f"it is kept by {offload}"
