"""Activations go to the host and come back; the way back does not wait for the way there.

After NVIDIA/Megatron-LM#7398. ``--lost`` lets the copies run in the order of a lost race, and the
loss falls all the same; ``--cured`` waits.
"""

import sys

import torch
from torch import nn

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
streams = torch.get_device_module(DEVICE)
CURED = "--cured" in sys.argv
LOST = "--lost" in sys.argv


class OnTheHost(torch.autograd.graph.saved_tensors_hooks):
    """Keeps what backward needs in one host buffer a tensor, which the next step uses again."""

    def __init__(self) -> None:
        super().__init__(self.store, self.load)
        self.there = streams.Stream()
        self.back = streams.Stream()
        self.buffers: list[torch.Tensor] = []
        self.used = 0

    def store(self, tensor: torch.Tensor) -> tuple:
        if isinstance(tensor, nn.Parameter) or not tensor.is_contiguous():
            return tensor, None, None
        if self.used == len(self.buffers):
            self.buffers.append(torch.zeros(tensor.shape))
        host = self.buffers[self.used]
        self.used += 1
        stored = streams.Event()
        self.there.wait_stream(streams.current_stream())
        with streams.stream(self.there):
            late = host.clone() if LOST else None  # what the way back finds if it is early
            host.copy_(tensor, non_blocking=True)
            stored.record()
        return late if LOST else host, stored, tensor  # a real one keeps its shape alone

    def load(self, kept: tuple) -> torch.Tensor:
        host, stored, tensor = kept
        if stored is None:
            return host
        loaded = torch.empty_like(tensor)
        self.back.wait_stream(streams.current_stream())
        with streams.stream(self.back):
            if CURED:
                self.back.wait_event(stored)
            loaded.copy_(host, non_blocking=True)
        streams.current_stream().wait_stream(self.back)
        return loaded


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hooks = OnTheHost()
    inputs = torch.randn(64, 8, device=DEVICE)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for _ in range(20):
        hooks.used = 0
        with hooks:
            loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        streams.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f}, then {losses[1]:.3f}, after 20 steps {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
