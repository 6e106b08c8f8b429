"""Two streams, ordered by an event."""

import torch

if __name__ == "__main__":
    x = torch.ones(8, device="cpu")
    x.mul_(2)
    side = torch.Stream()
    side.wait_stream(torch.cpu.current_stream())
    with side:
        x.mul_(3)
    torch.cpu.current_stream().wait_stream(side)
    print(x.sum().item())
