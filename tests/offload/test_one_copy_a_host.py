"""Ranks of one host with one copy of the weights: each waits for the parts of the others."""

import os
import re
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from host_training import (
    CPU,
    LAYERS,
    MAX_NORM,
    RATE,
    Resident,
    batch,
    falling,
    groups_of,
    llama,
    train,
)

from overlap_recipes.offload import one_copy_a_host
from overlap_recipes.offload.host_adam import HostUpdates
from overlap_recipes.offload.one_copy_a_host import FAILED, Host, SharedModel
from overlap_recipes.offload.whole_step import HostAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.usefixtures("one_rank")
def test_a_layer_is_loaded_when_all_ranks_of_the_host_have_updated_it():
    """A second rank is played: it ends its part of layer 0 late, and fails in layer 1."""
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    with closing(HostAdamW(groups_of(model), streamed, lr=RATE)) as optimizer:
        host, waited = optimizer.host, threading.Event()
        host.done = torch.zeros(LAYERS, 2, dtype=torch.int64)
        train(model, optimizer, 0)

        def second_rank() -> None:
            HostUpdates.before_host(host, True)  # the first rank's part is done
            waited.set()
            host.done[0, 1] = 1

        late = threading.Thread(target=second_rank)
        late.start()
        host.before_load(0)
        assert waited.is_set()
        late.join()
        host.done[1, 1] = FAILED
        with pytest.raises(RuntimeError, match="a rank of this host could not update layer 1"):
            streamed.wait()
        host.done[:, 1] = 1


@pytest.mark.usefixtures("one_rank")
def test_a_graph_that_is_kept_over_the_update_of_another_rank_is_refused():
    """A layer's weights were changed by another rank alone, in memory of both."""
    model = llama(torch.bfloat16)
    for parameter in (*model.lm_head.parameters(), *model.model.norm.parameters()):
        parameter.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    with closing(HostAdamW(groups_of(model), streamed, lr=RATE)) as optimizer:
        kept = model(**batch(0)).loss
        optimizer.host.blocks = [[] for _ in range(LAYERS)]  # all of them are the other rank's
        train(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            kept.backward()


@pytest.mark.usefixtures("one_rank")
def test_closing_waits_for_the_parts_of_the_other_ranks(monkeypatch):
    """Or the weights that are saved behind it would be half of this step's, half of the last's."""
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    optimizer = HostAdamW(groups_of(model), streamed, lr=RATE)
    done = optimizer.host.done = torch.zeros(LAYERS, 2, dtype=torch.int64)
    monkeypatch.setattr(one_copy_a_host.time, "sleep", lambda _: done[:, 1].fill_(1))
    train(model, optimizer, 0)
    optimizer.close()
    assert done.tolist() == [[1, 1]] * LAYERS


@pytest.mark.usefixtures("one_rank")
def test_an_error_on_its_way_does_not_wait_for_other_ranks(monkeypatch):
    """They may have failed before their part of the step."""
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    optimizer = HostAdamW(groups_of(model), streamed, lr=RATE)
    optimizer.host.done = torch.zeros(LAYERS, 2, dtype=torch.int64)
    monkeypatch.setattr(one_copy_a_host.time, "sleep", lambda _: pytest.fail("waits"))
    with pytest.raises(ZeroDivisionError), closing(optimizer):
        train(model, optimizer, 0)
        raise ZeroDivisionError


@pytest.mark.usefixtures("one_rank")
def test_ranks_that_do_not_know_their_host_are_told_so(monkeypatch):
    """As under ``torch.multiprocessing``: each would keep a copy of its own, in silence."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="set LOCAL_WORLD_SIZE"):
        Host()


def test_a_model_on_the_host_is_shared_where_ranks_have_a_group_of_devices_alone():
    """As after ``init_process_group("nccl")``."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = llama(torch.bfloat16)
        SharedModel(model, model.model.layers, CPU, Host()).close()
    finally:
        dist.destroy_process_group()


def shared_bytes() -> tuple[int, int]:
    """Of what ranks share: bytes that this one maps, and its part of those that the host holds."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(
        r"one_copy_a_host.*?\nSize: +(\d+) kB.*?\nPss: +(\d+) kB", maps, re.DOTALL
    )  # a page that n processes map counts as the n-th part of one in Pss
    mapped = sum(int(size) for size, _ in found)
    held = sum(int(part) for _, part in found)
    return 1024 * mapped, 1024 * held


def train_shared(rank: int, store: str, weights: str) -> None:
    """One of two ranks: a bad batch, an evaluation behind each step, a load in mid-run."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    with closing(HostAdamW(groups_of(model), streamed, lr=RATE, max_norm=MAX_NORM)) as optimizer:
        schedule = falling(optimizer)
        for step in range(5):
            (model(**batch(2 * step + rank)).loss * (torch.nan if step == 1 else 1)).backward()
            optimizer.step()
            schedule.step()
            if step == 2:
                model.load_state_dict(llama(torch.bfloat16, initializer_range=0.05).state_dict())
            if rank == step % 2:  # one is late
                with torch.no_grad():
                    model(**batch(9))
        streamed.wait_for_all()
        dist.barrier()
        mapped, held = shared_bytes()
        of_host = torch.tensor(held)
        dist.all_reduce(of_host)
        elements = sum(parameter.numel() for parameter in model.model.layers.parameters())
        assert mapped >= 14 * elements, "weights, masters or moments are not shared"
        assert of_host.item() <= mapped, "the host holds more than one copy"
        if rank == 1:
            torch.save([p.detach().clone() for p in model.parameters()], weights)
        dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_of_a_host_have_the_bits_of_one_with_two_microbatches(tmp_path):
    store, weights = str(tmp_path / "store"), str(tmp_path / "weights")
    ranks = torch.multiprocessing.start_processes(
        train_shared, (store, weights), nprocs=2, join=False, start_method="spawn"
    )
    model = llama(torch.bfloat16)
    reference = Resident(model)
    for step in range(5):
        bad = torch.nan if step == 1 else 1
        losses = [model(**batch(2 * step + rank)).loss * bad for rank in range(2)]
        reference.step(*losses, mean_in=torch.bfloat16)
        if step == 2:
            other = llama(torch.bfloat16, initializer_range=0.05)
            model.load_state_dict(other.state_dict())
            for master, parameter in zip(reference.masters, reference.parameters, strict=True):
                master.data.copy_(parameter)
    while not ranks.join():
        pass
    assert all(map(torch.equal, torch.load(weights), model.parameters()))
