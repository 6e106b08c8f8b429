"""The loss is copied to the host without waiting, and logged. ``--cured`` waits before it reads."""

import sys

import torch
from torch import nn

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
streams = torch.get_device_module(DEVICE)
CURED = "--cured" in sys.argv


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    metrics = torch.zeros(2)
    side = streams.Stream()  # where other work of the job runs
    for step in range(3):
        loss = model(torch.randn(8, 16, device=DEVICE)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        metrics.copy_(torch.stack([loss.detach(), norm]), non_blocking=True)
        copied = streams.Event()
        copied.record()
        optimizer.step()
        optimizer.zero_grad()
        if CURED:
            copied.synchronize()
        loss_now, norm_now = metrics.tolist()
        print(f"step {step}: loss {loss_now:.3f}, norm {norm_now:.3f}")
    side.synchronize()


if __name__ == "__main__":
    main()
