# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/follower.py
"""What streaming tells an optimizer on the host, and where that may hold it up."""

import gc
from collections.abc import Iterable

from torch import nn

from ..host_memory import refuse_more_than_free


class Follower:
    """Is told of each step of a streamed model; this one lets everything pass.

    ``layer`` is the number of a layer that is streamed. What a method raises, forward, backward or
    whoever waits raises.
    """

    takes_sums = False  # uses gradients that are in no ``parameter.grad``

    def before_forward(self, layer: int) -> None:
        """A layer is going to run."""

    def before_load(self, layer: int) -> None:
        """Its weights on the host are going to be read: ends an update of them."""

    def may_load(self, layer: int) -> bool:
        """Whether a load ahead of the layer's turn would not have to wait for an update."""
        return True

    def before_gradients(self, layer: int) -> None:
        """A layer that is trained is going to run again in backward."""

    def after_gradients(self, layer: int) -> None:
        """Its gradients are in its slot on the device."""

    def takes_gradients(self, layer: int) -> bool:
        """Whether it has taken them from there: then they are not copied to the host."""
        return False

    def after_store(self, layer: int) -> None:
        """Their copy to the host is queued."""

    def before_host(self, raises: bool) -> None:
        """The host is going to read or write weights: ends all updates.

        A failed one is raised, unless weights are going to be loaded (``raises`` is False).
        """


class LayerUpdates(Follower):
    """What updates of streamed layers have in common, wherever they are made.

    Attributes:
        streamed: the model.
        seen: by trained parameter, how often PyTorch had counted a change when it was looked at.
    """

    def __init__(self, streamed) -> None:
        self.streamed = streamed
        self.seen: dict[nn.Parameter, int] = {}

    def refuse_without_room(self, nbytes: int, what: str) -> None:
        """Raise where the host has not the memory that the state of the layers will take.

        Raises:
            RuntimeError: says what to do.
        """
        gc.collect()  # an optimizer that nobody has any more is in cycles yet
        advice = "free some, or keep more layers on the device by budget="
        if len(self.streamed.ended) > 0:
            advice = "an earlier HostAdamW of this model is held yet: del it; or " + advice
        refuse_more_than_free(lambda: nbytes, what, advice, self.streamed.group)

    def versions(self, layer: int) -> list[int]:
        """How often something else has changed a layer's parameters, as far as it is counted."""
        return [parameter._version for parameter in self.streamed.layers[layer].trained.values()]

    def is_counted(self, layer: int) -> bool:
        """Whether PyTorch has counted a change of a layer's weights since they were looked at."""
        trained = self.streamed.layers[layer].trained.values()
        return any(self.seen[parameter] != parameter._version for parameter in trained)

    def note_masters(self, parameters: Iterable[nn.Parameter]) -> None:
        """From here on, the state of these belongs to their weights as they are now."""
        for parameter in parameters:
            if parameter in self.seen:
                self.seen[parameter] = parameter._version

    def let_go(self, layers: Iterable[int]) -> None:
        """What the device has of these layers is old from here on."""
        held = self.streamed.held.items()
        self.streamed.held = {slot: layer for slot, layer in held if layer not in layers}

    def error_of_changes(self, layer: int, before: list[int]) -> RuntimeError | None:
        """What to raise where a layer's ``versions`` are others than ``before`` its update."""
        if self.versions(layer) == before:
            return None
        return RuntimeError(
            f"{self.streamed.title(layer)}: weights were changed during their update: call wait() "
            "of the streamed model before you change them; and load a checkpoint now"
        )
