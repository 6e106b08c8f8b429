"""The host's memory: what is moved there, how it lies, and what cannot be locked."""

import gc

import pytest
import torch
from host_training import CPU, linear

from overlap_recipes.offload.host_layers import HostBuffer, move_to_host
from overlap_recipes.offload.weight_streaming import StreamedLayers

CUDA = torch.device("cuda")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("current", [0, 2])
def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch, current):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    with pytest.raises(ValueError, match="make cuda:1 current: .*set_device_index"):
        StreamedLayers([linear(8, 8)], torch.device("cuda:1"))


def test_more_memory_than_the_host_can_map_is_refused():
    like = {"weight": torch.empty(2**58, device="meta")}
    with pytest.raises(RuntimeError, match=f"cannot lock {2**60} more bytes.*free some"):
        HostBuffer(like, torch.float32, CPU)


def test_memory_that_cannot_be_locked_is_refused_and_the_rest_unlocked(monkeypatch):
    locked, launched = [], []

    class Driver:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            locked.append(address)
            return 2 if len(locked) > 3 else 0

        cudaError = int

        def cudaGetErrorString(self, error: int) -> str:
            return "out of memory"

        def cudaHostUnregister(self, address: int) -> None:
            locked.remove(address)

    def launch(size: tuple, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("the error before, reported by this kernel")

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch, "ones", launch)
    told = "cannot lock .* more bytes .*CUDA error 2: out of memory.*keep fewer layers"
    with pytest.raises(RuntimeError, match=told) as refused:
        move_to_host([linear(8, 8), linear(8, 8)], CUDA)
    assert len(locked) == 1, "only the address that was refused may be left in the list"
    assert launched == [CUDA], "the reader's next kernel will report the error"
    assert refused.tb, "the frames were meant to be alive"
    gc.collect()
