"""Weights, gradients and Adam on the host: a stock Llama in a stock loop, and clear errors."""

import gc
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes_source" / "offload"))

from overlap_recipes.offload import adam_in_pieces as pieces
from overlap_recipes.offload import one_copy_a_host
from overlap_recipes.offload.host_adam import HostUpdates
from overlap_recipes.offload.host_layers import ALIGNMENT, HostBuffer, HostLayer, move_to_host
from overlap_recipes.offload.one_copy_a_host import FAILED, Host, SharedAdamW, SharedModel
from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes
from overlap_recipes.offload.weight_streaming import StreamedLayers
from overlap_recipes.offload.whole_step import HostAdamW

transformers = pytest.importorskip("transformers")

PAGES = Path(__file__).parents[2] / "recipes_source" / "offload"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYERS, WORDS, WIDTH = 5, 96, 32
RATE, MAX_NORM = 1e-2, 0.5
PATIENCE_S = 60  # only a failing test waits this long


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    config = transformers.LlamaConfig(**sizes | options)
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Tokens, labels, and a mask: the first sequence is padded on the left."""
    ids = torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def streamed_of(model: nn.Module, **options) -> StreamedModel:
    return StreamedModel(model, model.model.layers, CPU, **options)


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(map(torch.equal, ours.parameters(), theirs.parameters()))


def groups_of(model: nn.Module) -> list[dict]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def steps_of(optimizer: torch.optim.Optimizer) -> set[float]:
    return {kept["step"].item() for kept in optimizer.state_dict()["state"].values()}


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


# The model's own forward


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}])
def test_a_stock_loop_gives_the_resident_runs_bits(options, slots):
    """Masks, labels, accumulation, clipping and an optimizer of torch on every parameter."""
    resident, model = llama(**options), llama(**options)
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


def test_a_cache_is_not_continued_where_a_layer_runs_twice():
    model = llama()
    ids = batch(0)["input_ids"]
    with closing(streamed_of(model)):
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="cannot go on with a cache: use torch.no_grad"):
            model(ids, past_key_values=cache)


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


def test_adapters_in_fp32_on_a_base_in_bf16():
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0}
    models = []
    for _ in range(2):
        model = llama(torch.bfloat16)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float() + 0.01
        models.append(adapted)
    resident, model = models
    layers = model.base_model.model.model.layers
    inputs = batch(0)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        resident(**inputs).loss.backward()
    with closing(StreamedModel(model, layers, CPU)) as streamed:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            model(**inputs).loss.backward()
        streamed.wait()
        pairs = list(zip(model.parameters(), resident.parameters(), strict=True))
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs if b.requires_grad)
        saved = peft.get_peft_model_state_dict(model)
        home = sum(buffer.flat.nbytes for layer in streamed.layers for buffer in layer.gradients)
        assert sum(t.nbytes for t in saved.values()) <= home < 0.2 * sum(p.nbytes for p, _ in pairs)


# Whole steps


class Resident:
    """Ordinary training in bf16: fp32 masters, one fused AdamW, one norm of all gradients."""

    def __init__(self, model: nn.Module, max_norm: float | None = MAX_NORM) -> None:
        self.model, self.max_norm, groups = model, max_norm, groups_of(model)
        self.parameters = [p for group in groups for p in group["params"]]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        taken = iter(self.masters)
        for group in groups:
            group["params"] = [next(taken) for _ in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
        self.schedule = falling(self.optimizer)

    def step(self, *losses: torch.Tensor, mean_in: torch.dtype | None = None) -> None:
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        for loss in losses:
            loss.backward()
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad += parameter.grad.float()
                parameter.grad = None
        for master in self.masters if mean_in else ():
            master.grad = (master.grad / len(losses)).to(mean_in).float()
        norm = torch.linalg.vector_norm(torch.stack([m.grad.norm() for m in self.masters]))
        if norm.isfinite():
            clip_grads_with_norm_(self.masters, self.max_norm or math.inf, norm)
            self.optimizer.step()
        self.schedule.step()
        self.set_weights()

    def set_weights(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.data.copy_(master)


def whole(model: nn.Module, streamed: StreamedModel, **options) -> HostAdamW:
    options = {"lr": RATE, "max_norm": MAX_NORM} | options
    return HostAdamW(groups_of(model), streamed, **options)


@pytest.mark.parametrize("budget_layers", [0, 2, LAYERS])
@pytest.mark.parametrize("tied", [False, True])
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
            model(**batch(step)).loss.backward()
            optimizer.step()
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


def test_a_bad_batch_leaves_every_weight_and_moment_as_it_was():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        for step in range(2):
            model(**batch(step)).loss.backward()
            optimizer.step()
        before = deepcopy(optimizer.state_dict()["state"])
        weights = [parameter.clone() for parameter in model.parameters()]
        (model(**batch(2)).loss * torch.inf).backward()
        optimizer.step()
        streamed.wait()
        assert all(map(torch.equal, model.parameters(), weights))
        for number, kept in optimizer.state_dict()["state"].items():
            assert all(torch.equal(kept[name], value) for name, value in before[number].items())


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


def test_updates_in_backward_give_the_bits_of_updates_after_it():
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    reference, streamed = Resident(resident, None), streamed_of(model)
    with closing(whole(model, streamed, max_norm=None, in_backward=True)) as optimizer:
        schedule = falling(optimizer)
        for step in range(4):
            reference.step(resident(**batch(step)).loss)
            model(**batch(step)).loss.backward()
            optimizer.step()
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
        model(**batch(0)).loss.backward()
        optimizer.step()
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
        model(**batch(1)).loss.backward()
        optimizer.step()
        streamed.wait()
        assert same(model, resident)


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
            if host.steps[0] and index == LAYERS - 2:
                began.set()
            return plain(index, *args)

        model(**batch(0)).loss.backward()
        host.update_block, streamed.run = update_block, run
        optimizer.step()
        while not host.steps[0]:
            threading.Event().wait(0.01)
        model(**batch(1))
        streamed.wait()
    assert waited and all(waited)


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


def test_a_group_that_comes_later_is_refused():
    model = llama(torch.bfloat16)
    model.lm_head.weight.requires_grad_(False)
    optimizer = whole(model, streamed_of(model))
    with closing(optimizer), pytest.raises(ValueError, match="make another optimizer"):
        optimizer.add_param_group({"params": [model.lm_head.weight]})


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


def test_settings_travel_with_the_step():
    """What is changed behind ``step()`` is the next step's, while updates are still to be made."""
    model = llama(torch.bfloat16)
    held = threading.Event()
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        plain = optimizer.host.start

        def start(*args):
            held.wait(PATIENCE_S)
            plain(*args)

        optimizer.host.start = start
        weights = [parameter.clone() for parameter in model.model.layers.parameters()]
        model(**batch(0)).loss.backward()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        optimizer.step()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1.0
        held.set()
        streamed.wait()
        assert all(map(torch.equal, model.model.layers.parameters(), weights))


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
            model(**batch(step)).loss.backward()
            optimizer.step()
            schedule.step()
            changed.set()
            streamed.wait()
        assert same(model, resident)


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


