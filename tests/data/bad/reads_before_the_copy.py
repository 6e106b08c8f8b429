"""Reads on the host what a copy is still bringing."""

import torch

if __name__ == "__main__":
    x = torch.ones(8, device="cpu").mul(2)
    buffer = bytearray(32)
    host = torch.frombuffer(buffer, dtype=torch.float32)
    host.copy_(x, non_blocking=True)
    print(host.tolist())
