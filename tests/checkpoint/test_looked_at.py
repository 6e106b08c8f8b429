"""What surprised us in other packages (``findings/``) does not happen to who uses the library."""

from pathlib import Path

import torch
from torch import nn

from overlap_recipes.checkpoint import CheckpointManager, TrainingState


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_an_optimizer_that_was_looked_at_is_loaded(tmp_path: Path) -> None:
    """``findings/optimizer_looked_at.sh``: of stock DCP it gets no state, without an error."""
    model, optimizer = job()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path, TrainingState(model, optimizer)) as checkpoints:
        checkpoints.resume()
        checkpoints.save(1)
    expected = optimizer.state[model.weight]

    model, optimizer = job()
    for parameter in model.parameters():
        assert optimizer.state[parameter].get("exp_avg") is None
    with CheckpointManager(tmp_path, TrainingState(model, optimizer)) as checkpoints:
        assert checkpoints.resume() == 1
    found = optimizer.state[model.weight]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
