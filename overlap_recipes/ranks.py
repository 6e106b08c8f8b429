# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/ranks.py
"""How a script joins the ranks of its job, and how ranks tell each other what they have."""

import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

LEAST_WAIT = timedelta(minutes=10)  # of a rank for the others: a storage may keep one of them
Value = TypeVar("Value")


def start_rank(run: str = "") -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device.

    The group has one backend: the accelerator's, NCCL where there are GPUs, and gloo without one.

    Args:
        run: a name, where one torchrun starts several groups after each other: the keys that one
            that was killed has left in the store are not the next one's.
    """
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://"))
        if run:
            store = dist.PrefixStore(run, store)
    else:
        store, rank, ranks = dist.HashStore(), 0, 1
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = torch.device("cpu")
    else:
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(store=store, rank=rank, world_size=ranks)
    return device


def own_rank(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number in ``group``; 0 in a job without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks ``group`` has; 1 in a job without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def wait_of_ranks() -> timedelta:
    """How long a rank waits for the others: as ``init_process_group`` was told, 10 min at least."""
    waits = [LEAST_WAIT]
    group = dist.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:  # of gloo and NCCL
            waits.append(options._timeout)
    return max(waits)


def keep_quiet_alone() -> None:
    """Let DCP not warn that there is no process group: under ``-W error`` nothing would be saved.

    The filter stays: to take it back would change the filters of other threads.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def on_all_ranks(work: Callable[[], Value], group: dist.ProcessGroup | None = None) -> list[Value]:
    """Call ``work`` on all ranks of ``group``; return what it has returned on each, by rank.

    Raises:
        Exception: on all ranks, if ``work`` has failed on one. What has failed alike on all of them
            is raised as it is. Otherwise the text names each rank that has failed, and its cause,
            ``rank 1: OSError: No space left``; the error is of the class of the first of them, or a
            ``RuntimeError`` where that class is not made of a text alone.
    """
    own = _Report()
    own_error = None
    try:
        own = _Report(value=pickle.dumps(work()))
    except BaseException as error:  # the other ranks wait, whatever it is
        own_error = error
        own = _failed(error)
    reports = [own]
    if dist.is_initialized():
        reports = [own] * dist.get_world_size(group)
        dist.all_gather_object(reports, own, group=group)
    failed = [rank for rank, report in enumerate(reports) if report.kind is not None]
    if not failed:
        return [pickle.loads(report.value) for report in reports]
    if own_error is not None and reports.count(own) == len(reports):
        raise own_error
    if isinstance(own_error, (KeyboardInterrupt, SystemExit)):  # for the rank alone that has them
        raise own_error
    causes = [f"rank {rank}: {reports[rank].name}: {reports[rank].text}" for rank in failed]
    raise reports[failed[0]].kind("; ".join(causes)) from own_error


def on_first_rank(work: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """What ``work`` returns on rank 0, on all ranks; it is called there alone.

    Raises:
        Exception: on all ranks, if it has failed; as ``on_all_ranks``.
    """

    def work_if_first() -> Value | None:
        return work() if own_rank(group) == 0 else None

    return on_all_ranks(work_if_first, group)[0]


def own_result(work: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """What ``work`` returns here, once it has gone well on all ranks; raises as ``on_all_ranks``.

    For results that are large, or of this rank alone: they are not sent.
    """
    results: list[Value] = []

    def keep_result() -> None:
        results.append(work())

    on_all_ranks(keep_result, group)
    return results[0]


@dataclass(frozen=True)
class _Report:
    """How work has gone on a rank.

    Attributes:
        value: what it has returned, pickled.
        kind: the class that an error is raised as; None if there is none.
        name: of the error's own class.
        text: what the error says.
    """

    value: bytes = b""
    kind: type[Exception] | None = None
    name: str = ""
    text: str = ""


def _failed(error: BaseException) -> _Report:
    kind = type(error)
    text = str(error)
    if not _is_made_of_text(kind, text):
        kind = RuntimeError
    return _Report(kind=kind, name=type(error).__name__, text=text)


def _is_made_of_text(kind: type[BaseException], text: str) -> bool:
    """Whether every rank can make an error of the class ``kind`` that says ``text``."""
    if not issubclass(kind, Exception):
        return False
    try:
        made = pickle.loads(pickle.dumps(kind))(text)
    except Exception:  # whatever the class's own methods raise
        return False
    return str(made) == text
