"""What a streamed model cannot do as the resident one does is an error, not other bits."""

from contextlib import closing
from copy import deepcopy
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from host_training import CPU, batch, llama, streamed_of, transformers
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


class Named(NamedTuple):
    x: torch.Tensor


@pytest.mark.parametrize("kind", [Named, lambda x: transformers.utils.ModelOutput(x=x), Mock])
def test_layers_whose_result_is_no_plain_nest_are_refused(kind):
    """Nothing of them was trained: gradients stayed on the device."""

    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return kind(x=y) if kind is Mock else kind(y)

    layers = nn.ModuleList([Layer(8, 8)])
    with closing(StreamedModel(layers, layers, CPU)), pytest.raises(TypeError, match="layer"):
        layers[0](torch.ones(2, 8))


def test_a_second_backward_of_a_forward_says_what_it_needs():
    model = llama(torch.bfloat16)
    with closing(streamed_of(model)):
        loss = model(**batch(0)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="run forward again"):
            loss.backward()


@pytest.mark.parametrize("with_the_rest", [False, True])
def test_parameters_that_share_memory_are_refused(with_the_rest):
    """They were apart, and trained apart, in silence."""
    model = llama()
    layers = model.model.layers
    other = model if with_the_rest else layers[3].mlp
    weight = layers[1].mlp.up_proj.weight.data
    other.copied_from = nn.Parameter(weight[3:])
    with pytest.raises(ValueError, match="up_proj.weight and .*copied_from are two parameters in"):
        streamed_of(model)
    other.copied_from = nn.Parameter(weight[3:].clone())
    streamed_of(model).close()


def test_weights_in_other_memory_are_refused():
    """Trained on, they would be the old ones."""
    for move in (
        nn.Module.float,
        lambda m: m.load_state_dict(deepcopy(m.state_dict()), assign=True),
    ):
        model = llama(torch.bfloat16)
        with closing(streamed_of(model)):
            move(model.model.layers[2])
            with pytest.raises(RuntimeError, match="its memory, or"):
                model(**batch(0))


def test_weights_in_other_memory_are_not_evaluated_in_silence():
    """Logits were those of the old weights."""
    model = llama()
    with closing(streamed_of(model)):
        model.load_state_dict(llama(initializer_range=0.5).state_dict(), assign=True)
        with torch.no_grad(), pytest.raises(RuntimeError, match="its memory, or"):
            model(**batch(0))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_with_what_a_hook_took_out_of_a_layer_is_refused(frozen):
    """Its gradients went nowhere."""
    model, kept = llama(), []
    model.model.embed_tokens.requires_grad_(not frozen)
    with closing(streamed_of(model)):
        mlp = model.model.layers[0].mlp
        mlp.register_forward_hook(lambda module, args, result: kept.append(result))
        model(**batch(0))
        with pytest.raises(RuntimeError, match="a layer must return"):
            kept[0].square().mean().backward()


def test_hooks_of_parameters_are_refused():
    """They did not run."""
    model = llama()
    weight = model.model.layers[1].mlp.up_proj.weight
    with closing(streamed_of(model)):
        for add in (weight.register_hook, weight.register_post_accumulate_grad_hook):
            hook = add(lambda tensor: None)
            with pytest.raises(RuntimeError, match="hooks do not run here"):
                model(**batch(0))
            hook.remove()
        model(**batch(0)).loss.backward()


def test_a_parameter_that_comes_later_is_refused():
    model = llama()
    with closing(streamed_of(model)):
        model.model.layers[1].mlp.scale = nn.Parameter(torch.ones(()))
        with pytest.raises(RuntimeError, match="mlp.scale: its memory, or"):
            model(**batch(0))


def test_a_copy_of_a_streamed_model_is_refused():
    """It ran the layers that it was copied from: an average of weights was never evaluated."""
    model = llama()
    with closing(streamed_of(model)), pytest.raises(TypeError, match=r"state_dict\(\)"):
        torch.optim.swa_utils.AveragedModel(model)
    deepcopy(model)


class Layers(nn.Module):
    """Three linear layers in a loop that ``between`` looks into."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(8, 8) for _ in range(3))
        self.by = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, *more) -> torch.Tensor:
        for layer in self.layers:
            layer.by = [2 * self.by]
            x = layer(x, *more)
        return x.square().sum()


class Scaled(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale


class Reading(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.by[0]


def test_an_argument_that_is_changed_before_backward_is_refused():
    """Layers ran again with what it was then."""
    model, scale = Layers(Scaled), torch.ones(8)
    with closing(StreamedModel(model, model.layers, CPU)):
        loss = model(torch.ones(2, 8), scale)
        scale.mul_(2)
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            loss.backward()


class Remembering:
    """A cache of another kind than transformers'."""

    def __init__(self) -> None:
        self.keys = {}


class Remembered(nn.Linear):
    def forward(self, x, *, memory):
        y = super().forward(x)
        memory.keys[id(self)] = y.detach()
        return y


@pytest.mark.parametrize("budget_layers", [0, 3])
def test_an_object_that_a_layer_changes_is_refused_while_it_is_trained(budget_layers):
    """Both runs changed it."""
    layer = Remembered(8, 8)
    budget = budget_layers * resident_bytes(layer)
    x, memory = torch.ones(2, 8), Remembering()
    with closing(StreamedModel(layer, [layer], CPU, budget=budget)):
        with pytest.raises(TypeError, match=r"\(Remembering\).*use_cache=False.*no_grad"):
            layer(x, memory=memory)
        with torch.no_grad():
            layer(x, memory=memory)
    assert list(memory.keys) == [id(layer)]


def test_a_trained_tensor_that_is_no_argument_is_refused():
    """It got no gradient."""
    model = Layers(Reading)
    with closing(StreamedModel(model, model.layers, CPU)):
        with pytest.raises(RuntimeError, match="pass it as an argument"):
            model(torch.ones(2, 8))
        model.by.requires_grad_(False)
        model(torch.ones(2, 8)).backward()


def test_a_parameter_shared_with_what_is_no_layer_is_refused():
    """It lost the other module's gradient."""
    model = llama()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match="share a parameter"):
        streamed_of(model, budget=resident_bytes(model.model.layers[0]))


def test_gradients_of_gradients_are_refused():
    """They were taken for constants: a penalty had no effect."""
    model = llama(attn_implementation="eager")
    with closing(streamed_of(model)):
        inputs = model.get_input_embeddings()(batch(0)["input_ids"]).detach().requires_grad_()
        loss = model(inputs_embeds=inputs, labels=batch(0)["labels"]).loss
        gradient = torch.autograd.grad(loss, inputs, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (model(**batch(1)).loss + gradient.square().sum()).backward()
