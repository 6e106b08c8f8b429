"""Operators: what each reads and writes, on which lane it runs, and whether its caller waits."""

import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode

from rankproof.imports import called_by_recipe
from rankproof.streams.accesses import new_access
from rankproof.streams.lanes import HostThread
from rankproof.streams.lines import DISPATCHERS
from rankproof.streams.memory import Region
from rankproof.streams.places import copy_of, look_at
from rankproof.streams.recorder import Recorder, is_seen

NO_ACCESS = {"set_", "resize_", "resize_as_", "detach", "detach_", "is_pinned", "wait_tensor"}
RESIZES = ("resize_", "resize_as_")
COPIES = ("copy_", "_to_copy")
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
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout == torch.jagged else ()


def plain_tensors_in(value: object) -> list[torch.Tensor]:
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return [value]
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
        shield_from_dynamo(recorder)
        return plain_compile(model, **options)

    recorder.replace(torch, "compile", compile_in_parts)


def shield_from_dynamo(recorder: Recorder) -> None:
    """Have torch not compile the recorder inside of what it compiles.

    The shield costs each operator three calls, so it is not there before it is needed.
    """
    if not recorder.is_shielded:
        recorder.is_shielded = True
        shielded = torch._disable_dynamo(OrderMode.__torch_dispatch__)
        recorder.replace(OrderMode, "__torch_dispatch__", shielded)


class Operator:
    """What is asked of an operator at each of its calls, found out once."""

    def __init__(self, func: Callable) -> None:
        self.func = func  # kept: it is looked up by its address
        self.call = func._op if type(func) is OpOverload else func  # what func itself calls
        self.is_higher_order = isinstance(func, HigherOrderOperator)
        if self.is_higher_order:  # it has no schema
            self.name = func.name()
            self.resizes = False
            self.allocates = False
            self.copies_each = False
            self.touches = True
            self.is_collective = False
            self.may_copy = False
            self.may_read_value = False
            self.makes = True
            return
        self.name = func._schema.name.partition("::")[2]
        self.resizes = self.name in RESIZES
        self.allocates = self.name.startswith(("empty", "new_empty"))
        self.copies_each = self.name == "_foreach_copy_"
        self.touches = not func.is_view and self.name not in NO_ACCESS
        self.is_collective = func.namespace == "c10d"
        self.may_copy = self.name in COPIES
        self.may_read_value = self.name in HOST_WAITS
        self.makes = any(result.alias_info is None for result in func._schema.returns)
        self.training = None  # where it is told whether averages are written
        self.arguments = []  # that may hold tensors: position, name, whether it is written
        for index, argument in enumerate(func._schema.arguments):
            if argument.name == "training" and self.name in BATCH_NORMS:
                self.training = index
            if not is_number(argument):
                self.arguments.append((index, argument.name, is_written(func, argument)))

    def given(self, args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, bool]]:
        """Each tensor of a call, and whether it is written."""
        if self.is_higher_order:
            return [(tensor, False) for tensor in plain_tensors_in([args, kwargs])]
        found = []
        positional = len(args)
        for index, name, writes in self.arguments:
            value = args[index] if index < positional else kwargs.get(name)
            if self.training is not None and name in AVERAGES and self.is_evaluation(args, kwargs):
                writes = False
            if type(value) in PLAIN and value.layout is torch.strided:
                found.append((value, writes))
            elif type(value) is list and PLAIN.issuperset(map(type, value)):
                found += [(tensor, writes) for item in value for tensor in stored_parts(item)]
            elif value is not None:
                found += [(tensor, writes) for tensor in tensors_in(value)]
        return found

    def is_evaluation(self, args: tuple, kwargs: dict) -> bool:
        """Whether a batch norm only reads its averages."""
        if self.training is None:
            return False
        given = args[self.training] if self.training < len(args) else kwargs.get("training")
        return given is False


OPERATORS: dict[int, Operator] = {}  # by their addresses: torch's hash of one is slow


def operator_of(func: Callable) -> Operator:
    operator = OPERATORS.get(id(func))
    if operator is None:
        operator = OPERATORS[id(func)] = Operator(func)
    return operator


def is_number(argument) -> bool:
    """Whether an argument of an operator can hold no tensor."""
    kind = str(argument.type).replace("Optional[", "").replace("List[", "").rstrip("]")
    return kind in ("int", "float", "bool", "number", "complex", "str", "Device", "Generator")


def is_written(func: Callable, argument) -> bool:
    """Whether an operator writes an argument; a batch norm its averages in training alone."""
    if func.namespace in UNANNOTATED:
        return "out" in argument.name or argument.name in ("tensor", "tensors", "self")
    name = func._schema.name.partition("::")[2]
    if name in BATCH_NORMS and argument.name in AVERAGES:
        return True
    return argument.alias_info is not None and argument.alias_info.is_write


