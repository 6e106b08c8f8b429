"""Updates in backward: the bits of updates after it, and what they cannot take back."""

from contextlib import closing
from copy import deepcopy

import pytest
import torch
from host_training import (
    RATE,
    Resident,
    batch,
    falling,
    llama,
    same,
    steps_of,
    streamed_of,
    train,
    whole,
)
from torch import nn

from overlap_recipes.offload import HostAdamW, stream_layers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_updates_in_backward_give_the_bits_of_updates_after_it():
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    reference, streamed = Resident(resident, None), streamed_of(model)
    with closing(whole(model, streamed, max_norm=None, in_backward=True)) as optimizer:
        schedule = falling(optimizer)
        for step in range(4):
            reference.step(resident(**batch(step)).loss)
            train(model, optimizer, step)
            schedule.step()
        streamed.wait()
        assert same(model, resident)
        with pytest.raises(FloatingPointError, match="load a checkpoint"):
            (model(**batch(4)).loss * torch.nan).backward()
            optimizer.step()
            streamed.wait()
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="load a checkpoint"):
                streamed.wait()
        optimizer.host.forget()


class Twice(nn.Module):
    """A layer that runs twice in a forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        first, second = self.layers
        return second(first(second(first(x))))


def test_a_layer_that_runs_twice_is_named_as_the_cause():
    """Its first backward has updated what its second one would run with."""
    model = Twice()
    with (
        stream_layers(model, model.layers, "cpu") as streamed,
        HostAdamW(model.parameters(), streamed, in_backward=True) as optimizer,
    ):
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(RuntimeError, match="runs a layer twice .* needs in_backward=False"):
            loss.backward()
        optimizer.forget()


def test_microbatches_in_backward_without_no_sync_are_refused():
    """The first has updated the layers when the second comes."""
    model = llama(torch.bfloat16)
    streamed = streamed_of(model)
    with closing(whole(model, streamed, max_norm=None, in_backward=True)) as optimizer:
        with optimizer.no_sync():
            model(**batch(0)).loss.backward()
        model(**batch(1)).loss.backward()
        with pytest.raises(RuntimeError, match="no_sync"):
            model(**batch(2)).loss.backward()
        optimizer.step()
        model(**batch(3)).loss.backward()


def test_a_checkpoint_is_loaded_after_a_bad_batch_in_backward():
    """What the error tells to do; until both are loaded, it is raised."""
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    reference, streamed = Resident(resident, None), streamed_of(model)
    with closing(whole(model, streamed, max_norm=None, in_backward=True)) as optimizer:
        schedule = falling(optimizer)
        reference.step(resident(**batch(0)).loss)
        train(model, optimizer, 0)
        schedule.step()
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        with pytest.raises(FloatingPointError, match="load a checkpoint"):
            (model(**batch(1)).loss * torch.nan).backward()
            optimizer.step()
            streamed.wait()
        model.load_state_dict(saved[0])
        with pytest.raises(FloatingPointError, match="load a checkpoint"):
            model(**batch(1))
        optimizer.load_state_dict(saved[1])
        reference.step(resident(**batch(1)).loss)
        train(model, optimizer, 1)
        streamed.wait()
        assert same(model, resident)


def test_a_rate_that_is_set_behind_backward_is_refused_where_that_used_the_old_one():
    """The layers had another rate than embedding and head."""
    model = llama(torch.bfloat16)
    streamed = streamed_of(model)
    with closing(whole(model, streamed, max_norm=None, in_backward=True)) as optimizer:
        model(**batch(0)).loss.backward()
        optimizer.param_groups[0]["lr"] = RATE / 2
        with pytest.raises(RuntimeError, match="settings, were changed after backward"):
            optimizer.step()


def test_what_is_updated_in_backward_cannot_be_dropped():
    """It would be trained on, and not be counted; a checkpoint takes it back."""
    model = llama(torch.bfloat16)
    streamed = streamed_of(model)
    with closing(whole(model, streamed, max_norm=None, in_backward=True)) as optimizer:
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(**batch(0)).loss.backward()
        optimizer.zero_grad()
        model(**batch(1)).loss.backward()
        with pytest.raises(RuntimeError, match="updated already: step, or load a checkpoint"):
            optimizer.zero_grad()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        train(model, optimizer, 1)
        streamed.wait()
        assert steps_of(optimizer) == {1}


def test_nothing_is_saved_between_backward_and_step():
    """Weights of layers are updated there, and the others are not: the model's were saved."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed_of(model), max_norm=None, in_backward=True)) as optimizer:
        model(**batch(0)).loss.backward()
        for each in (model, optimizer):
            with pytest.raises(RuntimeError, match="save after step"):
                each.state_dict()
        optimizer.step()
        model.state_dict()
