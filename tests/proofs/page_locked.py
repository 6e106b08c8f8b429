"""Page-locked memory: exact, zeroed, locked once, unlocked once, and survives a bare kernel.

The driver is played by ``Driver``, which notes what it is asked for: so every rank proves on a CPU
what a GPU would be asked. On a CUDA device a copy is made as well, which must not block the host.
"""

import gc
import mmap

import torch

from overlap_recipes.page_locked import PageLocked

CUDA = torch.device("cuda")
ODD = 3 * 4096 + 5  # bytes: no whole number of pages, no power of two


class Driver:
    """What the CUDA runtime is asked for, in order; ``refuses`` is the error that it returns."""

    cudaError = int

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.calls: list[tuple] = []

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("lock", address, nbytes))
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unlock", address))
        return 0


class BareKernel(mmap.mmap):
    """Memory of a kernel without huge pages; notes the other advice."""

    advice: list[int] = []

    def madvise(self, option: int, *range_: int) -> None:
        if option == mmap.MADV_HUGEPAGE:
            raise OSError(22, "Invalid argument")
        self.advice.append(option)


def with_driver(driver: Driver, nbytes: int) -> PageLocked:
    cudart = torch.cuda.cudart
    torch.cuda.cudart = lambda: driver
    try:
        return PageLocked(nbytes, CUDA)
    finally:
        torch.cuda.cudart = cudart


def prove_locked_and_unlocked_once() -> None:
    driver = Driver()
    memory = with_driver(driver, ODD)
    address = memory.bytes.data_ptr()
    assert driver.calls == [("lock", address, ODD)], "not exactly the bytes that were asked for"
    assert memory.bytes.nbytes == ODD and not memory.bytes.any(), "not exact, or not zeros"
    memory.close()
    memory.close()
    assert driver.calls[1:] == [("unlock", address)], "not unlocked exactly once"

    kept = with_driver(driver, ODD)
    tensor = kept.bytes
    del kept
    gc.collect()
    assert driver.calls[-1] == ("unlock", tensor.data_ptr()), "collected, and still locked"
    tensor.fill_(7)  # lives as long as a tensor uses it
    print("locked and unlocked once, to the byte")


def prove_refusals() -> None:
    driver = Driver(refuses=2)
    try:
        with_driver(driver, ODD)
    except RuntimeError as error:
        said = str(error)
    else:
        raise AssertionError("a refusal of the driver was not raised")
    assert f"cannot lock {ODD} more bytes" in said and "CUDA error 2: out of memory" in said, said
    assert [call[0] for call in driver.calls] == ["lock"], "unlocked what was not locked"
    print(f"a refusal: {said}")


def prove_bare_kernel() -> None:
    real = mmap.mmap
    mmap.mmap = BareKernel
    try:
        memory = with_driver(Driver(), ODD)
    finally:
        mmap.mmap = real
    assert mmap.MADV_DONTFORK in BareKernel.advice, "a forked child would share the pages"
    memory.close()
    print("survives a kernel without huge pages")


def prove_copies(device: torch.device) -> None:
    """On the device that is there; without one, as ordinary memory."""
    memory = PageLocked(ODD, device)
    source = torch.arange(ODD, device=device).to(torch.uint8)
    memory.bytes.copy_(source, non_blocking=True)
    torch.get_device_module(device).synchronize()
    assert torch.equal(memory.bytes, source.cpu()), "a copy holds other bits"
    assert memory.bytes.is_pinned() == (device.type == "cuda")
    memory.close()
    assert PageLocked(0, device).bytes.nbytes == 0, "no bytes are a size, too"
    print(f"copies from {device.type} arrive")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    prove_locked_and_unlocked_once()
    prove_refusals()
    prove_bare_kernel()
    prove_copies(device)


if __name__ == "__main__":
    main()