class OrderMode(TorchDispatchMode):
    """Gives the recorder every read and write of plain tensors; subclasses are unwrapped first."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not before the script compiles something: see ``shield_from_dynamo``."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.is_forked or (types and has_no_memory(types)):
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types):
            return NotImplemented
        operator = OPERATORS.get(id(func)) or operator_of(func)
        if operator.resizes and args[0].layout == torch.strided:
            with recorder.resizing(args[0].untyped_storage()):
                return func(*args, **kwargs)
        result = operator.call(*args, **kwargs)
        if operator.allocates:
            self.note_allocated(result)
        elif operator.copies_each:
            self.note_each_copy(args, kwargs)
        elif operator.touches:
            self.note(operator, args, kwargs, result)
        return result

    def note_allocated(self, result: object) -> None:
        recorder = self.recorder
        current = recorder.this_thread().current
        with recorder.lock:
            for tensor in plain_tensors_in(result):
                if is_seen(tensor):
                    recorder.allocated(recorder.region_of(tensor), current)

    def note_each_copy(self, args: tuple, kwargs: dict) -> None:
        """One by one, since some pairs may be the device's and others the host's."""
        copy = operator_of(torch.ops.aten.copy_.default)
        targets, sources, *others = args
        for target, source in zip(targets, sources, strict=True):
            self.note(copy, (target, source, *others), kwargs, target)

    def note(self, operator: Operator, args: tuple, kwargs: dict, result: object) -> None:
        """Launch the operator on its lane, note what it touches, and let its caller wait for it."""
        recorder = self.recorder
        host = recorder.this_thread()
        line = host.line()
        name = operator.name
        given = operator.given(args, kwargs)
        copy = copy_of(name, args, kwargs) if operator.may_copy else None
        waits = copy is not None and copy.waits
        reads_value = operator.may_read_value and called_by_recipe(DISPATCHERS)
        with recorder.lock:
            inputs = []
            known = []
            regions = []
            for tensor, writes in given:
                seen = recorder.seen(tensor)
                if seen is None:
                    continue
                region, place = seen
                inputs.append((tensor, region, place, writes))
                known.append(region)
                if tensor.dim():
                    regions.append(region)
            places = look_at(regions, copy)
            is_transfer = copy is not None and places.are_both
            by_host = places.host and not is_transfer and not host.collective
            if reads_value and given and all(recorder.is_read_by_host(t) for t, _ in given):
                by_host = True
            elif by_host and places.device:
                host.learn(host.current.clock)
            leads_home = waits and (copy.names_device or is_transfer)
            if waits and is_in_turn(host, leads_home):
                host.wait_for_current_stream()
            if by_host or (host.makes_host_values and not given):
                lane = host
            else:
                lane = host.current
            collective = host.collective
            if collective:
                lane = collective.lane
                name = collective.name
                collective.blocks_host |= places.host
            lane.launch(host)
            time = lane.clock[lane.lane]
            brings = copy is not None and not waits and not places.host
            recorder.copies += brings or (is_transfer and not waits)
            for tensor, region, place, writes in inputs:
                if by_host and is_hosts_value(recorder, tensor, region):
                    continue
                if operator.is_collective and collective:
                    writes = writes and not collective.only_reads
                arrives = brings and writes
                fields = (name, writes, line, lane, time, place, collective, arrives)
                recorder.touch(region, new_access(fields))
            for tensor in plain_tensors_in(result) if operator.makes else ():
                seen = recorder.seen(tensor)
                if seen is None or seen[0] in known:
                    continue
                region, place = seen
                recorder.allocated(region, lane)
                fields = (name, True, line, lane, time, place, collective, brings)
                recorder.touch(region, new_access(fields))
                region.on_host |= by_host
                if copy is None and regions and not places.device:
                    region.made_by_host = True
            if reads_value or leads_home or (waits and is_in_staging()):
                host.learn(lane.clock)


def is_hosts_value(recorder: Recorder, tensor: torch.Tensor, region: Region) -> bool:
    """Whether the host, which runs an operator, has had ``tensor`` ready before."""
    if tensor.dim() == 0:
        return not recorder.is_read_by_host(tensor)
    return region.made_by_host and not region.on_host


def has_no_memory(types: tuple[type, ...]) -> bool:
    return any(issubclass(kind, WITHOUT_MEMORY) for kind in types)


def is_in_turn(host: HostThread, leads_home: bool) -> bool:
    """Whether a copy that blocks comes after what the default stream had queued before."""
    if host.copies_in_turn:
        return True
    in_no_stream = host.current is host
    return leads_home and in_no_stream and not is_in_staging()


def is_in_staging() -> bool:
    """Whether torch's staging code, which waits for its copies, has called."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_staging(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@cache
def is_staging(file: str) -> bool:
    return file.endswith(STAGING_FILES)
