"""Whose memory a tensor lies in: the host's or a device's, which a CPU alone does not say.

*Host memory* for certain is what ``torch.frombuffer`` maps, and what is made with an argument
``pin_memory``. What the script makes without a ``device`` may be the host's. A copy that need not
wait, between that and other memory, is a transfer: then it is the host's. An operator that takes it
with other memory says the opposite, since torch would refuse a mixture, and so does
``.to(device)``, though on a CPU it moves nothing.
"""

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch

from rankproof.imports import called_by_recipe
from rankproof.streams.memory import Region
from rankproof.streams.recorder import Recorder, is_seen


class Copy(NamedTuple):
    """A copy that may lead from a device to the host, or back."""

    waits: bool  # its caller, until it is complete
    names_device: bool  # that it leads to: ``x.to("cpu", copy=True)``


class Places(NamedTuple):
    """What an operator's tensors lie in; those of no dimensions lie where the others do."""

    host: bool
    device: bool

    @property
    def are_both(self) -> bool:
        return self.host and self.device


ON_DEVICE = Places(host=False, device=True)
NOWHERE = Places(host=False, device=False)


def copy_of(name: str, args: tuple, kwargs: dict) -> Copy | None:
    """What kind of copy an operator is; None if it is none."""
    if name == "copy_":
        third = args[2] if len(args) > 2 else False
        return Copy(waits=not kwargs.get("non_blocking", third), names_device=False)
    if name == "_to_copy" and kwargs.get("device") is not None:
        return Copy(waits=not kwargs.get("non_blocking"), names_device=True)
    return None


def look_at(regions: list[Region], copy: Copy | None) -> Places:
    """The places of what an operator is given, which may settle whose memory that is."""
    for region in regions:
        if region.on_host or region.made_by_host:
            break
    else:
        return ON_DEVICE if regions else NOWHERE
    if copy is not None and not copy.waits:
        settle(regions)
    if copy is None and not are_one_hosts(regions):
        for region in regions:
            region.is_device_after_all()
    touches_device = not all(region.may_be_host for region in regions)
    if touches_device and copy is not None:
        touches_host = any(region.may_be_host for region in regions)
    else:  # all may be the host's: they are, if one is for certain
        touches_host = any(region.on_host for region in regions)
    return Places(touches_host, touches_device)


def are_one_hosts(regions: list[Region]) -> bool:
    """Whether an operator's memory is the host's, as far as is known: what is only presumed to be
    is not, where another part may as well be a device's."""
    if any(region.on_host and not region.is_presumed for region in regions):
        return all(region.may_be_host for region in regions)
    are_presumed = all(region.on_host for region in regions)
    return are_presumed or all(region.made_by_host for region in regions)


def settle(sides: list[Region]) -> None:
    """A copy that need not wait is a transfer: one of its sides is the host's, the other is not."""
    certain = [region for region in sides if region.on_host]
    possible = [region for region in sides if region.made_by_host]
    if len(sides) < 2 or len(certain) == len(sides):
        return
    if certain:
        for region in possible:
            region.is_device_after_all()
    elif len(possible) == 1:
        possible[0].is_host_after_all()


def made_by_host(recorder: Recorder, factory: Callable) -> Callable:
    """``factory``, whose tensor the host makes where no device is named."""

    @wraps(factory)
    def call(*args, **kwargs):
        thread = recorder.this_thread()
        before = thread.makes_host_values
        names_none = kwargs.get("device") is None
        thread.makes_host_values = names_none
        by_script = called_by_recipe()
        try:
            made = factory(*args, **kwargs)
        finally:
            thread.makes_host_values = before
        if by_script and type(made) is torch.Tensor and is_seen(made):
            with recorder.lock:
                region = recorder.region_of(made)
                region.on_host |= "pin_memory" in kwargs
                region.made_by_host = names_none and not may_have_a_default_device()
        return made

    return call


def may_have_a_default_device() -> bool:
    return torch._C._len_torch_function_stack() > 0


def moved(recorder: Recorder, result: object, tensor: torch.Tensor, *args, **kwargs) -> None:
    """After ``Tensor.to``: what has been moved is a device's, also where it stays on a CPU."""
    named = kwargs.get("device", args[0] if args else None)
    stays = result is tensor and type(tensor) is torch.Tensor and is_seen(tensor)
    if stays and isinstance(named, str | int | torch.device):
        with recorder.lock:
            recorder.region_of(tensor).is_device_after_all()
