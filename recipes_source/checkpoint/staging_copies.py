import mmap
import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from weakref import finalize

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

PIECE = 32 << 20  # bytes of one copy: a read of the training waits for one at most
SMALL = 1 << 20  # bytes; smaller tensors travel together
ALIGNMENT = 64  # bytes; where a tensor or a pack may start


class PinnedArena:
    """``nbytes`` > 0 of host memory, page-locked where ``device`` is a CUDA device.

    Raises:
        RuntimeError: the driver refuses to lock that much memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8).zero_()
        if device.type == "cuda":
            cuda, address = torch.cuda.cudart(), self.bytes.data_ptr()
            try:
                torch.cuda.check_error(int(cuda.cudaHostRegister(address, nbytes, 0)))
            except RuntimeError as error:
                with suppress(RuntimeError):
                    torch.ones((), device=device)  # is told of the error, in place of your kernel
                raise RuntimeError(f"cannot lock {nbytes} bytes of host memory: {error}") from error
            finalize(self, cuda.cudaHostUnregister, address)

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with the shape and dtype of ``like``, ``offset`` bytes into it."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_host_memory(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """``host``, described as ``tensor`` is: a DTensor of the same shards, or itself."""
    if not isinstance(tensor, DTensor):
        return host
    mesh, groups = tensor.device_mesh, tensor.device_mesh.get_all_groups()
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(host, mesh, tensor.placements, **shape)


def is_staged(leaf: object) -> bool:
    """Whether ``leaf`` is a dense tensor or a DTensor: those are copied beside training."""
    if type(leaf) in (torch.Tensor, nn.Parameter):
        return leaf.layout == torch.strided
    return isinstance(leaf, DTensor)


def walk(tree: object, function: Callable[[object], object]) -> object:
    """A copy of nested dicts, lists and tuples, with ``function`` applied to everything else."""
    if isinstance(tree, dict):
        return {key: walk(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [walk(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(tree)


def read(tree: object, tensors: list[torch.Tensor]) -> object:
    """``tree`` as it is now, but for what will be staged: that is added to ``tensors``."""

    def read_leaf(leaf: object) -> object:
        if is_staged(leaf):
            tensors.append(leaf)
            return leaf
        return leaf.detach().to("cpu", copy=True) if torch.is_tensor(leaf) else deepcopy(leaf)

    if isinstance(tree, Stateful):
        tree = tree.state_dict()
    if hasattr(tree, "tensors"):  # see kept_state.py: a dict that stays as it is
        tensors += tree.tensors
        return tree
    if isinstance(tree, dict):
        return {key: read(value, tensors) for key, value in tree.items()}
    return walk(tree, read_leaf)


def addresses_of(tensors: list[torch.Tensor]) -> list[int]:
    with torch.no_grad():  # where to_local() costs next to nothing
        return [shard_of(tensor).data_ptr() for tensor in tensors]


def identity(shard: torch.Tensor) -> tuple:
    """Equal for two names of the same memory, as tied weights are."""
    return shard.data_ptr(), shard.shape, shard.stride(), shard.dtype


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class CopyPlan:
    """Which bytes of ``tensors`` go where, prepared once and right as long as ``fits`` says so.

    Args:
        tensors: dense tensors or DTensors, anywhere.
        device: whose copies run beside training; what lies elsewhere is read at the save.
        changed_by_forward: tensors that forward changes in place: read at the save, too.
        snapshot_bytes: of device memory, for copies that need not be on the host before the update.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        device: torch.device,
        changed_by_forward: Iterable[torch.Tensor] = (),
        snapshot_bytes: int = 0,
    ) -> None:
        self.tensors, self.addresses = tensors, addresses_of(tensors)
        self.shards = [shard_of(tensor.detach()) for tensor in tensors]
        self.nbytes = ALIGNMENT
        self.offsets: dict[tuple, int] = {}  # in an arena, by identity
        self.snapshots: list[tuple] = []  # (copy, shard)
        self.packs: list[tuple] = []  # (one tensor of bytes, those of many small ones)
        self.in_place: list[tuple] = []  # (offset, bytes of a tensor itself)
        self.from_copies: list[tuple] = []  # (offset, bytes of a snapshot or a pack)

        changing = {shard_of(t).untyped_storage().data_ptr() for t in changed_by_forward}
        unique = {identity(shard): shard for shard in self.shards if shard.numel()}
        large, small = [], {}
        for shard in sorted(unique.values(), key=torch.Tensor.element_size, reverse=True):
            source = shard
            read_at_save = shard.untyped_storage().data_ptr() in changing or shard.device != device
            within_budget = SMALL <= shard.nbytes <= snapshot_bytes
            if read_at_save or within_budget or not shard.is_contiguous():
                source = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
                self.snapshots.append((source, shard))
                snapshot_bytes -= shard.nbytes if within_budget else 0
            group = large if shard.nbytes >= SMALL else small.setdefault(shard.device, [])
            group.append((shard, source))

        for group in small.values():
            sources = [as_bytes(source) for _, source in group]
            pack = torch.cat(sources)
            self.packs.append((pack, sources))
            offset = self.place(pack, self.from_copies)
            for shard, _ in group:  # widest elements first: each lies at a multiple of its size
                self.offsets[identity(shard)] = offset
                offset += shard.nbytes
        for shard, source in large:
            pieces = self.in_place if source is shard else self.from_copies
            self.offsets[identity(shard)] = self.place(as_bytes(source), pieces)

    def place(self, source: torch.Tensor, pieces: list[tuple]) -> int:
        """Reserve room for the bytes of ``source``, to be copied in ``pieces``; return its offset."""
        offset = self.nbytes
        self.nbytes += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        for start in range(0, source.nbytes, PIECE):
            pieces.append((offset + start, source[start : start + PIECE]))
        return offset

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors of the plan, where they were."""
        same = len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))
        return same and addresses_of(tensors) == self.addresses

    def hosts(self, arena: PinnedArena) -> list[torch.Tensor]:
        """The tensors of the plan as they will lie in ``arena``; tied ones share their memory."""
        hosts = {}
        for shard in self.shards:
            offset = self.offsets.get(identity(shard), 0)
            hosts[identity(shard)] = arena.tensor(offset, shard)
        pairs = zip(self.tensors, self.shards, strict=True)
        return [in_host_memory(tensor, hosts[identity(shard)]) for tensor, shard in pairs]

    def take_snapshots(self) -> None:
        """Queue on the current stream the copies of what cannot wait."""
        for copy, shard in self.snapshots:
            copy.copy_(shard)

    def copy_in_turns(self, arena: PinnedArena, streams, first, second) -> tuple:
        """Queue all copies to ``arena`` on two streams in turn, behind what ``first`` waits for.

        Returns:
            The event behind which an update may change the tensors, and that behind all copies.
        """
        with streams.stream(first):
            for pack, sources in self.packs:
                torch.cat(sources, out=pack)
        ended, read, copied = streams.Event(), streams.Event(), streams.Event()
        for pieces, event in ((self.in_place, read), (self.from_copies, copied)):
            for offset, source in pieces:
                with streams.stream(first):
                    host = arena.bytes[offset : offset + source.nbytes]
                    host.copy_(source, non_blocking=True)
                    ended.record(first)
                second.wait_event(ended)
                first, second = second, first
            event.record(first)
        return read, copied