def test_a_model_that_is_compiled_runs_its_layers_as_they_are():
    model, resident = llama(), llama()
    with closing(streamed_of(model)) as streamed:
        torch.compile(model, backend="eager")(**batch(0)).loss.backward()
        resident(**batch(0)).loss.backward()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert streamed.stores == LAYERS


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


def test_parts_of_a_layer_are_saved_and_loaded_behind_their_update():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        plain, part = optimizer.host.start, model.model.layers[3].self_attn

        def start(*args):
            threading.Event().wait(0.1)
            plain(*args)

        optimizer.host.start = start
        model(**batch(0)).loss.backward()
        optimizer.step()
        found = {name: tensor.clone() for name, tensor in part.state_dict().items()}
        streamed.wait()
        assert all(torch.equal(found[name], value) for name, value in part.state_dict().items())
        model(**batch(1)).loss.backward()
        optimizer.step()
        part.load_state_dict({name: torch.ones_like(value) for name, value in found.items()})
        streamed.wait()
        for parameter in part.parameters():
            assert (parameter == 1).all() and (optimizer.state[parameter]["master"] == 1).all()


def test_a_step_behind_no_sync_alone_is_refused():
    """It clipped by the norm of embedding and head, and averaged nothing else."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed_of(model))) as optimizer:
        model(**batch(0)).loss.backward()
        with optimizer.no_sync():
            model(**batch(1)).loss.backward()
        with pytest.raises(RuntimeError, match="run it outside"):
            optimizer.step()


def test_a_rate_that_is_set_behind_backward_is_refused_where_that_used_the_old_one():
    """The layers had another rate than embedding and head."""
    model = llama(torch.bfloat16)
    streamed = streamed_of(model)
    with closing(whole(model, streamed, max_norm=None, in_backward=True)) as optimizer:
        model(**batch(0)).loss.backward()
        optimizer.param_groups[0]["lr"] = RATE / 2
        with pytest.raises(RuntimeError, match="settings, were changed behind backward"):
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


def test_a_model_has_one_optimizer():
    """The second made masters of weights that the first was about to change."""
    model = llama(torch.bfloat16)
    first = whole(model, streamed := streamed_of(model))
    with closing(first), pytest.raises(ValueError, match="has an optimizer: close it"):
        whole(model, streamed)


def test_gradients_of_inputs_alone_leave_those_of_the_weights():
    """They were added to what the next backward left."""
    models = llama(), llama()
    with closing(streamed_of(models[0])):
        for model in models:
            inputs = model.get_input_embeddings()(batch(0)["input_ids"]).detach().requires_grad_()
            loss = model(inputs_embeds=inputs, labels=batch(0)["labels"]).loss
            model.found = torch.autograd.grad(loss, inputs)[0]
            assert all(p.grad is None for p in model.parameters())
            model(**batch(1)).loss.backward()
        assert torch.equal(models[0].found, models[1].found)
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


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


def test_a_load_of_some_weights_keeps_the_masters_of_the_others():
    """They were rounded to what the weights show."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed_of(model))) as optimizer:
        model(**batch(0)).loss.backward()
        optimizer.step()
        saved = deepcopy(optimizer.state_dict())["state"]
        model.load_state_dict({"lm_head.weight": torch.zeros(WORDS, WIDTH)}, strict=False)
        for number, parameter in enumerate(optimizer.group_of):
            master = optimizer.state[parameter]["master"]
            kept = parameter is not model.lm_head.weight
            assert torch.equal(master, saved[number]["master"] if kept else 0 * master)


