"""Batches go to the device by two host buffers. ``--cured`` waits before it fills one again."""

import sys

import torch
from torch import nn

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
streams = torch.get_device_module(DEVICE)
CURED = "--cured" in sys.argv


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 1).to(DEVICE)
    slots = [torch.empty(8, 16) for _ in range(2)]
    copied = [streams.Event() for _ in slots]
    copying = streams.Stream()
    batches = []
    losses = []
    for number in range(4):
        slot = number % 2
        if CURED:
            copied[slot].synchronize()
        slots[slot].copy_(torch.randn(8, 16))
        with streams.stream(copying):
            batch = torch.empty(8, 16, device=DEVICE)
            batches.append(batch)
            batch.copy_(slots[slot], non_blocking=True)
            copied[slot].record()
        streams.current_stream().wait_stream(copying)
        losses.append(model(batch).square().mean())
    print([round(loss.item(), 3) for loss in losses])


if __name__ == "__main__":
    main()
