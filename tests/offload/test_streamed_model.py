"""A streamed stock Llama has the resident run's bits: forward, gradients, state, generate()."""

from contextlib import closing

import pytest
import torch
from host_training import MAX_NORM, RATE, batch, llama, same, streamed_of
from torch import nn

from overlap_recipes.offload.streamed_model import resident_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("slots", "tied"), [(1, False), (2, True), (9, False)])
def test_a_stock_loop_gives_the_resident_runs_bits(slots, tied):
    """Masks, labels, accumulation, clipping and an optimizer of torch on every parameter."""
    resident, model = (llama(tie_word_embeddings=tied) for _ in range(2))
    with closing(streamed_of(model, slots=slots)) as streamed:
        optimizers = [torch.optim.AdamW(m.parameters(), RATE) for m in (resident, model)]
        for step in range(3):
            for each in (resident, model):
                for microbatch in range(2):
                    each(**batch(2 * step + microbatch)).loss.backward()
            streamed.wait()
            for each, optimizer in zip((resident, model), optimizers, strict=True):
                nn.utils.clip_grad_norm_(each.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            assert same(model, resident)


def test_dropout_is_drawn_again_as_it_was():
    resident, model = llama(attention_dropout=0.2), llama(attention_dropout=0.2)
    resident.gradient_checkpointing_enable()
    with closing(streamed_of(model)) as streamed:
        for each in (resident, model):
            torch.manual_seed(3)
            each(**batch(0)).loss.backward()
        streamed.wait()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("budget_layers", [0, 2])
def test_generate_returns_the_resident_models_tokens(budget_layers):
    model = llama().eval()
    inputs = {name: value for name, value in batch(0).items() if name != "labels"}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    budget = budget_layers * resident_bytes(model.model.layers[0])
    with closing(streamed_of(model, budget=budget)):
        assert torch.equal(model.generate(**inputs, **options), expected)


def test_state_dicts_have_the_original_keys_and_load_both_ways():
    model, plain = llama(), llama(initializer_range=0.5)
    keys = list(model.state_dict())
    with closing(streamed_of(model)):
        assert list(model.state_dict()) == keys
        model.load_state_dict(plain.state_dict())
        with torch.no_grad():
            expected = plain(**batch(0)).logits
            assert torch.equal(model(**batch(0)).logits, expected)
        fresh = llama()
        fresh.load_state_dict(model.state_dict())
        assert same(fresh, plain)
    with torch.no_grad():
        assert torch.equal(model(**batch(0)).logits, expected), "closed, it is an ordinary model"


def test_evaluation_between_forward_and_backward_changes_nothing():
    resident, model = llama(), llama()
    resident(**batch(0)).loss.backward()
    with closing(streamed_of(model)) as streamed:
        loss = model(**batch(0)).loss
        model.eval()
        with torch.no_grad():
            model(**batch(1))
        model.train()
        loss.backward()
        streamed.wait()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_frozen_layers_have_no_gradients_and_no_backward_below_the_lowest_trained_one():
    resident, model = llama(), llama()
    for each in (resident, model):
        each.requires_grad_(False)
        each.model.layers[3].requires_grad_(True)
    resident(**batch(0)).loss.backward()
    with closing(streamed_of(model)) as streamed:
        backwards, plain = [], streamed.backward
        streamed.backward = lambda index, *rest: backwards.append(index) or plain(index, *rest)
        model(**batch(0)).loss.backward()
        streamed.wait()
        assert backwards == [4, 3] and streamed.stores == 1
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("first", [False, True])
def test_a_penalty_on_weights_goes_in_a_backward_of_its_own(first):
    """In the same one it was lost, or added to gradients that were on their way."""
    models = llama(), llama()
    with closing(streamed_of(models[0])):
        for model in models:
            model(**batch(0)).loss.backward()
            (RATE * sum(p.square().sum() for p in model.parameters())).backward()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        models[0].zero_grad()
        loss = 0 if first else models[0](**batch(0)).loss
        penalty = sum(p.square().sum() for p in models[0].parameters())
        loss = models[0](**batch(0)).loss if first else loss
        with pytest.raises(RuntimeError, match="in a backward of its own"):
            (loss + penalty).backward()


@pytest.mark.parametrize("budget_layers", [0, 1])
def test_close_gives_back_the_forward_that_a_layer_had(budget_layers):
    """It gave the class's, so that what had been put in its place was gone."""
    model = llama()
    layer = model.model.layers[0]
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
    with torch.no_grad():
        expected = model(**batch(0)).logits
        streamed = streamed_of(model, budget=budget_layers * resident_bytes(layer))
        for _ in range(2):
            streamed.close()
        assert torch.equal(model(**batch(0)).logits, expected)
    assert "forward" not in vars(model.model.layers[1])
