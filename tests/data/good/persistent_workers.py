"""A DataLoader's persistent workers, which the interpreter ends."""

import torch
from torch.utils.data import DataLoader, TensorDataset

LOADER = DataLoader(TensorDataset(torch.arange(8)), num_workers=1, persistent_workers=True)

if __name__ == "__main__":
    batches = iter(LOADER)
    print(next(batches))
