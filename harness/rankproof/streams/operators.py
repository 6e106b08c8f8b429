"""Operators: what each reads and writes, on which lane it runs, and whether its caller waits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps

import torch
from torch._ops import HigherOrderOperator, OpOverloadPacket, _OpNamespace
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode

from rankproof.imports import called_by_recipe, frames
from rankproof.streams.lanes import Collective, HostThread, Stream
from rankproof.streams.lines import DISPATCHERS
from rankproof.streams.places import copy_of, look_at
from rankproof.streams.recorder import Recorder, is_seen

NO_ACCESS = {"set_", "resize_", "resize_as_", "detach", "detach_", "is_pinned", "wait_tensor"}
RESIZES = {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default}
HOST_WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")
STAGING_FILES = ("_state_dict_utils.py", "_state_dict_stager.py")
UNANNOTATED = ("c10d", "fsdp")  # their schemas do not mark what is written
BATCH_NORMS = {  # nor do theirs: in training they write the running averages
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "batch_norm_update_stats",
    "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
}
AVERAGES = ("running_mean", "running_var")
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
WITHOUT_MEMORY = (FakeTensor, UninitializedTensorMixin)  # shapes only, or not even these


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors that have a storage in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield from stored_parts(value)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def stored_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensor``, or the parts of a sparse one; nothing of one whose memory has no address."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    has_storage = tensor.layout in (torch.strided, torch.jagged)
    return (tensor,) if has_storage else ()


def plain_tensors_in(value: object) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if type(tensor) in PLAIN]


def make_each_operator_once(recorder: Recorder) -> None:
    """Have one thread at a time make the operators of ``torch.ops``.

    A mode is handed operators, which torch (2.9 to 2.15) makes at their first use, without a lock.
    Two threads may make one each. ``torch.ops`` holds the last, while the dispatcher may keep a
    bare pointer to the other: once that is collected, the next use ends the process by SIGSEGV.
    Up to 2.12 the slower thread's use raises "INTERNAL ASSERT FAILED".
    """
    for owner in (_OpNamespace, OpOverloadPacket):
        recorder.replace(owner, "__getattr__", made_once(owner.__getattr__, recorder))


def made_once(make: Callable, recorder: Recorder) -> Callable:
    """A ``__getattr__`` that looks again, behind a lock, before it calls ``make``."""

    def found_or_made(owner: object, name: str) -> object:
        with recorder.makes_operator:
            made_meanwhile = vars(owner).get(name)
            if made_meanwhile is not None:
                return made_meanwhile
            return make(owner, name)

    return found_or_made


def allow_graph_breaks(recorder: Recorder) -> None:
    """Have ``torch.compile`` run functions as they are: under a mode, it refuses ``fullgraph``."""
    plain_compile = torch.compile

    @wraps(plain_compile)
    def compile_in_parts(model=None, *, fullgraph=False, **options):
        return plain_compile(model, **options)

    recorder.replace(torch, "compile", compile_in_parts)


class OrderMode(TorchDispatchMode):
    """Gives the recorder every read and write of plain tensors; subclasses are unwrapped first."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.recorder.is_forked or has_no_memory(types):
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types):
            return NotImplemented
        if func in RESIZES and args[0].layout == torch.strided:
            with self.recorder.resizing(args[0].untyped_storage()):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            self.note(func, func.name(), args, kwargs, result)
            return result
        name = func._schema.name.partition("::")[2]
        if name == "_foreach_copy_":
            self.note_each_copy(args, kwargs)
        elif name.startswith(("empty", "new_empty")):
            for tensor in plain_tensors_in(result):
                self.recorder.allocated(tensor, self.recorder.this_thread().current)
        elif not func.is_view and name not in NO_ACCESS:
            self.note(func, name, args, kwargs, result)
        return result

    def note_each_copy(self, args: tuple, kwargs: dict) -> None:
        """One by one, since some pairs may be the device's and others the host's."""
        targets, sources, *others = args
        for target, source in zip(targets, sources, strict=True):
            copy_args = (target, source, *others)
            self.note(torch.ops.aten.copy_.default, "copy_", copy_args, kwargs, target)

    def note(self, func, name: str, args: tuple, kwargs: dict, result: object) -> None:
        """Launch the operator on its lane, note what it touches, and let its caller wait for it."""
        recorder = self.recorder
        host = recorder.this_thread()
        where = host.line()
        inputs = list(tensors_in([args, kwargs]))
        copy = copy_of(name, args, kwargs)
        waits = copy is not None and copy.waits
        reads_value = name in HOST_WAITS and called_by_recipe(DISPATCHERS)
        with recorder.lock:
            places = look_at(recorder, inputs, copy)
            is_transfer = copy is not None and places.are_both
            by_host = places.host and not is_transfer and not host.collective
            if reads_value and inputs and all(map(recorder.is_read_by_host, inputs)):
                by_host = True
            elif by_host and places.device:
                host.learn(host.current.clock)
            leads_home = waits and (copy.names_device or is_transfer)
            if is_in_turn(host, waits, leads_home):
                host.wait_for_current_stream()
            lane = lane_of(host, inputs, by_host)
            if host.collective:
                lane = host.collective.lane
                name = host.collective.name
                host.collective.blocks_host |= places.host
            lane.launch(host)
            brings = copy is not None and not waits and not places.host
            noted = Noted(name, lane, where, host.collective, by_host, is_copy=copy is not None)
            touched = self.note_inputs(func, args, kwargs, noted, brings)
            self.note_result(result, touched, noted, inputs, brings)
            if reads_value or leads_home or (waits and is_in_staging()):
                host.learn(lane.clock)

    def note_inputs(self, func, args, kwargs, noted: "Noted", brings: bool) -> set[int]:
        """Note what the operator is given; returns the storages."""
        recorder = self.recorder
        touched = set()
        for tensor, writes in touched_inputs(func, args, kwargs):
            touched.add(tensor.untyped_storage()._cdata)
            if noted.by_host and noted.is_hosts_value(recorder, tensor):
                continue
            if noted.collective and func.namespace == "c10d":
                writes = writes and not noted.collective.only_reads
            recorder.access(
                noted.name,
                tensor,
                writes,
                noted.lane,
                noted.where,
                noted.collective,
                arrives=brings and writes,
            )
        return touched

    def note_result(
        self, result: object, touched: set[int], noted: "Noted", inputs: list, brings: bool
    ) -> None:
        """Note what is new of it."""
        recorder = self.recorder
        of_host = not noted.is_copy and recorder.may_all_be_host(inputs)
        for tensor in plain_tensors_in(result):
            if tensor.untyped_storage()._cdata in touched:
                continue
            recorder.allocated(tensor, noted.lane)
            recorder.access(noted.name, tensor, True, noted.lane, noted.where, arrives=brings)
            region = recorder.region_of(tensor)
            region.on_host |= noted.by_host
            region.made_by_host |= of_host


