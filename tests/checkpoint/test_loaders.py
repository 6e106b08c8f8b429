"""A pass over the data that goes on behind a load is the one that was begun."""

import gc
import multiprocessing
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler

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


class Counting(Lazy):
    """Its order is of a count of its own, as ``DistributedSampler``'s of ``set_epoch``."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(SAMPLES)))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        yield from order


class OwnNumbers(Lazy):
    def __init__(self, numbers: object) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.numbers, torch.Generator):
            yield from torch.randperm(len(SAMPLES), generator=self.numbers).tolist()
        else:
            yield from self.numbers.permutation(len(SAMPLES)).tolist()


class OneByOne(Lazy):
    """Draws from torch's numbers, as the model's dropout does."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(SAMPLES)):
            yield int(torch.randint(len(SAMPLES), ()))


class CountingStream(IterableDataset):
    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(Counting.__iter__(self))
        yield from SAMPLES[order]


class StreamOneByOne(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (SAMPLES[number] for number in OneByOne())


class Doubling:
    """A loader in one of a job's own, as those that copy batches to a device ahead."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.inner:
            yield 2 * batch

    def state_dict(self) -> dict:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.inner.load_state_dict(state)


class CountingLoader(stateful.StatefulDataLoader):
    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        random.seed(self.epoch)
        self.epoch += 1
        return super().__iter__()


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
IN_THE_SECOND_PASS = {
    "a sampler that counts": lambda: loader(sampler=Counting()),
    "a sampler that counts, with workers that persist": lambda: loader(
        sampler=Counting(), num_workers=1, persistent_workers=True
    ),
    "a generator of its own": lambda: loader(sampler=OwnNumbers(torch.Generator())),
    "NumPy's of its own": lambda: loader(sampler=OwnNumbers(np.random.default_rng(3))),
    "a stream that counts": lambda: loader(CountingStream()),
    "a loader that counts": lambda: CountingLoader(SAMPLES, 4, sampler=Lazy()),
    "a loader inside another": lambda: Doubling(loader(sampler=Lazy())),
    "noise in a loader inside another": lambda: Doubling(loader(Noisy(), shuffle=True)),
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
    getattr(data, "inner", data)._iterator = None  # its workers end
    return losses


@pytest.mark.parametrize("kind", LOADERS)
def test_a_job_that_resumes_in_a_pass_has_the_batches_and_the_dropout_of_one_without_interruption(
    tmp_path: Path, kind: str
) -> None:
    make = LOADERS[kind]
    whole = run(tmp_path / "whole", make, STEPS, 5, seed=0)
    run(tmp_path / "parted", make, 5, 5, seed=0)
    assert run(tmp_path / "parted", make, STEPS, 0, seed=1) == whole[5:]


@pytest.mark.parametrize("kind", IN_THE_SECOND_PASS)
@pytest.mark.parametrize("save_at", [8, 12])  # in the pass, at its end
def test_what_a_pass_goes_by_comes_back(tmp_path: Path, kind: str, save_at: int) -> None:
    make = IN_THE_SECOND_PASS[kind]
    whole = run(tmp_path / "whole", make, STEPS, save_at, seed=0)
    run(tmp_path / "parted", make, save_at, save_at, seed=0)
    assert run(tmp_path / "parted", make, STEPS, 0, seed=1) == whole[save_at:]


def epochs(root: Path, first_epoch: Callable, steps: int, save_at: int) -> list:
    """The batches of a loop that sets the epoch of ``DistributedSampler`` from ``first_epoch``."""
    sampler = DistributedSampler(SAMPLES, 1, 0)
    data = loader(sampler=sampler)
    seen = []
    with CheckpointManager(root, TrainingState(nn.Linear(1, 1), per_rank={"data": data})) as own:
        step = own.resume()
        for epoch in count(first_epoch(step)):
            sampler.set_epoch(epoch)
            for batch in data:
                seen.append(batch[:, 0].tolist())
                step += 1
                if step == save_at:
                    own.save(step)
                if step == steps:
                    return seen


@pytest.mark.parametrize("save_at", [3, 6, 8, 12])
def test_an_epoch_that_is_set_by_the_step_begins_with_its_first_batch(
    tmp_path: Path, save_at: int
) -> None:
    whole = epochs(tmp_path / "whole", lambda step: step // 6, STEPS + 6, save_at)
    epochs(tmp_path / "parted", lambda step: step // 6, save_at, save_at)
    rest = epochs(tmp_path / "parted", lambda step: step // 6, STEPS + 6, 0)
    assert rest == whole[save_at:]


@pytest.mark.parametrize("save_at", [8, 12])
def test_an_epoch_that_begins_at_0_again_is_refused(tmp_path: Path, save_at: int) -> None:
    epochs(tmp_path, lambda step: 0, save_at, save_at)
    with pytest.raises(ValueError, match="epoch of DistributedSampler is 0, and was 1 when"):
        epochs(tmp_path, lambda step: 0, STEPS, 0)


def test_what_holds_a_loader_and_gives_no_batches_keeps_its_own_state() -> None:
    class Trainer(Doubling):
        __iter__ = None

    trainer = Trainer(loader())
    state = TrainingState(nn.Linear(4, 4), per_rank={"trainer": trainer})
    assert state.per_rank["trainer"] is trainer


def test_an_iterator_of_before_the_resume_gives_no_batch(tmp_path: Path) -> None:
    for expected in (0, 3):
        data = loader(shuffle=True)
        batches = iter(data)
        next(batches)
        state = TrainingState(nn.Linear(4, 4), per_rank={"data": data})
        with CheckpointManager(tmp_path, state, grace_s=None) as own:
            assert own.resume() == expected
            if expected:
                with pytest.raises(RuntimeError, match="Call iter.loader. after resume"):
                    next(batches)
                assert len(list(data)) == 5
            else:
                own.save(3)


@pytest.mark.parametrize(("saved", "here"), [(0, 1), (1, 2)])
def test_another_number_of_workers_is_refused(saved: int, here: int) -> None:
    states = []
    for workers in (saved, here):
        data = loader(num_workers=workers)
        states.append(TrainingState(nn.Linear(4, 4), per_rank={"data": data}).per_rank["data"])
    with pytest.raises(ValueError, match=f"saved with {saved} workers, and has {here} here"):
        states[1].load_state_dict(states[0].state_dict())


def test_a_pass_within_a_pass_of_one_loader_is_refused() -> None:
    data = loader()
    state = TrainingState(nn.Linear(4, 4), per_rank={"data": data})
    outer = iter(data)
    next(outer)
    assert len(list(data)) == 6
    with pytest.raises(RuntimeError, match="another pass of this loader has begun since"):
        next(outer)
    del state


def test_an_order_that_is_drawn_between_the_models_numbers_is_refused_at_the_first_save(
    tmp_path: Path,
) -> None:
    with pytest.raises(RuntimeError, match="OneByOne draws random numbers .* in the middle"):
        run(tmp_path, lambda: loader(sampler=OneByOne()), 4, 3, seed=0)


def test_a_stream_that_draws_between_the_models_numbers_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "alone", lambda: loader(Shuffled()), 4, 3, seed=0)
    assert "as it goes" not in caplog.text
    run(tmp_path, lambda: loader(StreamOneByOne()), 4, 3, seed=0)
    assert caplog.text.count("StreamOneByOne draws random numbers of the job as it goes") == 1


def test_a_graph_of_nodes_whose_order_is_in_no_state_is_refused() -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    sampler = torch.utils.data.RandomSampler(SAMPLES)
    graph = nodes.Prefetcher(nodes.Batcher(nodes.SamplerWrapper(sampler), 4), 2)
    with pytest.raises(TypeError, match="RandomSampler draws another order"):
        TrainingState(nn.Linear(4, 4), per_rank={"data": nodes.Loader(graph)})


@pytest.mark.parametrize("has_epoch", [True, False])
def test_a_sampler_of_nodes_that_may_draw_its_order_is_told_of(
    caplog: pytest.LogCaptureFixture, has_epoch: bool
) -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    sampler = Lazy()
    if has_epoch:
        sampler.set_epoch = random.seed
    for inner in (nodes.SamplerWrapper(sampler), nodes.IterableWrapper([1, 2])):
        TrainingState(nn.Linear(4, 4), per_rank={"data": nodes.Loader(nodes.Batcher(inner, 4))})
    assert caplog.text.count("Lazy has no state") == (not has_epoch)


def test_a_loader_that_gives_batches_as_they_come_is_refused() -> None:
    loader(num_workers=1, in_order=False)
    with pytest.raises(TypeError, match="Set in_order=True"):
        TrainingState(nn.Linear(4, 4), per_rank={"data": loader(num_workers=2, in_order=False)})


def test_a_loader_that_the_loop_makes_anew_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = loader()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    state = TrainingState(model, optimizer, per_rank={"data": data})
    with CheckpointManager(tmp_path, state, grace_s=None) as own:
        step = 0
        for batches in (data, loader()):
            for batch in batches:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % 3 == 0:
                    own.save(step)
                    assert ("since the last save, and taken no" in caplog.text) == (step > 6)


def test_a_sampler_whose_order_is_in_no_state_is_refused_at_the_first_save(tmp_path: Path) -> None:
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
