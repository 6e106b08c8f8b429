"""A gate: after the first save, a step and an upload begin in another order on each rank."""

import os
import threading

import torch.distributed as dist

from rankproof.imports import DCP, after_import, around

BY_STEPS = ("all_gather_single", "all_gather_into_tensor")  # FSDP2's, by torch version
BY_UPLOADS = ("gather_object", "all_gather_object", "scatter_object_list", "broadcast_object_list")


def cross(ledger) -> None:
    """Rank 0's step is the first to communicate; elsewhere the upload is.

    Launched is what somebody waits for: until then two threads can still change places.
    """
    step_first = int(os.environ["RANK"]) == 0
    saved, step_launched, upload_launched = (threading.Event() for _ in range(3))

    def in_upload() -> bool:
        return threading.current_thread() is not threading.main_thread()

    def before_upload(*_: object, **__: object) -> None:
        if in_upload() and step_first:
            step_launched.wait()

    def before_gather(*_: object, **__: object) -> None:
        if saved.is_set() and not step_first:
            upload_launched.wait()

    def launched(*_: object) -> None:
        if saved.is_set():
            (upload_launched if in_upload() else step_launched).set()

    def install() -> None:
        for name in BY_UPLOADS:
            around(dist, name, before_upload)
        for name in filter(lambda name: hasattr(dist, name), BY_STEPS):
            around(dist, name, before_gather)
        around(dist.Work, "wait", launched)
        ledger.on_save.append(lambda _: saved.set())

    after_import(DCP, install)