def test_what_the_models_zero_grad_has_dropped_is_not_trained():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        weights = deepcopy(model.state_dict())
        model(**batch(0)).loss.backward()
        model.zero_grad()
        optimizer.step()
        streamed.wait()
        assert all(map(torch.equal, model.state_dict().values(), weights.values()))


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
        model(**batch(1)).loss.backward()
        optimizer.step()
        streamed.wait()
        assert steps_of(optimizer) == {1}


def test_a_second_backward_of_a_forward_says_what_it_needs():
    model = llama(torch.bfloat16)
    with closing(streamed_of(model)):
        loss = model(**batch(0)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="run forward again"):
            loss.backward()


def test_what_stays_on_the_device_may_be_released_later():
    """An embedding that is frozen for the first steps was never trained after them."""
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    for each in (resident, model):
        each.model.embed_tokens.weight.requires_grad_(False)
    weight = model.model.embed_tokens.weight
    with closing(HostAdamW(model.parameters(), streamed := streamed_of(model))) as optimizer:
        model(**batch(0)).loss.backward()
        optimizer.step()
        before = weight.clone()
        weight.requires_grad_(True)
        model(**batch(1)).loss.backward()
        optimizer.step()
        streamed.wait()
        assert not torch.equal(weight, before)
        assert optimizer.state[weight]["step"] == 1


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


