"""Threads that update: who waits for them, and what their errors and Ctrl-C leave behind."""

import os
import threading
from contextlib import closing
from copy import deepcopy

import pytest
import torch
from host_training import (
    LAYERS,
    PATIENCE_S,
    Resident,
    batch,
    llama,
    same,
    streamed_of,
    train,
    whole,
)

from overlap_recipes.offload import adam_in_pieces as pieces
from overlap_recipes.offload.host_adam import HostUpdates
from overlap_recipes.offload.streamed_model import resident_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("ranks", "own", "of_launcher", "threads"),
    [
        (1, 64, 64, 63),
        (8, 64, 64, 7),  # nothing is bound
        (8, 8, 64, 7),  # each to its own cores
        (8, 32, 64, 7),  # each four to a half, NUMA nodes
        (8, 32, 32, 3),  # a container with a part of the host
        (8, 8, 8, 1),
        (2, 8, 64, 7),
        (8, 8, 1, 1),  # a launcher that was bound by itself
    ],
)
def test_a_rank_takes_its_part_of_the_cores_once(ranks, own, of_launcher, threads, monkeypatch):
    """Cores that a rank was bound to were divided among ranks again: one thread of eight."""
    cores = {0: set(range(own)), os.getppid(): set(range(of_launcher))}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(os, "sched_getaffinity", cores.get)
    assert pieces.host_threads() == threads


@pytest.mark.parametrize("slots", [2, 9])
def test_the_next_forward_begins_while_upper_layers_are_still_to_be_updated(slots):
    """With more slots as well: what is not updated yet is not loaded early."""
    model = llama(torch.bfloat16)
    began, waited = threading.Event(), []
    streamed = streamed_of(model, slots=slots)
    with closing(whole(model, streamed, threads=1)) as optimizer:
        host, plain = optimizer.host, streamed.run

        def update_block(layer, *rest):
            if layer == LAYERS - 1:
                waited.append(began.wait(PATIENCE_S))
            HostUpdates.update_block(host, layer, *rest)

        def run(index, *args):
            if host.steps[0].any() and index == LAYERS - 2:
                began.set()
            return plain(index, *args)

        model(**batch(0)).loss.backward()
        host.update_block, streamed.run = update_block, run
        optimizer.step()
        while not host.steps[0].any():
            threading.Event().wait(0.01)
        model(**batch(1))
        streamed.wait()
    assert waited and all(waited)


def test_a_step_that_fails_leaves_nobody_waiting(monkeypatch):
    """Where the device has no more memory, say: the next forward waited for ever."""
    model = llama(torch.bfloat16)
    for in_backward in (False, True):
        options = {"in_backward": in_backward, "max_norm": None}
        optimizer = whole(model, streamed_of(model), **options)
        with closing(optimizer):
            monkeypatch.setattr(pieces, "to_host", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                train(model, optimizer, 0)
            assert not optimizer.host.updates
            if in_backward:  # a layer may be of the next step already
                with pytest.raises(RuntimeError, match="updated already"):
                    model(**batch(0))
            else:
                model(**batch(0))
            monkeypatch.undo()
        model.zero_grad()


def test_what_a_thread_raises_reaches_the_training_thread():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        optimizer.host.blocks[1][0] = None
        train(model, optimizer, 0)
        for _ in range(2):
            with pytest.raises(TypeError):
                streamed.wait()
        with pytest.raises(TypeError):
            model(**batch(1))
        optimizer.host.forget()


def test_a_step_that_is_interrupted_leaves_nobody_waiting():
    """Ctrl-C behind the announcement, before a thread was asked: forward waited for ever."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        model(**batch(0)).loss.backward()
        submit, optimizer.host.arrivals.submit = optimizer.host.arrivals.submit, interrupted
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.host.arrivals.submit = submit
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="interrupted: load a checkpoint"):
            model(**batch(0))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, 0)
        streamed.wait()


def interrupted(*_) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("budget_layers", [0, LAYERS])
@pytest.mark.parametrize("in_backward", [False, True])
def test_an_interrupted_update_on_the_device_is_no_step(in_backward, budget_layers, monkeypatch):
    """Ctrl-C behind some of it: the next step took the gradients of the rest again."""
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    budget = budget_layers * resident_bytes(model.model.layers[0])
    reference, streamed = Resident(resident, None), streamed_of(model, budget=budget)
    options = {"max_norm": None, "in_backward": in_backward}
    with closing(whole(model, streamed, **options)) as optimizer:
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        model(**batch(1)).loss.backward()
        update, first = pieces.update_on_device, [True]

        def halfway(*args):
            update(*args) if first else interrupted()
            first.clear()

        monkeypatch.setattr(pieces, "update_on_device", halfway)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        monkeypatch.undo()
        for use in (optimizer.step, streamed.wait, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="interrupted: load a checkpoint"):
                use()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        reference.step(resident(**batch(0)).loss)
        train(model, optimizer, 0)
        streamed.wait()
        assert same(model, resident)


def test_an_interrupted_step_updates_nothing_behind_a_wait():
    """A thread that was asked before Ctrl-C began when a checkpoint was being loaded."""
    model = llama(torch.bfloat16)
    loads = threading.Event()
    with closing(whole(model, streamed := streamed_of(model), threads=1)) as optimizer:
        host, submit = optimizer.host, optimizer.host.arrivals.submit

        def start(*args):
            loads.wait(PATIENCE_S)
            HostUpdates.start(host, *args)

        model(**batch(0)).loss.backward()
        host.start, host.arrivals.submit = start, lambda work: submit(work) and interrupted()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        streamed.wait(raises=False)
        weights = [parameter.clone() for parameter in model.parameters()]
        loads.set()
        submit(int).result()
        host.workers.submit(int).result()
        assert all(map(torch.equal, model.parameters(), weights))
        host.forget()


def test_a_layer_with_a_failed_block_is_awaited_to_its_last():
    """A load began while threads still wrote this layer's weights."""
    model = llama(torch.bfloat16)
    taken, went_on, ended = threading.Event(), threading.Event(), []
    with closing(whole(model, streamed_of(model), threads=2)) as optimizer:
        host, last = optimizer.host, len(optimizer.host.blocks[0]) - 1

        def update_block(layer, number, update):
            if (layer, number) == (0, last):
                taken.wait(PATIENCE_S)
                raise ZeroDivisionError
            if (layer, number) == (0, last - 1):
                taken.set()
                went_on.wait(PATIENCE_S)
                ended.append(update.ended.done())
            else:
                went_on.set()

        host.update_block = update_block
        train(model, optimizer, 0)
        with pytest.raises(ZeroDivisionError):
            host.before_host(raises=True)
        assert ended == [False]
        host.forget()
