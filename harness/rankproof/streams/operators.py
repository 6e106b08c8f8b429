"""Operators: what each reads and writes, on which lane it runs, and whether its caller waits."""

from collections.abc import Callable, Iterator
from functools import cache, wraps

import torch
from torch._ops import HigherOrderOperator, OpOverloadPacket, _OpNamespace
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode

from rankproof.imports import called_by_recipe, frames
from rankproof.streams.lanes import HostThread, Stream
from rankproof.streams.lines import DISPATCHERS
from rankproof.streams.recorder import Recorder

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
        with recorder.lock:
            # Beside host memory, one of no dimensions (Adam's step count) is the host's as well.
            on_host = [recorder.on_host(tensor) for tensor in inputs if tensor.dim() > 0]
            touches_host = any(on_host)
            touches_device = not all(on_host)
            is_transfer = name == "copy_" and touches_host and touches_device
            collective = host.collective
            by_host = touches_host and not is_transfer and not collective
            lane = lane_of(host, inputs, by_host)
            if collective:
                lane = collective.lane
                name = collective.name
                collective.blocks_host |= touches_host
            if by_host and touches_device:
                host.learn(host.current.clock)
            lane.launch(host)
            touched = set()
            for tensor, writes in touched_inputs(func, args, kwargs):
                touched.add(tensor.untyped_storage()._cdata)
                if not (by_host and tensor.dim() == 0):
                    if collective and func.namespace == "c10d":
                        writes = writes and not collective.only_reads
                    recorder.access(name, tensor, writes, lane, where, collective)
            for tensor in plain_tensors_in(result):
                if tensor.untyped_storage()._cdata not in touched:
                    recorder.allocated(tensor, lane)
                    recorder.access(name, tensor, True, lane, where)
                    if by_host:
                        recorder.region_of(tensor).on_host = True
            reads_value = name in HOST_WAITS and called_by_recipe(DISPATCHERS)
            if reads_value or (is_blocking_copy(name, args, kwargs) and waits_for(touches_host)):
                host.learn(lane.clock)


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


def is_blocking_copy(name: str, args: tuple, kwargs: dict) -> bool:
    third = args[2] if len(args) > 2 else False
    return name == "copy_" and not kwargs.get("non_blocking", third)


def waits_for(touches_host: bool) -> bool:
    """Whether a thread waits for a blocking copy: for transfers, and in torch's staging code."""
    return touches_host or any(is_staging(frame.f_code.co_filename) for frame in frames())


@cache
def is_staging(file: str) -> bool:
    return file.endswith(STAGING_FILES)
