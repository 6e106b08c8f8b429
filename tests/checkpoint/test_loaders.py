"""A pass over the data that goes on behind a load is the one that was begun."""

import gc
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler

from overlap_recipes.checkpoint import CheckpointManager, TrainingState

stateful = pytest.importorskip("torchdata.stateful_dataloader")

SAMPLES = torch.arange(22.0)[:, None].expand(22, 4)  # six batches of four, the last of two
STEPS = 14


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """One would hold what the session's last lines wait for."""
    yield
    gc.collect()
    assert not multiprocessing.active_children()


class Lazy(Sampler):
    """Draws its order from Python's random numbers when its first number is asked for."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(len(SAMPLES)), len(SAMPLES))


class AtOnce(Lazy):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(len(SAMPLES)), len(SAMPLES)))


class Shuffled(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from random.sample(list(SAMPLES), len(SAMPLES))


class Noisy(Dataset):
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, number: int) -> torch.Tensor:
        return SAMPLES[number] + torch.rand(4)


def loader(data: object = SAMPLES, batch_size: int = 4, **settings: object):
    return stateful.StatefulDataLoader(data, batch_size, **settings)


def with_generator() -> object:
    return loader(shuffle=True, generator=torch.Generator().manual_seed(3))


def of_accelerate() -> object:
    accelerate = pytest.importorskip("accelerate")
    utils = pytest.importorskip("accelerate.utils")
    settings = utils.DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=3
    )
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    plain = torch.utils.data.DataLoader(SAMPLES, 4, shuffle=True)
    return accelerator.prepare(plain)


LOADERS = {
    "shuffled": lambda: loader(shuffle=True),
    "with a generator": with_generator,
    "a dataset that draws": lambda: loader(Noisy(), shuffle=True),
    "a sampler that draws late": lambda: loader(sampler=Lazy()),
    "batches of its own": lambda: loader(
        batch_size=1, batch_sampler=BatchSampler(Lazy(), 4, False)
    ),
    "a stream that shuffles": lambda: loader(Shuffled()),
    "workers": lambda: loader(sampler=Lazy(), num_workers=1),
    "of accelerate": of_accelerate,
}


def run(root: Path, make: Callable, steps: int, save_at: int, seed: int) -> list[float]:
    """The losses of steps that draw random numbers themselves, from where ``root`` is."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = make()
    losses = []
    with CheckpointManager(root, TrainingState(model, optimizer, per_rank={"data": data})) as own:
        step = own.resume()
        while step < steps:
            for batch in data:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                step += 1
                if step == save_at:
                    own.save(step)
                if step == steps:
                    break
    data._iterator = None  # its workers end
    return losses


@pytest.mark.parametrize("kind", LOADERS)
def test_a_job_that_resumes_in_a_pass_has_the_batches_and_the_dropout_of_one_without_interruption(
    tmp_path: Path, kind: str
) -> None:
    make = LOADERS[kind]
    whole = run(tmp_path / "whole", make, STEPS, 5, seed=0)
    run(tmp_path / "parted", make, 5, 5, seed=0)
    assert run(tmp_path / "parted", make, STEPS, 0, seed=1) == whole[5:]


def test_a_sampler_whose_order_is_in_no_state_is_refused_at_the_first_save(
    tmp_path: Path,
) -> None:
    with pytest.raises(RuntimeError, match="AtOnce draws in iter.*in no state"):
        run(tmp_path, lambda: loader(sampler=AtOnce()), 2, 1, seed=0)


def test_a_second_state_of_a_job_takes_its_loader_too() -> None:
    data = loader(shuffle=True)
    first = TrainingState(nn.Linear(4, 4), per_rank={"data": data})
    batches = iter(data)
    next(batches)
    second = TrainingState(nn.Linear(4, 4), per_rank={"data": data})
    saved = second.per_rank["data"].state_dict()
    wanted = next(batches)
    del first
    second.per_rank["data"].load_state_dict(saved)
    before = torch.get_rng_state()
    assert torch.equal(next(iter(data)), wanted)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("is_saved_in_the_loop", "batches_left"), [(True, 0), (False, 6)])
def test_a_job_that_ended_has_no_batch_left_if_its_last_step_was_saved_in_the_loop(
    tmp_path: Path, is_saved_in_the_loop: bool, batches_left: int
) -> None:
    """``guide/symptoms_loads``: behind the loop the loader stands at its next epoch."""
    for expected in (6, batches_left):
        data = loader(shuffle=True)
        state = TrainingState(nn.Linear(4, 4), per_rank={"data": data})
        with CheckpointManager(tmp_path, state) as own:
            step = begun_at = own.resume()
            for _ in data:
                step += 1
                if is_saved_in_the_loop and step == 6:
                    own.save(step)
            if not is_saved_in_the_loop:
                own.save(step)
        assert step - begun_at == expected
