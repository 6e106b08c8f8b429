"""What a host has left is asked before the kernel ends the job."""

import pytest
import torch
from torch import nn

from overlap_recipes.offload import HostAdamW, host_memory, stream_layers, streaming

GB = 10**9


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
        ({"available": 2, "cgroup": "0::/elsewhere\n"}, 2048),
    ],
)
def test_the_least_of_what_is_said_counts(tmp_path, options, free):
    assert host_memory.free_bytes(host(tmp_path, **options)) == free


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).bfloat16()


LAYER = 64 * 64 + 64  # parameters


def test_layers_that_do_not_fit_are_refused(monkeypatch):
    """Their gradients are new; the weights are there already."""
    three = model()
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 3 * 2 * LAYER - 1)
    told = "weights and gradients of layers take .* GB of host memory, and .* left.*budget"
    with pytest.raises(RuntimeError, match=told), stream_layers(three, list(three), "cpu"):
        pass
    with stream_layers(three, list(three)[1:], "cpu"):
        pass


@pytest.mark.parametrize("is_held", [True, False])
def test_an_optimizer_that_does_not_fit_is_refused(monkeypatch, is_held):
    """It was ended by SIGKILL, where an earlier one of the model was held yet."""
    three = model()
    with stream_layers(three, list(three), "cpu") as streamed:
        with HostAdamW(three.parameters(), streamed) as first:
            pass
        if not is_held:
            del first
        monkeypatch.setattr(host_memory, "free_bytes", lambda: 3 * 12 * LAYER - 1)
        told = "masters and moments of layers take .* GB of host memory"
        if is_held:
            told += ".*an earlier HostAdamW of this model is held yet: del it"
        with pytest.raises(RuntimeError, match=told) as refused:
            HostAdamW(three.parameters(), streamed)
        assert is_held or "earlier" not in str(refused.value)
        monkeypatch.setattr(host_memory, "free_bytes", lambda: 3 * 12 * LAYER)
        with HostAdamW(three.parameters(), streamed):
            pass


def test_ranks_of_a_host_take_its_memory_together(monkeypatch):
    three = model()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 2 * 3 * 2 * LAYER - 1)
    with pytest.raises(RuntimeError, match="take"), stream_layers(three, list(three), "cpu"):
        pass


def test_a_device_that_shares_the_hosts_memory_is_refused(monkeypatch):
    """There streaming costs time and memory, and gives none."""
    three = model()
    monkeypatch.setattr(streaming, "has_unified_memory", lambda device: True)
    with (
        pytest.raises(RuntimeError, match="shares the host's memory.*unified_memory=True"),
        stream_layers(three, list(three), "cpu"),
    ):
        pass
    with stream_layers(three, list(three), "cpu", unified_memory=True):
        assert torch.isfinite(three(torch.ones(2, 64).bfloat16())).all()
