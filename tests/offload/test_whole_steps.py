"""Whole steps with Adam on the host have the bits of ordinary training, whatever a loop does."""

import threading
from contextlib import ExitStack, closing, nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from host_training import (
    CPU,
    LAYERS,
    MAX_NORM,
    PATIENCE_S,
    RATE,
    WIDTH,
    Resident,
    batch,
    falling,
    groups_of,
    llama,
    same,
    steps_of,
    streamed_of,
    train,
    whole,
)
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes
from overlap_recipes.offload.whole_step import HostAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("budget_layers", "tied"), [(0, False), (2, True), (LAYERS, False)])
def test_whole_steps_in_a_run_with_troubles(tied, budget_layers):
    """A schedule, a NaN batch, an evaluation, a load and a swap of weights, in mid-run."""
    options = {"tie_word_embeddings": tied}
    resident, model = llama(torch.bfloat16, **options), llama(torch.bfloat16, **options)
    budget = budget_layers * resident_bytes(model.model.layers[0])
    reference, streamed = Resident(resident), streamed_of(model, budget=budget)
    with closing(whole(model, streamed)) as optimizer:
        schedule = falling(optimizer)
        for step in range(7):
            expected, loss = resident(**batch(step)).loss, model(**batch(step)).loss
            assert torch.equal(loss, expected), step
            bad = torch.nan if step == 2 else 1
            reference.step(expected * bad)
            (loss * bad).backward()
            optimizer.step()
            schedule.step()
            if step == 3:
                with torch.no_grad():
                    logits = model(**batch(9)).logits
                    assert torch.equal(logits, resident(**batch(9)).logits)
            if step == 4:
                other = llama(torch.bfloat16, **options, initializer_range=0.05).state_dict()
                model.load_state_dict(other)
                resident.load_state_dict(other)
                for master, parameter in zip(reference.masters, reference.parameters, strict=True):
                    master.data.copy_(parameter)
            if step == 5:
                streamed.wait()
                for each in (model, resident):
                    for parameter in each.parameters():
                        parameter.data.mul_(0.5)
                optimizer.reload()
                for master, parameter in zip(reference.masters, reference.parameters, strict=True):
                    master.data.copy_(parameter)
        streamed.wait()
        assert same(model, resident)
        assert optimizer.skipped == 1


def test_two_optimizers_one_for_the_layers():
    """Embedding and head have one of torch's, which waits for the layers."""
    models = llama(torch.bfloat16), llama(torch.bfloat16)
    outside = [[m.model.embed_tokens.weight, m.lm_head.weight] for m in models]
    others = [torch.optim.SGD(parameters, lr=RATE, momentum=0.9) for parameters in outside]
    for model, parameters in zip(models, outside, strict=True):
        model.model.norm.weight.requires_grad_(False)
        [parameter.requires_grad_(False) for parameter in parameters]  # not the first one's
    resident, model = models
    reference, streamed = Resident(resident), streamed_of(model)
    with closing(whole(model, streamed)) as optimizer:
        schedule = falling(optimizer)
        [parameter.requires_grad_(True) for parameters in outside for parameter in parameters]
        for step in range(4):
            reference.step(resident(**batch(step)).loss)
            train(model, optimizer, step)
            schedule.step()
            for other in others:
                other.step()
                other.zero_grad()
        streamed.wait()
        assert same(model, resident)


def test_adapters_are_trained_in_whole_steps():
    """LoRA on a frozen base in bf16: one batch is not finite, evaluations, a schedule."""
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        model = llama(torch.bfloat16)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
        models.append(peft.get_peft_model(model, config, autocast_adapter_dtype=False))
    resident, model = models
    reference = Resident(resident)
    streamed = StreamedModel(model, model.base_model.model.model.layers, CPU)
    with closing(whole(model, streamed)) as optimizer:
        schedule = falling(optimizer)
        for step in range(5):
            bad = torch.nan if step == 2 else 1
            (model(**batch(step)).loss * bad).backward()
            reference.step(resident(**batch(step)).loss * bad)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                model(**batch(9))
        streamed.wait()
        assert same(model, resident)
        assert optimizer.skipped == 1


def test_microbatches_are_summed_in_fp32_alike_on_host_and_device():
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    for parameter in (*model.model.layers.parameters(), *resident.model.layers.parameters()):
        parameter.requires_grad_(True)
    for each in (model, resident):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(".layers." in name)
    reference, streamed = Resident(resident), streamed_of(model, gradient_dtype=torch.float32)
    with closing(whole(model, streamed)) as optimizer:
        for step in range(3):
            batches = [batch(3 * step + i) for i in range(3)]
            reference.step(*[resident(**each).loss for each in batches])
            for number, each in enumerate(batches):
                if number < 2:
                    with optimizer.no_sync():
                        model(**each).loss.backward()
                else:
                    model(**each).loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = RATE / (step + 1)
            optimizer.step()
        streamed.wait()
        assert same(model, resident)


def test_a_step_without_gradients_is_none():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        model(**batch(0)).loss.backward()
        for _ in range(2):
            optimizer.step()
        streamed.wait()
        assert steps_of(optimizer) == {1}


