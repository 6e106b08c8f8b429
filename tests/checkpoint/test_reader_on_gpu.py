"""The reader on a CUDA device: what was queued before a load does not overwrite what it loads."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kept_saves import KeptSaves
from selection import edited_module

from overlap_recipes.checkpoint import Reader, reader

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]

HELD_S = 1.0  # the copies are queued within milliseconds
MATRIX = 8192  # rows and columns
WRONG = 7.0
WAIT = "    stream.wait_stream(current)\n"


def hold(seconds: float) -> None:
    """Queue matmuls for about so many seconds (600 TFLOP/s) on the current stream."""
    factor = torch.ones(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    for _ in range(max(1, round(seconds * 600e12 / (2 * MATRIX**3)))):
        torch.mm(factor, factor, out=product)


def loaded_behind_a_kernel(
    module: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """What a load has put into targets that a kernel fills which was queued before it."""
    saved = {}
    for number in range(4):
        saved[f"x{number}"] = torch.full((3 << 20,), float(number), device="cuda")
    dcp.save(saved, checkpoint_id=root, no_dist=True)
    targets = {name: torch.empty_like(tensor) for name, tensor in saved.items()}
    dcp.load(targets, storage_reader=module.Reader(root), no_dist=True)  # loads all kernels
    hold(0.01)
    torch.cuda.synchronize()
    filled = torch.cuda.Event()
    still_held: list[bool] = []
    page_locked, hand_out = module.PageLocked, module.Ring.hand_out

    def held(*arguments: object) -> object:  # locking pages may wait for the device
        ring = page_locked(*arguments)
        hold(HELD_S)
        for target in targets.values():
            target.fill_(WRONG)
        filled.record()
        return ring

    def noted(*arguments: object) -> None:
        hand_out(*arguments)
        still_held.append(not filled.query())

    monkeypatch.setattr(module, "PageLocked", held)
    monkeypatch.setattr(module.Ring, "hand_out", noted)
    dcp.load(targets, storage_reader=module.Reader(root), no_dist=True)
    torch.cuda.synchronize()
    assert any(still_held), "the kernel had ended: nothing was tested"
    return targets


def test_a_kernel_that_was_queued_before_a_load_does_not_overwrite_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = loaded_behind_a_kernel(reader, tmp_path, monkeypatch)
    for number, tensor in enumerate(found.values()):
        assert bool((tensor == number).all())


def test_without_the_wait_it_overwrites_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = edited_module(tmp_path, "checkpoint.reader", WAIT, "")
    found = loaded_behind_a_kernel(edited, tmp_path / "saved", monkeypatch)
    assert bool((found["x0"] == WRONG).all())


def test_every_layout_comes_back_on_the_device(tmp_path: Path) -> None:
    """Through the ring and, where DCP reads, on the stream of the caller; with digests."""
    state = {
        "plain": torch.randn(5 << 20, device="cuda"),
        "rows": torch.randn(300, 70, device="cuda", dtype=torch.bfloat16),
        "turned": torch.randn(40, 30, device="cuda").t(),
        "channels_last": torch.randn(2, 3, 4, 5, device="cuda").to(
            memory_format=torch.channels_last
        ),
        "conjugate": torch.randn(4, dtype=torch.complex64, device="cuda").conj(),
        "float8": torch.randn(10, device="cuda").to(torch.float8_e4m3fn),
        "on the host": torch.randn(9),
        "step": torch.tensor(3.0, device="cuda"),
    }
    ours = tmp_path / "step1"
    with KeptSaves(tmp_path, torch.device("cuda", torch.cuda.current_device())) as saves:
        saves.save(state, 1)
    stock = tmp_path / "stock"
    dcp.save(state, checkpoint_id=stock, no_dist=True)
    for directory in (ours, stock):
        targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        own = Reader(directory)
        dcp.load(targets, storage_reader=own, no_dist=True)
        for name, tensor in state.items():
            assert torch.equal(bits(targets[name]), bits(tensor)), (directory.name, name)
        assert own.read_bytes >= state["plain"].nbytes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    return plain.reshape(-1).view(torch.uint8)