def test_a_step_that_fails_leaves_nobody_waiting(monkeypatch):
    """Where the device has no more memory, say: the next forward waited for ever."""
    model = llama(torch.bfloat16)
    for in_backward in (False, True):
        options = {"in_backward": in_backward, "max_norm": None}
        optimizer = whole(model, streamed_of(model), **options)
        with closing(optimizer):
            monkeypatch.setattr(pieces, "to_host", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(**batch(0)).loss.backward()
                optimizer.step()
            assert not optimizer.host.updates
            model(**batch(0))
            monkeypatch.undo()
        model.zero_grad()


def test_the_optimizers_state_is_saved_and_loaded():
    models = [llama(torch.bfloat16) for _ in range(2)]
    with (
        closing(whole(models[0], streams := streamed_of(models[0]))) as first,
        closing(whole(models[1], others := streamed_of(models[1]))) as second,
    ):
        for step in range(2):
            models[0](**batch(step)).loss.backward()
            first.step()
        second.load_state_dict(deepcopy(first.state_dict()))
        assert same(*models)
        for model, optimizer in zip(models, (first, second), strict=True):
            model(**batch(2)).loss.backward()
            optimizer.step()
        streams.wait()
        others.wait()
        assert same(*models)


def test_what_a_thread_raises_reaches_the_training_thread():
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        optimizer.host.blocks[1][0] = None
        model(**batch(0)).loss.backward()
        optimizer.step()
        for _ in range(2):
            with pytest.raises(TypeError):
                streamed.wait()
        with pytest.raises(TypeError):
            model(**batch(1))
        optimizer.host.forget()


def test_what_a_thread_raises_is_raised_by_close():
    """And nothing is left open by it."""
    model = llama(torch.bfloat16)
    optimizer = whole(model, streamed_of(model))
    optimizer.host.blocks[1][0] = None
    model(**batch(0)).loss.backward()
    optimizer.step()
    with pytest.raises(TypeError):
        optimizer.close()
    model(**batch(1)).loss.backward()
    with pytest.raises(RuntimeError, match="this model is closed"):
        optimizer.step()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_without_fp32_state_forgets_small_changes(dtype):
    """What whole_step.py says of rows with bf16 moments; rates and betas as in the benchmark."""
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0, fused=True)
    for step in range(2000):
        weight.grad = torch.full_like(weight, 1.0 if step < 100 else 0.1)
        optimizer.step()
        if step == 99:
            large = optimizer.state[weight]["exp_avg_sq"][0].item()
    small = optimizer.state[weight]["exp_avg_sq"][0].item()
    assert small < large / 4 if dtype == torch.float32 else small == large
    assert (weight < 0.92).all() if dtype == torch.float32 else (weight == 1).all()


# Programs of a stranger: the resident run's bits, or an error


def test_a_cache_that_comes_by_position_is_left_out():
    """GPT-2's layers get it so, and appended to it twice: the mask was too small."""
    torch.manual_seed(0)
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    resident = transformers.GPT2LMHeadModel(config)
    model = deepcopy(resident)
    with closing(StreamedModel(model, model.transformer.h, CPU)):
        for each in (resident, model):
            each(**batch(0)).loss.backward()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


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


def test_weights_in_other_memory_are_not_evaluated_in_silence():
    """Logits were those of the old weights."""
    model = llama()
    with closing(streamed_of(model)):
        model.load_state_dict(llama(initializer_range=0.5).state_dict(), assign=True)
        with torch.no_grad(), pytest.raises(RuntimeError, match="its memory, or"):
            model(**batch(0))


def test_a_parameter_that_comes_later_is_refused():
    model = llama()
    with closing(streamed_of(model)):
        model.model.layers[1].mlp.scale = nn.Parameter(torch.ones(()))
        with pytest.raises(RuntimeError, match="mlp.scale: its memory, or"):
            model(**batch(0))


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


class Noting(nn.Linear):
    def forward(self, x, found):
        found.append(super().forward(x))
        return found[-1]


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


def test_tensors_that_a_layer_puts_into_a_list_are_refused():
    """It had a copy of the list: the loop found none of them."""
    model = Layers(Noting)
    with closing(StreamedModel(model, model.layers, CPU)), pytest.raises(TypeError, match="return"):
        model(torch.ones(2, 8), [])


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


