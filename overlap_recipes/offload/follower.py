# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/follower.py
"""What streaming tells an optimizer on the host, and where that may hold it up."""


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
