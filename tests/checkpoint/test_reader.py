"""What the reader loads is what was saved, however it lies; what is damaged is refused by name."""

import math
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kept_saves import KeptSaves
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from overlap_recipes import crew
from overlap_recipes.checkpoint import DamagedCheckpoint, Reader, entries, reader
from overlap_recipes.checkpoint.checked_files import BLOCK
from overlap_recipes.checkpoint.stores.store import step_of
from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"
STOCK = sorted((DATA / "golden_stock").iterdir())

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def loaded(directory: Path, targets: dict) -> Reader:
    own = Reader(directory)
    dcp.load(targets, storage_reader=own)
    return own


def saved(directory: Path, state: dict) -> Path:
    """A save of ours, with digests."""
    with KeptSaves(directory.parent) as saves:
        saves.save(state, step_of(directory.name))
    return directory


def damage_said(directory: Path, targets: dict) -> DamagedCheckpoint:
    with pytest.raises(CheckpointException) as raised:
        loaded(directory, targets)
    failure, _ = raised.value.failures[0]
    assert isinstance(failure, DamagedCheckpoint)
    return failure


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


IN_THE_WAY_OF_DCP = {
    "transposed": torch.randn(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
}
BY_THREADS = {
    "plain": torch.randn(40, 30),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "bool": torch.rand(9) > 0.5,
    "complex": torch.randn(5, dtype=torch.complex128),
    "float8": torch.randn(10).to(torch.float8_e4m3fn),
    "uint16": torch.tensor([1, 2, 65535]).to(torch.uint16),
    "long name" + "x" * 500: torch.randn(7),
    "part of a storage": torch.randn(50)[10:20],
    "longer than a piece": torch.randn(reader.PIECE // 4 + 1000),
}


@pytest.mark.parametrize("by", ["stock", "ours"])
@pytest.mark.parametrize("kind", [*IN_THE_WAY_OF_DCP, *BY_THREADS])
def test_each_layout_comes_back_by_the_way_that_knows_it(
    tmp_path: Path, kind: str, by: str
) -> None:
    tensor = (IN_THE_WAY_OF_DCP | BY_THREADS)[kind]
    if by == "stock":
        dcp.save({kind: tensor}, checkpoint_id=tmp_path / "step1")
    else:
        saved(tmp_path / "step1", {kind: tensor})
    target = torch.zeros(tensor.shape, dtype=tensor.dtype)
    own = loaded(tmp_path / "step1", {kind: target})
    assert bits(target) == bits(tensor)
    if kind in BY_THREADS:
        assert own.read_bytes == tensor.nbytes and own.other_bytes == 0
    elif by == "stock":
        assert own.read_bytes == 0 and own.other_bytes > 0


def test_another_type_or_stride_of_the_target_is_filled_as_dcp_does(tmp_path: Path) -> None:
    weights = torch.randn(6, 8)
    dcp.save({"wide": weights, "turned": weights}, checkpoint_id=tmp_path)
    wide = torch.zeros(6, 8, dtype=torch.float64)
    turned = torch.zeros(8, 6).t()
    own = loaded(tmp_path, {"wide": wide, "turned": turned})
    assert torch.equal(wide, weights.double()) and torch.equal(turned, weights)
    assert own.read_bytes == 0


def test_no_object_of_data_pkl_is_made() -> None:
    made = []

    class Trap:
        def __reduce__(self) -> tuple:
            return made.append, ("made",)

    import pickle

    assert entries.described_tensor(pickle.dumps(Trap())) is None
    assert entries.described_tensor(b"not a pickle") is None
    assert not made


def test_an_entry_above_4_gb_is_read_by_threads(tmp_path: Path) -> None:
    """A sparse file: only the end of the tensor has bytes of its own."""
    rows = 5 << 10
    row = 1 << 20
    last = torch.arange(row, dtype=torch.int64).to(torch.uint8)
    path = tmp_path / "__0_0.distcp"
    with torch.serialization.skip_data():
        torch.save(torch.empty(rows, row, dtype=torch.uint8), path)
    length = path.stat().st_size
    with path.open("rb") as file:
        place = entries.place_of(lambda begin, n: os.pread(file.fileno(), n, begin), length)
    assert place is not None and place.shape == (rows, row)
    with path.open("r+b") as file:
        file.seek(place.begin + (rows - 1) * row)
        file.write(last.numpy().tobytes())
    dcp.save({"x": torch.empty(1, dtype=torch.uint8)}, checkpoint_id=tmp_path / "small")
    metadata = dcp.FileSystemReader(tmp_path / "small").read_metadata()
    (stored,) = metadata.state_dict_metadata.values()
    stored.size = torch.Size([rows, row])
    stored.chunks[0].offsets = torch.Size([0, 0])
    stored.chunks[0].sizes = stored.size
    index = stored_index("x")
    metadata.storage_data = {index: _StorageInfo(path.name, 0, length)}
    own = Reader(tmp_path)
    own.set_up_storage_reader(metadata, is_coordinator=True)
    target = torch.zeros(1, row, dtype=torch.uint8)
    own.read_data(plan_of_rows(index, rows - 1, row), OneTarget(target))
    assert torch.equal(target[0], last) and own.read_bytes == row and own.other_bytes == 0


def stored_index(name: str) -> dcp.metadata.MetadataIndex:
    return dcp.metadata.MetadataIndex(name, torch.Size([0, 0]))


def plan_of_rows(index: dcp.metadata.MetadataIndex, first: int, width: int) -> dcp.LoadPlan:
    item = dcp.planner.ReadItem(
        type=dcp.planner.LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size([0, 0]),
        storage_index=index,
        storage_offsets=torch.Size([first, 0]),
        lengths=torch.Size([1, width]),
    )
    return dcp.LoadPlan([item])


class OneTarget(dcp.DefaultLoadPlanner):
    """Hands out one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item) -> torch.Tensor:
        return self.target


def test_a_file_that_is_cut_names_the_tensor_and_itself(tmp_path: Path) -> None:
    """Stock's files have no digests."""
    dcp.save({"first": torch.ones(9), "second": torch.ones(5000)}, checkpoint_id=tmp_path)
    file = tmp_path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 2000)
    said = str(damage_said(tmp_path, {"first": torch.zeros(9), "second": torch.zeros(5000)}))
    assert file.name in said and "second" in said


def test_a_storage_that_stalls_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"x": torch.ones(5000)}, checkpoint_id=tmp_path)
    gate = threading.Event()
    preadv = os.preadv

    def held(*call) -> int:
        gate.wait()
        return preadv(*call)

    monkeypatch.setattr(os, "preadv", held)
    monkeypatch.setattr(crew, "PATIENCE_S", 0.2)
    x = torch.zeros(5000)
    with pytest.raises(CheckpointException) as raised:
        loaded(tmp_path, {"x": x})
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "load":
            thread.join()
    failure, _ = raised.value.failures[0]
    assert isinstance(failure, TimeoutError) and "__0_0.distcp (x)" in str(failure)
    assert not x.any(), "what comes too late changes nothing"


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    """In a tensor, in one that DCP reads, in an object, in the list of contents, in a manifest."""
    state = {"x": torch.ones(3 * BLOCK // 4), "turned": torch.ones(4, 5).t(), "o": {"n": 1}}
    directory = saved(tmp_path / "step1", state)
    for name in ("__0_0.distcp", ".metadata", "manifest.0.json"):
        file = directory / name
        size = file.stat().st_size
        for at in (size // 2, size - 30):
            flip(file, at)
            targets = {"x": torch.zeros(3 * BLOCK // 4), "turned": torch.zeros(5, 4), "o": {"n": 0}}
            with pytest.raises(CheckpointException, match=name.replace(".", r"\.")):
                loaded(directory, targets)
            flip(file, at)
    own = loaded(directory, {"x": torch.zeros(3 * BLOCK // 4)})
    assert own.read_bytes == 3 * BLOCK


def test_contents_that_this_torch_cannot_read_are_not_taken_for_damaged(tmp_path: Path) -> None:
    """Else ``resume`` would set a later torch's checkpoint aside."""
    dcp.save({"x": torch.ones(9)}, checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"TensorProperties", b"TensorNovelties2"))
    with pytest.raises(RuntimeError, match="metadata cannot be read") as raised:
        Reader(tmp_path).read_metadata()
    assert not isinstance(raised.value, DamagedCheckpoint)


def test_what_says_where_rows_lie_is_checked_though_the_rows_lie_in_other_blocks(
    tmp_path: Path,
) -> None:
    """A flipped bit of a length would give the bytes beside those that are wanted."""
    rows = torch.arange(4 * BLOCK, dtype=torch.int64).to(torch.uint8).view(4, BLOCK)
    directory = saved(tmp_path / "step1", {"x": rows})
    index = stored_index("x")
    info = Reader(directory).read_metadata().storage_data[index]
    file = directory / info.relative_path
    entry = file.read_bytes()[info.offset : info.offset + info.length]
    place = entries.place_of(lambda begin, n: entry[begin : begin + n], len(entry))
    header = entry.rfind(b"PK\3\4", 0, place.begin)
    flip(file, info.offset + header + 28)  # how many bytes are between the name and the tensor
    own = Reader(directory)
    own.set_up_storage_reader(own.read_metadata(), is_coordinator=True)
    target = torch.zeros(1, BLOCK, dtype=torch.uint8)
    with pytest.raises(DamagedCheckpoint, match=file.name):
        own.read_data(plan_of_rows(index, 3, BLOCK), OneTarget(target))


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("golden", STOCK, ids=lambda folder: folder.name)
def test_a_checkpoint_of_dcps_own_of_another_torch_loads(golden: Path) -> None:
    """Saved on two ranks; up to 2.14 torch itself does not read what 2.15 writes."""
    expected = {
        "weight": numbers(7, 5),
        "transposed": numbers(3, 4).t(),
        "channels_last": numbers(2, 3, 4, 5),
        "bias": numbers(6).to(torch.bfloat16),
        "conjugate": torch.complex(numbers(4), -numbers(4) - 1),
    }
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    found = {**targets, "step": 0}
    own = loaded(golden, found)
    assert found["step"] == 3 and own.read_bytes == 7 * 5 * 4 + 6 * 2
    for name, tensor in expected.items():
        assert torch.equal(targets[name], tensor), name


PEAK = """
import sys, torch, torch.distributed.checkpoint as dcp, warnings
from overlap_recipes.checkpoint import Reader, reader
warnings.simplefilter("ignore")
def peak():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmHWM"].split()[0]) * 1024
small = {"x": torch.ones(1000)}
dcp.save(small, checkpoint_id=sys.argv[1] + "/small")
dcp.load(small, storage_reader=Reader(sys.argv[1] + "/small"))
state = {f"t{n}": torch.ones(6 << 20) for n in range(8)}
dcp.save(state, checkpoint_id=sys.argv[1] + "/large")
for tensor in state.values():
    tensor.zero_()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
dcp.load(state, storage_reader=Reader(sys.argv[1] + "/large"))
assert all(bool((tensor == 1).all()) for tensor in state.values())
print(peak() - before, reader.THREADS * reader.PIECE)
"""


def test_host_memory_above_the_model_is_the_rings(tmp_path: Path) -> None:
    """192 MB of state, eight buffers of 8 MiB."""
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    above, ring = map(int, done.stdout.split())
    assert ring / 2 < above < ring + (16 << 20), (above, ring)


def test_hsdp_and_tensor_parallel_load_under_each_other() -> None:
    report = run(DATA / "load_meshes.py", 4, launcher="warm", deadline_s=200)
    assert report.ok, report.describe()


class Streams:
    """Plays the streams of a device, and notes in order what waits for what."""

    class Stream:
        def __init__(self, notes: list[str], name: str) -> None:
            self.notes = notes
            self.name = name

        def wait_stream(self, other: "Streams.Stream") -> None:
            self.notes.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self, stream: object) -> None: ...

        def synchronize(self) -> None: ...

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = self.Stream(self.notes, "training")

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    def make(self, device: object = None) -> Stream:
        return Streams.Stream(self.notes, "copies")

    @contextmanager
    def stream(self, stream: Stream):
        self.notes.append(f"on {stream.name}")
        yield


def test_copies_wait_for_the_targets_and_the_loop_for_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"x": torch.ones(9)}, checkpoint_id=tmp_path)
    streams = Streams()

    class Module:
        Stream = streams.make
        Event = Streams.Event
        current_stream = streams.current_stream
        stream = streams.stream

    monkeypatch.setattr(torch, "get_device_module", lambda device=None: Module)
    loaded(tmp_path, {"x": torch.zeros(9)})
    notes = streams.notes
    assert notes[: notes.index("on copies")] == ["copies waits for training"]
    assert notes[-1] == "training waits for copies"