@pytest.mark.parametrize("behind", ["step", "backward"])
def test_gradients_that_are_set_by_hand_are_refused(behind):
    """Layers were not trained, or what was set was overwritten."""
    model = llama(torch.bfloat16)
    with closing(whole(model, streamed_of(model))) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RuntimeError, match="exchanged: change it in place"):
            optimizer.step() if behind == "step" else model(**batch(1)).loss.backward()


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
        model(**batch(0)).loss.backward()
        optimizer.step()
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
        model(**batch(0)).loss.backward()
        optimizer.step()
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
        model(**batch(0)).loss.backward()
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            host.wait()
        assert ended == [False]
        host.forget()


@pytest.mark.parametrize("kind", ["streamed", "whole"])
@pytest.mark.parametrize("budget_layers", [0, 2])
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


def test_the_default_dtype_has_no_effect():
    model, resident = llama(torch.bfloat16), llama(torch.bfloat16)
    reference = Resident(resident)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with closing(whole(model, streamed := streamed_of(model))) as optimizer:
            model(**batch(0)).loss.backward()
            optimizer.step()
            streamed.wait()
    finally:
        torch.set_default_dtype(torch.float32)
    reference.step(resident(**batch(0)).loss)
    assert same(model, resident)


# The optimizer's state, from elsewhere and to elsewhere


def test_states_by_name_are_loaded():
    """As torch.distributed.checkpoint has them: nothing of them was."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = llama(torch.bfloat16)
    with closing(whole(model, streamed := streamed_of(model))) as optimizer:
        found = []
        model(**batch(0)).loss.backward()
        optimizer.step()
        weights, state = deepcopy(get_state_dict(model, optimizer))
        for _ in range(2):
            model(**batch(1)).loss.backward()
            optimizer.step()
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
        model(**batch(0)).loss.backward()
        optimizer.step()
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


def test_a_rate_is_not_shared_with_the_optimizer_that_it_was_loaded_from():
    """A schedule changes a rate in a tensor in place."""
    models = llama(), llama()
    groups = [[{"params": [*m.parameters()], "lr": torch.tensor(RATE)}] for m in models]
    with (
        closing(HostAdamW(groups[0], streamed_of(models[0]))) as first,
        closing(HostAdamW(groups[1], streamed_of(models[1]))) as second,
    ):
        second.load_state_dict(first.state_dict())
        first.param_groups[0]["lr"].fill_(0.0)
        assert second.param_groups[0]["lr"] == RATE


# Ranks of one host


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_layer_is_loaded_when_all_ranks_of_the_host_have_updated_it():
    """A second rank is played: it ends its part of layer 0 late, and fails in layer 1."""
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    with closing(SharedAdamW(groups_of(model), streamed, lr=RATE)) as optimizer:
        host, waited = optimizer.host, threading.Event()
        host.done = torch.zeros(LAYERS, 2, dtype=torch.int64)
        model(**batch(0)).loss.backward()
        optimizer.step()

        def second_rank() -> None:
            HostUpdates.wait(host)  # the first rank's part is done
            waited.set()
            host.done[0, 1] = 1

        late = threading.Thread(target=second_rank)
        late.start()
        host.await_layer(0)
        assert waited.is_set()
        late.join()
        host.done[1, 1] = FAILED
        with pytest.raises(RuntimeError, match="a rank of this host could not update layer 1"):
            streamed.wait()
        host.done[:, 1] = 1


@pytest.mark.usefixtures("group")
def test_a_graph_that_is_kept_over_the_update_of_another_rank_is_refused():
    """A layer's weights were changed by another rank alone, in memory of both."""
    model = llama(torch.bfloat16)
    for parameter in (*model.lm_head.parameters(), *model.model.norm.parameters()):
        parameter.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    with closing(SharedAdamW(groups_of(model), streamed, lr=RATE)) as optimizer:
        kept = model(**batch(0)).loss
        optimizer.host.blocks = [[] for _ in range(LAYERS)]  # all of them are the other rank's
        model(**batch(1)).loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            kept.backward()


