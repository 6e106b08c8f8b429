"""Two streams write the same memory, and nothing orders them."""

import torch

if __name__ == "__main__":
    x, y = torch.ones(8, device="cpu"), torch.ones(8, device="cpu")
    x.mul_(2)
    y.mul_(2)
    side = torch.Stream()
    with side:
        x.mul_(3)
        y.mul_(3)
