"""Stock FSDP2 and FSDP2 in place train the same bits, whatever a user's program does.

``tests/data/in_place_training.py`` holds the programs; one process a rank runs them all: shared
weights, adapters, groups of modules, accumulation, evaluation, weights loaded and swapped by any
road, several optimizers, checkpointing, compilation, HSDP.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rankproof.run import run

TRAINING = Path(__file__).parents[1] / "data" / "in_place_training.py"


class Unit:
    """A group of parameters, as far as an optimizer's hook looks at one."""

    def __init__(self, fsdp_params: list) -> None:
        self.fsdp_params = fsdp_params


@pytest.mark.parametrize("half", [0, 1])
def test_every_program_trains_the_bits_of_stock_fsdp2(
    half: int, pytestconfig: pytest.Config
) -> None:
    """Each in float32 sums, four in every policy; with ``--all-models``, all in every policy."""
    args = ["half", str(half)]
    if not pytestconfig.getoption("--all-models"):
        args.append("few_policies")
    report = run(TRAINING, 2, launcher="warm", args=tuple(args), deadline_s=400)
    assert report.ok, report.describe()


@pytest.mark.parametrize("way", ["under stock", "in place"])
@pytest.mark.parametrize("program", ["branches", "evaluation_beside"])
def test_units_may_compute_on_several_streams(program: str, way: str) -> None:
    report = run(TRAINING, 2, launcher="warm", args=(f"{program} {way}",), order=True)
    assert report.ok, report.describe()


def test_an_optimizer_looks_at_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a parameter, as for steps in backward: not at those of all. An alias counts as well."""
    from overlap_recipes.fsdp2 import shared_slots

    looked, storage_of = [], shared_slots.storage_of
    monkeypatch.setattr(shared_slots, "storage_of", lambda t: looked.append(0) or storage_of(t))
    shards = [torch.nn.Parameter(torch.ones(2)) for _ in range(40)]
    units = [Unit([SimpleNamespace(sharded_param=shard)]) for shard in shards]
    shared_slots.counted().update(units)
    for shard in shards:
        shard.is_gathered = True  # as when it gets its slot
        shard.grad = torch.ones(2)
    alias = shards[0].detach().requires_grad_()
    alias.grad = torch.ones(2)
    before = [shard._version for shard in shards]
    for shard in shards:
        torch.optim.SGD([shard], lr=0.1, fused=True).step()
    assert all(shard._version > v for shard, v in zip(shards, before, strict=True))
    assert not looked
    before = shards[0]._version
    torch.optim.SGD([alias], lr=0.1, fused=True).step()
    assert shards[0]._version > before and looked


def test_sums_of_three_ranks_are_as_near_to_those_in_float64_as_stocks() -> None:
    report = run(TRAINING, 3, launcher="warm", args=("sums_of_more_ranks",))
    assert report.ok, report.describe()


def test_two_hosts_of_two_ranks_accumulate_the_bits_of_stock_hsdp() -> None:
    """Reductions over the hosts come with each micro-batch, or with the last one alone."""
    programs = "accumulation_hsdp,as_many_bytes_of_gradients_as_stock"
    report = run(TRAINING, 4, launcher="warm", args=(programs,))
    assert report.ok, report.describe()