@pytest.mark.usefixtures("group")
def test_a_failed_block_is_told_to_the_other_ranks():
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    optimizer = SharedAdamW(groups_of(model), streamed, lr=RATE)
    optimizer.host.blocks[1][0] = None
    model(**batch(0)).loss.backward()
    optimizer.step()
    for wait in (streamed.wait, optimizer.close):
        with pytest.raises(TypeError):
            wait()
    assert optimizer.host.done[1].tolist() == [FAILED]


@pytest.mark.usefixtures("group")
def test_closing_waits_for_the_parts_of_the_other_ranks(monkeypatch):
    """Or the weights that are saved behind it would be half of this step's, half of the last's."""
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    optimizer = SharedAdamW(groups_of(model), streamed, lr=RATE)
    done = optimizer.host.done = torch.zeros(LAYERS, 2, dtype=torch.int64)
    monkeypatch.setattr(one_copy_a_host.time, "sleep", lambda _: done[:, 1].fill_(1))
    model(**batch(0)).loss.backward()
    optimizer.step()
    optimizer.close()
    assert done.tolist() == [[1, 1]] * LAYERS


@pytest.mark.usefixtures("group")
def test_an_error_on_its_way_does_not_wait_for_other_ranks(monkeypatch):
    """They may have failed before their part of the step."""
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    optimizer = SharedAdamW(groups_of(model), streamed, lr=RATE)
    optimizer.host.done = torch.zeros(LAYERS, 2, dtype=torch.int64)
    monkeypatch.setattr(one_copy_a_host.time, "sleep", lambda _: pytest.fail("waits"))
    with pytest.raises(ZeroDivisionError), closing(optimizer):
        model(**batch(0)).loss.backward()
        optimizer.step()
        raise ZeroDivisionError


@pytest.mark.usefixtures("group")
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


def train_shared(rank: int, store: str, weights: str) -> None:
    """One of two ranks: a bad batch, an evaluation behind each step, a load in mid-run."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = llama(torch.bfloat16)
    streamed = SharedModel(model, model.model.layers, CPU, Host())
    with closing(SharedAdamW(groups_of(model), streamed, lr=RATE, max_norm=MAX_NORM)) as optimizer:
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


# The host's memory


def linear(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


def test_host_memory_is_the_sum_of_the_tensors_aligned():
    layer = HostLayer(nn.Linear(1000, 1000), CPU)
    assert layer.weights[0].flat.numel() == -(-1_000_000 // ALIGNMENT) * ALIGNMENT + 1024
    assert layer.gradients[0].flat.numel() == layer.weights[0].flat.numel()
    assert all(view.data_ptr() % 512 == 0 for view in layer.weights[0].views.values())


def test_frozen_parameters_and_other_dtypes_have_buffers_of_their_own():
    module = linear(8, 8, 8)
    module[0].requires_grad_(False).bfloat16()
    layer = HostLayer(module, CPU)
    assert [buffer.flat.dtype for buffer in layer.weights] == [torch.float32, torch.bfloat16]
    assert list(layer.gradients[0].views) == ["1.weight", "1.bias"] == list(layer.trained)


def test_a_generator_is_taken_layer_by_layer():
    def layers():
        first = linear(8, 8)
        yield first
        moved = first[0].weight.untyped_storage()
        assert moved.nbytes() > first[0].weight.nbytes, "the first layer has not been moved yet"
        yield linear(8, 8)

    assert len(move_to_host(layers(), CPU)) == 2


def test_a_parameter_that_layers_share_is_refused():
    first, second = linear(8, 8), linear(8, 8)
    second[0].weight = first[0].weight
    with pytest.raises(ValueError, match=r"layer 1 shares \['0.weight'\].*keep a shared"):
        move_to_host([first, second], CPU)


@pytest.mark.parametrize("current", [0, 2])
def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch, current):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    with pytest.raises(ValueError, match="make cuda:1 current: .*set_device_index"):
        StreamedLayers([linear(8, 8)], torch.device("cuda:1"))


def test_more_memory_than_the_host_can_map_is_refused():
    like = {"weight": torch.empty(2**58, device="meta")}
    with pytest.raises(RuntimeError, match=f"cannot lock {2**60} more bytes.*free some"):
        HostBuffer(like, torch.float32, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the driver")
def test_a_system_without_large_pages_gives_small_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # is not known
    like = {"weight": torch.zeros(3)}
    assert HostBuffer(like, torch.float32, CPU).views["weight"].tolist() == [0, 0, 0]


def test_memory_that_cannot_be_locked_is_refused_and_the_rest_unlocked(monkeypatch):
    locked, launched = [], []

    class Driver:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            locked.append(address)
            return 2 if len(locked) > 3 else 0

        cudaError = int

        def cudaGetErrorString(self, error: int) -> str:
            return "out of memory"

        def cudaHostUnregister(self, address: int) -> None:
            locked.remove(address)

    def launch(size: tuple, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("the error before, reported by this kernel")

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch, "ones", launch)
    told = "cannot lock .* more bytes .*CUDA error 2: out of memory.*keep fewer layers"
    with pytest.raises(RuntimeError, match=told) as refused:
        move_to_host([linear(8, 8), linear(8, 8)], CUDA)
    assert len(locked) == 1, "only the address that was refused may be left in the list"
    assert launched == [CUDA], "the reader's next kernel will report the error"
    assert refused.tb, "the frames were meant to be alive"
    gc.collect()


# What a reader copies


def snippets(page: str) -> list[str]:
    """The code blocks of a page's prose."""
    lines = [line.removeprefix("# ").rstrip("#\n") for line in page.splitlines()]
    found = []
    for number, line in enumerate(lines):
        if line == ".. code-block:: python":
            block = []
            for following in lines[number + 1 :]:
                if following and not following.startswith(" "):
                    break
                block.append(following)
            found.append(dedent("\n".join(block)).strip())
    return found


