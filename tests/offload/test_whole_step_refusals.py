"""What whole steps would train otherwise than a loop means is refused."""

from contextlib import closing

import pytest
import torch
from host_training import MAX_NORM, batch, groups_of, llama, streamed_of, whole
from torch import nn

from overlap_recipes.offload.whole_step import HostAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_group_that_comes_later_is_refused():
    model = llama(torch.bfloat16)
    model.lm_head.weight.requires_grad_(False)
    optimizer = whole(model, streamed_of(model))
    with closing(optimizer), pytest.raises(ValueError, match="make another optimizer"):
        optimizer.add_param_group({"params": [model.lm_head.weight]})


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_that_something_else_changes_are_refused(in_backward):
    """A loop's own clipping reads them on their way, and would clip what ``max_norm`` clips."""
    model = llama(torch.bfloat16)
    options = {"in_backward": in_backward, "max_norm": None if in_backward else MAX_NORM}
    optimizer = whole(model, streamed := streamed_of(model), **options)
    with closing(optimizer):
        model(**batch(0)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="see max_norm"):
            optimizer.step()
        streamed.wait()


def test_a_step_behind_no_sync_alone_is_refused():
    """It clipped by the norm of embedding and head, and averaged nothing else."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed_of(model))) as optimizer:
        model(**batch(0)).loss.backward()
        with optimizer.no_sync():
            model(**batch(1)).loss.backward()
        with pytest.raises(RuntimeError, match="run it outside"):
            optimizer.step()


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("behind", ["step", "backward"])
def test_gradients_that_are_exchanged_are_refused(gone, behind):
    """The layer was trained with what had been there before."""
    model = llama()
    with closing(whole(model, streamed_of(model), max_norm=None)) as optimizer:
        model(**batch(0)).loss.backward()
        weight = model.model.layers[2].mlp.up_proj.weight
        weight.grad = None if gone else torch.ones_like(weight.grad)
        with pytest.raises(RuntimeError, match="exchanged: change it in place"):
            optimizer.step() if behind == "step" else model(**batch(1)).loss.backward()


@pytest.mark.parametrize("behind", ["step", "backward"])
def test_gradients_that_are_set_by_hand_are_refused(behind):
    """Layers were not trained, or what was set was overwritten."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed_of(model))) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RuntimeError, match="exchanged: change it in place"):
            optimizer.step() if behind == "step" else model(**batch(1)).loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_changed_before_backward_are_refused(dtype):
    """A graph that was kept over a step got gradients of two sets of weights."""
    model = llama(dtype)
    model.model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    model.model.norm.requires_grad_(False)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        kept = model(**batch(0)).loss
        model(**batch(1)).loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            kept.backward()
        optimizer.zero_grad()
        kept = model(**batch(0)).loss
        model.model.layers[1].load_state_dict(model.model.layers[1].state_dict())
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            kept.backward()
        streamed.wait()


def test_a_model_has_one_optimizer():
    """The second made masters of weights that the first was about to change."""
    model = llama(torch.bfloat16)
    first = whole(model, streamed := streamed_of(model))
    with closing(first), pytest.raises(ValueError, match="has an optimizer: close it"):
        whole(model, streamed)


@pytest.mark.parametrize("change", [False, True])
def test_what_is_trained_does_not_change_in_silence(change):
    """A parameter that is frozen later would be trained on, one that is released later never."""
    model = llama(torch.bfloat16)
    weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_(change)
    with closing(whole(model, streamed_of(model))):
        weight.requires_grad_(not change)
        with torch.no_grad():
            model(**batch(0))
        with pytest.raises(RuntimeError, match="what is trained, has changed"):
            model(**batch(0))
        weight.requires_grad_(change)
        model(**batch(0)).loss.backward()


def test_parameters_that_float32_does_not_hold_are_refused():
    """The first backward raised, of a norm's dtype."""
    model = llama(torch.float64)
    refused = pytest.raises(ValueError, match="computes in float32.* torch.float64")
    with closing(streamed_of(model)) as streamed, refused:
        whole(model, streamed)


def test_an_adamw_that_this_is_not_is_refused():
    model = llama(torch.bfloat16)
    with closing(streamed_of(model)) as streamed:
        for unknown in ({"amsgrad": True}, {"learning_rate": 1.0}):
            with pytest.raises(ValueError, match=f"no setting .*{[*unknown][0]}"):
                whole(model, streamed, **unknown)
        groups = [group | {"maximize": True} for group in groups_of(model)]
        with pytest.raises(ValueError, match="no setting .*maximize"):
            HostAdamW(groups, streamed)
        groups = [group | {"maximize": False, "name": "mine"} for group in groups_of(model)]
        HostAdamW(groups, streamed).host.close()


def test_bad_arguments_are_refused():
    model = llama()
    with closing(streamed_of(model)) as streamed:
        with pytest.raises(ValueError, match="drop max_norm"):
            whole(model, streamed, in_backward=True)
        with pytest.raises(ValueError, match="all parameters that are trained"):
            HostAdamW(model.lm_head.parameters(), streamed)
    with pytest.raises(ValueError, match="slots must be 1 or more, not 0"):
        streamed_of(llama(), slots=0)