def test_a_closure_is_called():
    """Lightning, for one, computes the gradients in it."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:

        def closure() -> torch.Tensor:
            loss = model(**batch(0)).loss
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        streamed.wait()
        assert steps_of(optimizer) == {1}


def test_the_norm_is_of_this_steps_gradients_alone():
    """A batch that overflows in a layer, dropped before the step, is no part of the next norm."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        (model(**batch(0)).loss * torch.nan).backward()
        optimizer.zero_grad()
        model.lm_head(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        streamed.wait()
        assert steps_of(optimizer) == {0, 1} and optimizer.skipped == 0


def test_a_rate_in_a_tensor_travels_with_the_step():
    """A schedule changes it in place, while updates are still to be made."""
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    reference, streamed = Resident(resident), streamed_of(model)
    groups = [group | {"lr": torch.tensor(RATE)} for group in groups_of(model)]
    changed = threading.Event()
    with closing(HostAdamW(groups, streamed, max_norm=MAX_NORM)) as optimizer:
        plain, schedule = optimizer.host.start, falling(optimizer)

        def start(*args):
            changed.wait(PATIENCE_S)
            plain(*args)

        optimizer.host.start = start
        for step in range(2):
            reference.step(resident(**batch(step)).loss)
            changed.clear()
            train(model, optimizer, step)
            schedule.step()
            changed.set()
            streamed.wait()
        assert same(model, resident)


def test_a_loop_may_clip_by_itself():
    """As trainers do: all gradients are on the host when backward ends."""
    resident, model = llama(), llama()
    streamed, awaited, parameters = streamed_of(model), set(), list(resident.parameters())
    ordinary = torch.optim.AdamW(parameters, lr=RATE, fused=True)

    class Noted(torch.cpu.Event):
        def synchronize(self):
            awaited.add(self)

    with closing(HostAdamW(model.parameters(), streamed, lr=RATE)) as optimizer:
        streamed.host_done = {layer: Noted() for layer in range(LAYERS)}
        for step in range(3):
            awaited.clear()
            for each, steps in ((resident, ordinary), (model, optimizer)):
                each(**batch(step)).loss.backward()
                nn.utils.clip_grad_norm_(each.parameters(), MAX_NORM)
                steps.step()
                steps.zero_grad()
            assert len(awaited) == LAYERS
        streamed.wait()
        for ours, theirs in zip(model.parameters(), parameters, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_layers_that_are_left_out_are_loaded_anew():
    """A forward that began above the end of the last one found the weights of before the step."""
    model, plain = llama(torch.bfloat16), llama(torch.bfloat16)

    def loss_of(each: nn.Module, chosen: slice) -> torch.Tensor:
        kept, each.model.layers = each.model.layers, nn.ModuleList(each.model.layers[chosen])
        each.config.num_hidden_layers = len(each.model.layers)
        loss = each(**batch(0), use_cache=False).loss
        each.model.layers, each.config.num_hidden_layers = kept, LAYERS
        return loss

    upper, lower = slice(2, LAYERS), slice(0, 2)
    with closing(whole(model, streamed_of(model, slots=9))) as optimizer:
        loss_of(model, upper).backward()
        loss_of(model, lower).backward()
        optimizer.step()
        loss = loss_of(model, upper)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(loss, loss_of(plain, upper))


def test_layers_that_are_left_out_have_a_count_of_their_own():
    """Adam's bias correction was that of the steps that the others had."""
    resident, model = llama(), llama()
    ordinary = torch.optim.AdamW(resident.parameters(), lr=RATE, fused=True)
    streamed = streamed_of(model)
    with closing(HostAdamW(model.parameters(), streamed, lr=RATE)) as optimizer:
        for step in range(4):
            for each, steps in ((resident, ordinary), (model, optimizer)):
                kept, count = each.model.layers, LAYERS if step > 1 else 3
                each.model.layers, each.config.num_hidden_layers = kept[:count], count
                each(**batch(step), use_cache=False).loss.backward()
                each.model.layers = kept
                steps.step()
                steps.zero_grad()
        streamed.wait()
        assert same(model, resident)
        assert steps_of(optimizer) == {2, 4}


def test_what_the_models_zero_grad_has_dropped_is_not_trained():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        weights = deepcopy(model.state_dict())
        model(**batch(0)).loss.backward()
        model.zero_grad()
        optimizer.step()
        streamed.wait()
        assert all(map(torch.equal, model.state_dict().values(), weights.values()))


def test_what_stays_on_the_device_may_be_released_later():
    """An embedding that is frozen for the first steps was never trained after them."""
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    for each in (resident, model):
        each.model.embed_tokens.weight.requires_grad_(False)
    weight = model.model.embed_tokens.weight
    with closing(HostAdamW(model.parameters(), streamed := streamed_of(model))) as optimizer:
        train(model, optimizer, 0)
        before = weight.clone()
        weight.requires_grad_(True)
        train(model, optimizer, 1)
        streamed.wait()
        assert not torch.equal(weight, before)
        assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize(("kind", "budget_layers"), [("streamed", 0), ("whole", 2)])
def test_one_autocast_around_all_steps_casts_the_weights_of_now(kind, budget_layers):
    """Its cache kept casts of the head of the first step, and of layers on the device."""
    found, inputs = [], batch(9)
    for around in (True, False):
        model = llama()
        budget = budget_layers * resident_bytes(model.model.layers[0])
        with closing(streamed_of(model, budget=budget)) as streamed, ExitStack() as block:
            every = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=around)
            parameters = model.parameters()
            if kind == "whole":
                optimizer = block.enter_context(closing(HostAdamW(parameters, streamed, lr=RATE)))
            else:
                optimizer = torch.optim.AdamW(parameters, lr=RATE)
            with every() if around else nullcontext():
                for step in range(3):
                    with nullcontext() if around else every():
                        loss = model(**batch(step)).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                streamed.wait()
                with torch.no_grad():
                    model.lm_head.weight.mul_(0.5)
                    with nullcontext() if around else every():
                        found.append(model(**inputs).logits)
            found.append([p.clone() for p in model.parameters()])
    assert torch.equal(found[0], found[2]) and all(map(torch.equal, found[1], found[3]))
