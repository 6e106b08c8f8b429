"""The state of Adam on the host and its masters, saved and loaded, from elsewhere and back."""

import threading
from contextlib import closing
from copy import deepcopy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from host_training import (
    RATE,
    WIDTH,
    WORDS,
    batch,
    llama,
    same,
    steps_of,
    streamed_of,
    train,
    whole,
)

from overlap_recipes.checkpoint import TrainingState, load
from overlap_recipes.offload.whole_step import HostAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


def test_parts_of_a_layer_are_saved_and_loaded_behind_their_update():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        plain, part = optimizer.host.start, model.model.layers[3].self_attn

        def start(*args):
            threading.Event().wait(0.1)
            plain(*args)

        optimizer.host.start = start
        train(model, optimizer, 0)
        found = {name: tensor.clone() for name, tensor in part.state_dict().items()}
        streamed.wait()
        assert all(torch.equal(found[name], value) for name, value in part.state_dict().items())
        train(model, optimizer, 1)
        part.load_state_dict({name: torch.ones_like(value) for name, value in found.items()})
        streamed.wait()
        for parameter in part.parameters():
            assert (parameter == 1).all() and (optimizer.state[parameter]["master"] == 1).all()


def test_a_load_of_some_weights_keeps_the_masters_of_the_others():
    """They were rounded to what the weights show."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed_of(model))) as optimizer:
        train(model, optimizer, 0)
        saved = deepcopy(optimizer.state_dict())["state"]
        model.load_state_dict({"lm_head.weight": torch.zeros(WORDS, WIDTH)}, strict=False)
        for number, parameter in enumerate(optimizer.group_of):
            master = optimizer.state[parameter]["master"]
            kept = parameter is not model.lm_head.weight
            assert torch.equal(master, saved[number]["master"] if kept else 0 * master)


def test_the_state_of_other_parameters_is_refused():
    """It would be loaded in part."""
    models = llama(torch.bfloat16), llama(torch.bfloat16)
    models[0].lm_head.weight.requires_grad_(False)
    with (
        closing(whole(models[0], streamed_of(models[0]))) as fewer,
        closing(whole(models[1], streamed_of(models[1]))) as more,
        pytest.raises(ValueError, match="other parameters"),
    ):
        more.load_state_dict(fewer.state_dict())


def test_states_by_name_are_loaded():
    """As torch.distributed.checkpoint has them: nothing of them was."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        found = []
        train(model, optimizer, 0)
        weights, state = deepcopy(get_state_dict(model, optimizer))
        for _ in range(2):
            train(model, optimizer, 1)
            streamed.wait()
            found.append([parameter.clone() for parameter in model.parameters()])
            options = {"model_state_dict": weights, "optim_state_dict": state}
            set_state_dict(model, optimizer, **options)
        assert all(map(torch.equal, *found))


def test_states_go_to_an_adamw_of_torch_and_come_back():
    """There, one tensor that counted the steps of all parameters was counted up by each."""
    resident, model = llama(), llama()
    ordinary = torch.optim.AdamW(resident.parameters(), lr=RATE, fused=True)
    with closing(HostAdamW(model.parameters(), streamed := streamed_of(model))) as optimizer:
        for _ in range(2):
            model.load_state_dict(resident.state_dict())
            optimizer.load_state_dict(deepcopy(ordinary.state_dict()))
            for each, steps in ((model, optimizer), (resident, ordinary)):
                each(**batch(0)).loss.backward()
                steps.step()
                steps.zero_grad()
            streamed.wait()
            assert same(model, resident)
            ordinary.load_state_dict(deepcopy(optimizer.state_dict()))


def test_a_state_without_moments_makes_them_zeros():
    """As one of before the first step: those of now stayed."""
    model = llama()
    fresh = torch.optim.AdamW(llama().parameters(), lr=RATE).state_dict()
    with closing(HostAdamW(model.parameters(), streamed_of(model))) as optimizer:
        train(model, optimizer, 0)
        optimizer.load_state_dict(fresh)
        assert steps_of(optimizer) == {0}
        for kept in optimizer.state.values():
            assert not kept["exp_avg"].any() and not kept["exp_avg_sq"].any()


@pytest.mark.parametrize(
    "other",
    [
        lambda p: torch.optim.AdamW(p, maximize=True),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, momentum=0.9),
    ],
)
def test_the_state_of_another_optimizer_is_refused(other):
    """Training went on without its settings; nothing is loaded of it."""
    model = llama()
    with closing(HostAdamW(model.parameters(), streamed_of(model), lr=RATE)) as optimizer:
        with pytest.raises(ValueError, match="has no setting"):
            optimizer.load_state_dict(other(llama().parameters()).state_dict())
        assert optimizer.param_groups[0]["lr"] == RATE


def test_gradients_stay_when_a_state_is_loaded():
    """As they do anywhere: the step behind it trained nothing."""
    model = llama()
    with closing(HostAdamW(model.parameters(), streamed_of(model))) as optimizer:
        model(**batch(0)).loss.backward()
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        optimizer.step()
        assert steps_of(optimizer) == {1}


@pytest.mark.parametrize(("dtype", "steps_before"), [(torch.float32, 2), (torch.bfloat16, 0)])
def test_a_job_with_adam_on_the_host_is_saved_and_loaded(tmp_path, dtype, steps_before):
    """DCP would give it a state without a name; a load raised KeyError: 'step'."""
    models = [llama(dtype) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(1)
    with (
        closing(whole(models[0], streams := streamed_of(models[0]))) as first,
        closing(whole(models[1], others := streamed_of(models[1]))) as second,
    ):
        for step in range(steps_before):
            models[0](**batch(step)).loss.backward()
            first.step()
        streams.wait()
        dcp.save({"app": TrainingState(models[0], first)}, checkpoint_id=tmp_path, no_dist=True)
        load({"app": TrainingState(models[1], second)}, tmp_path)
        assert same(*models)
        for model, optimizer in zip(models, (first, second), strict=True):
            train(model, optimizer, 2)
        streams.wait()
        others.wait()
        assert same(*models)
        assert steps_of(second) == {steps_before + 1}
