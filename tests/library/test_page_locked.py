"""Page-locked memory: exact, zeroed, locked once, unlocked once, and survives a bare kernel.

The driver is played by ``Driver``, which notes what it is asked for.
"""

import gc
import mmap

import pytest
import torch

from overlap_recipes.page_locked import PageLocked

CUDA = torch.device("cuda")
ODD = 3 * 4096 + 5  # bytes: no whole number of pages, no power of two


class Driver:
    """What the CUDA runtime is asked for, in order; ``refuses`` is the error that it returns."""

    cudaError = int

    def __init__(self) -> None:
        self.refuses = 0
        self.calls: list[tuple] = []

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("lock", address, nbytes))
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unlock", address))
        return 0


@pytest.fixture
def driver(monkeypatch) -> Driver:
    played = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: played)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # a kernel that meets the error
    return played


def test_exactly_what_is_asked_for_is_locked_and_unlocked_once(driver) -> None:
    memory = PageLocked(ODD, CUDA)
    address = memory.bytes.data_ptr()
    assert driver.calls == [("lock", address, ODD)]
    assert memory.bytes.nbytes == ODD and not memory.bytes.any()
    memory.close()
    memory.close()
    assert driver.calls[1:] == [("unlock", address)]


def test_memory_that_is_collected_is_unlocked_and_lives_as_long_as_a_tensor_uses_it(driver) -> None:
    memory = PageLocked(ODD, CUDA)
    tensor = memory.bytes
    del memory
    gc.collect()
    assert driver.calls[-1] == ("unlock", tensor.data_ptr())
    tensor.fill_(7)


def test_a_refusal_of_the_driver_is_raised_and_nothing_unlocked(driver) -> None:
    driver.refuses = 2
    told = rf"cannot lock {ODD} more bytes .*CUDA error 2: out of memory"
    with pytest.raises(RuntimeError, match=told):
        PageLocked(ODD, CUDA)
    assert [call[0] for call in driver.calls] == ["lock"]


def test_a_kernel_without_huge_pages_gives_small_ones_and_children_share_none(
    driver, monkeypatch
) -> None:
    advice = []

    class BareKernel(mmap.mmap):
        def madvise(self, option: int, *range_: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")
            advice.append(option)

    monkeypatch.setattr(mmap, "mmap", BareKernel)
    PageLocked(ODD, CUDA).close()
    assert mmap.MADV_DONTFORK in advice


def test_copies_from_the_device_that_is_there_arrive() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    memory = PageLocked(ODD, device)
    source = torch.arange(ODD, device=device).to(torch.uint8)
    memory.bytes.copy_(source, non_blocking=True)
    torch.get_device_module(device).synchronize()
    assert torch.equal(memory.bytes, source.cpu())
    assert memory.bytes.is_pinned() == (device.type == "cuda")
    memory.close()
    assert PageLocked(0, device).bytes.nbytes == 0