@dataclass(frozen=True)
class Noted:
    """An operator as it is noted: which, where, and by whom."""

    name: str
    lane: Stream
    where: str
    collective: Collective | None
    by_host: bool
    is_copy: bool

    def is_hosts_value(self, recorder: Recorder, tensor: torch.Tensor) -> bool:
        """Whether the host, which runs this, has had ``tensor`` ready before."""
        if tensor.dim() == 0:
            return not recorder.is_read_by_host(tensor)
        region = recorder.region_of(tensor) if is_seen(tensor) else None
        return region is not None and region.made_by_host and not region.on_host


def has_no_memory(types: tuple[type, ...]) -> bool:
    return any(issubclass(kind, WITHOUT_MEMORY) for kind in types)


def lane_of(host: HostThread, inputs: list[torch.Tensor], by_host: bool) -> Stream:
    """The lane that an operator of thread ``host`` runs on."""
    makes_host_value = host.makes_host_values and not inputs
    return host if by_host or makes_host_value else host.current


def touched_inputs(func, args: tuple, kwargs: dict) -> Iterator[tuple[torch.Tensor, bool]]:
    """Each tensor that an operator is given, and whether it writes it."""
    if isinstance(func, HigherOrderOperator):  # it has no schema
        for tensor in plain_tensors_in([args, kwargs]):
            yield tensor, False
        return
    values = {}
    for index, argument in enumerate(func._schema.arguments):
        is_given = index < len(args)
        values[argument.name] = args[index] if is_given else kwargs.get(argument.name)
    for argument in func._schema.arguments:
        for tensor in tensors_in(values[argument.name]):
            yield tensor, is_written(func, argument, values)


def is_written(func, argument, values: dict[str, object]) -> bool:
    """``values``: what the operator is given, by the names of its arguments."""
    if func.namespace in UNANNOTATED:
        return "out" in argument.name or argument.name in ("tensor", "tensors", "self")
    name = func._schema.name.partition("::")[2]
    if name in BATCH_NORMS and argument.name in AVERAGES:
        return values.get("training") is not False
    return argument.alias_info is not None and argument.alias_info.is_write


def is_in_turn(host: HostThread, waits: bool, leads_home: bool) -> bool:
    """Whether a thread's copy comes after what the default stream had queued before."""
    if host.copies_in_turn:
        return waits
    in_no_stream = host.current is host
    return leads_home and in_no_stream and not is_in_staging()


def is_in_staging() -> bool:
    """Whether torch's staging code, which waits for its copies, has called."""
    return any(is_staging(frame.f_code.co_filename) for frame in frames())


@cache
def is_staging(file: str) -> bool:
    return file.endswith(STAGING_FILES)
