"""Stock FSDP2 and FSDP2 in place train the same bits, whatever a user's program does.

The programs are in ``tests/data/in_place_*.py``: shared weights, adapters, groups of modules,
accumulation, evaluation, weights loaded and swapped by any road, several optimizers, checkpointing,
compilation, HSDP, stock models of transformers. One process a rank runs all of a kind.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"


class Unit:
    """A group of parameters, as far as an optimizer's hook looks at one."""

    def __init__(self, fsdp_params: list) -> None:
        self.fsdp_params = fsdp_params


def passes(program: str, ranks: int, *args: str, **options) -> None:
    report = run(DATA / f"in_place_{program}.py", ranks, launcher="warm", args=args, **options)
    assert report.ok, report.describe()


@pytest.mark.parametrize("half", ["0", "1"])
def test_every_program_trains_the_bits_of_stock_fsdp2(half: str, pytestconfig) -> None:
    """Each in float32 sums, four in every policy; with ``--all-models``, all in every policy."""
    few = [] if pytestconfig.getoption("--all-models") else ["few_policies"]
    passes("training", 2, "half", half, *few, deadline_s=400)


def test_stock_models_train_the_bits_of_stock_fsdp2(pytestconfig) -> None:
    """One of each kind, or all with ``--all-models``."""
    every = ["all"] if pytestconfig.getoption("--all-models") else []
    passes("stock", 2, *every, deadline_s=2000 if every else 200)


def test_troubles_are_refused_or_leave_training_as_it_was() -> None:
    passes("troubles", 2, deadline_s=300)


@pytest.mark.parametrize("program", ["branches", "evaluation_beside"])
def test_units_may_compute_on_several_streams(program: str) -> None:
    passes("troubles", 2, program, order=True)


def test_gradients_of_some_ranks_or_by_unseen_tensors_are_right_or_refused() -> None:
    """A parameter without a gradient on a rank, and outputs on which FSDP2 has no hook."""
    passes("gradients", 2)


def test_stock_fsdp2_mixes_gradients_of_some_ranks_in_silence() -> None:
    report = run(DATA / "in_place_gradients.py", 2, launcher="warm", args=("stock",))
    assert "AssertionError: one_each: blocks." in report.describe(), report.describe()


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
    passes("troubles", 3, "sums_of_more_ranks")


def test_two_hosts_of_two_ranks_accumulate_the_bits_of_stock_hsdp() -> None:
    """Reductions over the hosts come with each micro-batch, or with the last one alone."""
    passes("training", 4, "accumulation_hsdp")
    passes("troubles", 4, "as_many_bytes_of_gradients_as_stock")