STOCK = ("streamed_model", "whole_step", "one_copy_a_host")  # pages that take a stock Llama
PASTED = ["three_streams", "activation_offload", "weight_streaming", *STOCK]


@pytest.mark.parametrize("name", PASTED)
def test_what_a_reader_copies_runs(name):
    """With what is said to be the reader's own; it trains, and leaves no group."""
    device = torch.accelerator.current_accelerator(check_available=True) or CPU
    torch.manual_seed(0)
    model = llama() if name in STOCK else linear(16, 24, 24, 16).to(device)
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    made = batch if name in STOCK else lambda _: torch.randn(2, 16)
    batches = [made(seed) for seed in range(3)]
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    def train_step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()
        optimizer.step()

    yours: dict[str, object] = {
        "torch": torch,
        "device": device,
        "model": model,
        "layers": list(model) if isinstance(model, nn.Sequential) else model.model.layers,
        "optimizer": optimizer,
        "batch": batches[0],
        "batches": batches,
        "loss_of": loss_of,
        "train_step": train_step,
        "budget": 1 << 20,
        "window": 1 << 16,
    }
    snippet, *_ = snippets((PAGES / f"{name}.py").read_text())
    if name == "one_copy_a_host":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    exec(compile(snippet, name, "exec"), yours)
    if name == "one_copy_a_host":
        dist.destroy_process_group()
    assert not any(map(torch.equal, before, (p.cpu() for p in model.parameters())))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ([torch.ones(50), *(torch.ones(100) for _ in range(4))], "flat tensors of one length"),
        ([torch.ones(100), *(torch.ones(50) for _ in range(4))], "flat tensors of one length"),
        ([torch.ones(10, 10) for _ in range(5)], "flat tensors without gaps"),
        (
            [*torch.ones(2, 100).bfloat16(), *torch.ones(2, 100), torch.ones(200)[::2]],
            "without gaps",
        ),
        ([torch.ones(100).bfloat16() for _ in range(5)], "moments and scratch are in fp32"),
        ([torch.ones(100) for _ in range(5)], "its own master"),
    ],
)
def test_a_block_that_would_be_updated_in_part_or_beyond_its_end_is_refused(block, says):
    numbers = pieces.numbers_of(pieces.SETTINGS, 1.0)
    with pytest.raises(ValueError, match=says):
        pieces.update_block(
            pieces.update_pieces, [*block, torch.empty(200)], torch.tensor(1.0), numbers
        )
