"""Asking for the optimizer's state before the first step changes what Adam does (pytorch#164929).

Avoided by recipes_source/checkpoint/state_to_save.py.
"""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def weights(save: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    if save:
        get_optimizer_state_dict(model, optimizer)
    for _ in range(5):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight


print("fixed" if torch.equal(weights(True), weights(False)) else "holds")
