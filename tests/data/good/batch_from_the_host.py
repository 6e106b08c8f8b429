"""A batch that the host has made is there when a stream loads it."""

import torch

if __name__ == "__main__":
    load = torch.Stream()
    total = torch.zeros(4, device="cpu")
    for _ in range(3):
        batch = torch.randn(4)
        with load:
            loaded = batch.to("cpu", non_blocking=True) * 1
        torch.cpu.current_stream().wait_stream(load)
        total += loaded
        load.wait_stream(torch.cpu.current_stream())
    print(total.sum().item())
