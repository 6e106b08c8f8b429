"""Memory that another stream reads, freed behind it by record_stream."""

import torch

if __name__ == "__main__":
    side = torch.Stream()
    x = torch.ones(64, device="cpu").mul(2)
    side.wait_stream(torch.cpu.current_stream())
    with side:
        y = x + 1
        x.record_stream(side)
    del x
    z = torch.empty(64, device="cpu")
    z.fill_(3)
    torch.cpu.current_stream().wait_stream(side)
    print((y + z).sum().item())
