"""Moments in 8 bits, updated on the device: numbers, order, refusals, and what a host holds."""

from contextlib import closing, nullcontext, suppress
from copy import deepcopy

import pytest
import torch
from eight_bit_training import Resident8bit, wide_llama
from host_training import MAX_NORM, RATE, batch, falling, same, steps_of, streamed_of, whole
from torch import nn

from overlap_recipes.offload import HostAdamW, eight_bit, stream_layers
from overlap_recipes.offload.host_layers import HostBuffer
from overlap_recipes.offload.streamed_model import resident_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 10
CODES_APART = 1e-4  # of all codes, from another order of operations in fp32


def eight_bits(model: nn.Module, streamed, in_backward: bool) -> HostAdamW:
    max_norm = None if in_backward else MAX_NORM
    return whole(model, streamed, max_norm=max_norm, in_backward=in_backward, moments="8bit")


# Numbers


def test_codes_are_those_of_torchao_after_20_steps():
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    optim = pytest.importorskip("torchao.optim")
    for signed, theirs in (
        (True, subclass.get_qmap_signed()),
        (False, subclass.get_qmap_unsigned()),
    ):
        assert torch.equal(eight_bit.code_book(signed, torch.device("cpu")), torch.tensor(theirs))
    torch.manual_seed(0)
    shapes = (256, 512), (100, 300), (63, 64), (64, 64)  # large, ragged, small, just large enough
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    twins = [nn.Parameter(p.detach().clone()) for p in ours]
    reference = optim.AdamW8bit(twins, lr=1e-3, weight_decay=1e-2)
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    states = [eight_bit.state_on_device(p) for p in ours]
    rounded_to_0 = {p: torch.zeros_like(p, dtype=torch.bool) for p in ours}  # theirs, too small
    with torch.compiler.set_stance("force_eager"):
        for _ in range(20):
            for p, twin, state in zip(ours, twins, states, strict=True):
                p.grad = torch.randn_like(p) * torch.rand_like(p)
                twin.grad = p.grad.clone()
                with torch.no_grad():
                    one = torch.ones(())
                    eight_bit.update_on_device(settings, p, state, one, torch.zeros(()))
            reference.step()
            for p, twin in zip(ours, twins, strict=True):
                if eight_bit.is_quantized(p):
                    rounded_to_0[p] |= reference.state[twin]["exp_avg_sq"].codes.view_as(p) == 0
    codes, apart = 0, 0
    for p, twin, state in zip(ours, twins, states, strict=True):
        alike = ~rounded_to_0[p]
        assert alike.float().mean() > 0.99
        torch.testing.assert_close(p[alike], twin[alike], rtol=0, atol=1e-4)  # where a code differs
        for moment in eight_bit.SIGNED:
            theirs = reference.state[twin][moment]
            if f"{moment}_codes" not in state:
                torch.testing.assert_close(state[moment], theirs, rtol=1e-5, atol=1e-7)
                continue
            torch.testing.assert_close(state[f"{moment}_scales"], theirs.scale)
            apart += (state[f"{moment}_codes"] != theirs.codes).sum().item()
            codes += theirs.codes.numel()
    print(f"{apart} of {codes} codes differ")
    assert codes == 2 * (256 * 512 + 64 * 64) and apart <= CODES_APART * codes


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rows_without_a_gradient_move_as_far_as_with_moments_in_fp32(scale):
    """A second moment that was rounded to 0 divided by eps alone: by 16,000 times as far."""
    rows, settings = 32, {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    ours, theirs = (nn.Parameter(torch.zeros(rows, eight_bit.BLOCK)) for _ in range(2))
    reference = torch.optim.AdamW([theirs], **settings)
    state = eight_bit.state_on_device(ours)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        is_seen = torch.rand(rows, 1, generator=generator) < 0.2
        theirs.grad = scale * is_seen * torch.randn(ours.shape, generator=generator)
        ours.grad = theirs.grad.clone()
        with torch.no_grad():
            eight_bit.update_on_device(settings, ours, state, torch.ones(()), torch.zeros(()))
        reference.step()
    assert ours.abs().max().item() <= 1.1 * theirs.abs().max().item()


def test_a_weight_and_a_rest_are_the_master():
    """The NaN of all ones was rounded up to -0.0."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator).to(torch.int32)
    named = [0x7FFFFFFF, -1, 0x7F800001, 0x7FFF8000, 0x7F800000, -(2**23), 0x7F7FFFFF, 0, -(2**31)]
    named += [0x3F808000, 0x3F818000, 0x3F807FFF]  # halves, and what is just below
    master = torch.cat([bits, torch.tensor(named, dtype=torch.int32)]).view(torch.float32)
    weight, rest = eight_bit.split(master)
    found = eight_bit.join(weight, rest)
    is_nan = master.isnan()
    assert torch.equal(found.view(torch.int32)[~is_nan], master.view(torch.int32)[~is_nan])
    assert found[is_nan].isnan().all() and weight[is_nan].isnan().all()
    assert not weight[~is_nan].isnan().any()


def test_a_rest_is_dropped_where_something_else_has_changed_the_weights():
    """0.0 with a rest of -5 is no number."""
    master = torch.linspace(-1, 1, 3 * eight_bit.BLOCK + 7)
    weight, rest = eight_bit.split(master)
    digest = eight_bit.digest_of(weight)
    assert torch.equal(eight_bit.master_of(weight, rest, digest), master)
    weight[eight_bit.BLOCK + 3] = 0.0
    weight[-1] *= 2
    found = eight_bit.master_of(weight, rest, digest)
    for at in range(0, master.numel(), eight_bit.BLOCK):
        here = slice(at, at + eight_bit.BLOCK)
        is_changed = at in (eight_bit.BLOCK, 3 * eight_bit.BLOCK)
        expected = weight[here].float() if is_changed else master[here]
        assert torch.equal(found[here], expected)


def test_codes_of_a_skipped_step_stay():
    """A block whose largest is negative is another when it is read and written again."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 4096).bfloat16())
    state = eight_bit.state_on_device(parameter)
    settings = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for value, skip in ((1.0, 0.0), (torch.inf, 1.0)):
        before = deepcopy((state, parameter.detach()))
        parameter.grad = (parameter.detach() * value).clone()
        with torch.no_grad():
            one = torch.ones(())
            eight_bit.update_on_device(settings, parameter, state, one, torch.tensor(skip))
    assert torch.equal(parameter, before[1])
    assert all(torch.equal(state[name], kept) for name, kept in before[0].items())


# Whole steps


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("dtype", "microbatches"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_streamed_steps_have_the_bits_of_resident_ones(
    dtype, microbatches, in_backward, monkeypatch
):
    """In pieces, too: of one layer more than there are rooms for."""
    resident, model = wide_llama(dtype), wide_llama(dtype)
    monkeypatch.setattr(eight_bit, "PIECE", 2048)
    reference = Resident8bit(resident, None if in_backward else MAX_NORM)
    budget = resident_bytes(model.model.layers[0])
    streamed = streamed_of(model, budget=budget)
    with closing(eight_bits(model, streamed, in_backward)) as optimizer:
        schedule = falling(optimizer)
        for step in range(STEPS):
            seeds = [step + STEPS * number for number in range(microbatches)]
            for seed in seeds:
                resident(**batch(seed)).loss.backward()
            reference.step()
            for number, seed in enumerate(seeds):
                with nullcontext() if number == microbatches - 1 else optimizer.no_sync():
                    model(**batch(seed)).loss.backward()
            optimizer.step()
            schedule.step()
        streamed.wait()
        assert same(model, resident)
        theirs = dict(resident.named_parameters())
        for name, parameter in model.named_parameters():
            kept = reference.state[theirs[name]]
            for which, tensor in optimizer.state[parameter].items():
                assert torch.equal(tensor, kept[which]), (name, which)
        if in_backward and microbatches == 1:
            assert streamed.stores == 0
            assert all(p.grad is None for p in model.parameters())


def test_a_batch_that_is_not_finite_changes_nothing_or_raises():
    for in_backward in (False, True):
        model = wide_llama()
        with closing(eight_bits(model, streamed := streamed_of(model), in_backward)) as optimizer:
            model(**batch(0)).loss.backward()
            optimizer.step()
            saved = deepcopy((model.state_dict(), optimizer.state_dict()))
            if in_backward:
                with pytest.raises(FloatingPointError, match="load a checkpoint"):
                    (model(**batch(1)).loss * torch.nan).backward()
                    optimizer.step()
                    streamed.wait()
                for _ in range(2):
                    with pytest.raises(FloatingPointError, match="load a checkpoint"):
                        streamed.wait()
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            else:
                (model(**batch(1)).loss * torch.nan).backward()
                optimizer.step()
            now = model.state_dict(), optimizer.state_dict()
            assert optimizer.skipped == (0 if in_backward else 1)
            assert all(torch.equal(now[0][name], value) for name, value in saved[0].items())
            for number, state in saved[1]["state"].items():
                for name, value in state.items():
                    assert torch.equal(now[1]["state"][number][name], value), name
            model(**batch(2)).loss.backward()
            optimizer.step()
            assert steps_of(optimizer) == {2}


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_interrupted_update_is_no_step(in_backward, monkeypatch):
    model = wide_llama()
    with closing(eight_bits(model, streamed := streamed_of(model), in_backward)) as optimizer:
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        plain = eight_bit.update
        left = [7]

        def halfway(*args):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            plain(*args)

        monkeypatch.setattr(eight_bit, "update", halfway)
        with pytest.raises(KeyboardInterrupt):
            model(**batch(0)).loss.backward()
            optimizer.step()
            streamed.wait()
        monkeypatch.undo()
        for use in (optimizer.step, streamed.wait, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="interrupted: load a checkpoint"):
                use()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        model(**batch(0)).loss.backward()
        optimizer.step()
        assert steps_of(optimizer) == {1}


def test_weights_that_something_else_has_changed_count():
    """Zeroed without a word, they would be joined with rests of what they were."""
    model = wide_llama()
    with closing(eight_bits(model, streamed := streamed_of(model), False)) as optimizer:
        for step in range(2):
            model(**batch(step)).loss.backward()
            optimizer.step()
        streamed.wait()
        zeroed = [model.model.layers[2].mlp.up_proj.weight, model.lm_head.weight]
        for parameter in zeroed:
            parameter.data.zero_()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        model(**batch(2)).loss.backward()
        optimizer.step()
        streamed.wait()
        for parameter in zeroed:
            assert not parameter.any() and not optimizer.state[parameter]["rest"].any()


def test_a_loop_that_fails_behind_a_step_leaves_it_whole():
    """Layers that were due were left out, and so weights torn."""
    models = wide_llama(), wide_llama()
    for model, error in zip(models, (None, KeyboardInterrupt), strict=True):
        with (
            suppress(KeyboardInterrupt),
            closing(streamed_of(model)) as streamed,
            eight_bits(model, streamed, False) as optimizer,
        ):
            model(**batch(0)).loss.backward()
            optimizer.step()
            if error:
                raise error
    assert same(*models) and steps_of(optimizer) == {1}


@pytest.mark.parametrize("changed", [0, 3])
def test_weights_that_are_changed_during_their_update_raise(changed):
    """Behind ``step()``, without ``wait()``: before the update, after it, or in between."""
    model = wide_llama()
    with closing(eight_bits(model, streamed := streamed_of(model), False)) as optimizer:
        model(**batch(0)).loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.model.layers[changed].mlp.up_proj.weight.clamp_(-0.01, 0.01)
        for use in (lambda: model(**batch(1)), streamed.wait):
            with pytest.raises(RuntimeError, match="changed during their update: call wait"):
                use()
        optimizer.host.forget()


# State that goes elsewhere


def test_states_of_both_kinds_are_loaded_by_each_other():
    """From fp32: the nearest codes, and the same masters; and back: what the codes stand for."""
    models = wide_llama(), wide_llama(), wide_llama()
    with (
        closing(whole(models[0], first := streamed_of(models[0]))) as fp32,
        closing(eight_bits(models[1], second := streamed_of(models[1]), False)) as eight,
        closing(whole(models[2], streamed_of(models[2]))) as back,
    ):
        for step in range(3):
            models[0](**batch(step)).loss.backward()
            fp32.step()
        for source, ours, target, theirs in (
            (models[0], fp32, models[1], eight),
            (models[1], eight, models[2], back),
        ):
            target.load_state_dict(source.state_dict())
            theirs.load_state_dict(deepcopy(ours.state_dict()))
        for model, other, streamed in (
            (models[0], models[1], first),
            (models[1], models[2], second),
        ):
            streamed.wait()
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-2, atol=0)  # halves are rounded up
        for p, q in zip(models[0].parameters(), models[2].parameters(), strict=True):
            ours, theirs = fp32.state[p], back.state[q]
            assert torch.equal(ours["master"], theirs["master"]) and ours["step"] == theirs["step"]
            assert (ours["exp_avg"] - theirs["exp_avg"]).abs().max() <= 0.01 * ours[
                "exp_avg"
            ].abs().max()


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_a_model_in_fp32_takes_the_masters_of_one_in_bf16(moments):
    models = wide_llama(), wide_llama(torch.float32)
    with (
        closing(eight_bits(models[0], streamed_of(models[0]), False)) as ours,
        closing(whole(models[1], streamed_of(models[1]), moments=moments)) as theirs,
    ):
        models[0](**batch(0)).loss.backward()
        ours.step()
        models[1].load_state_dict(models[0].state_dict())
        theirs.load_state_dict(deepcopy(ours.state_dict()))
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            kept = ours.state[p]
            master = eight_bit.master_of(p.view(-1), kept["rest"].view(-1), kept["digest"])
            assert torch.equal(master, q.view(-1))


def test_states_of_other_optimizers_are_refused():
    """They left moments of zeros, and a count of steps."""
    model = wide_llama()
    for moments in ("fp32", "8bit"):
        with closing(whole(model, streamed_of(model), moments=moments)) as optimizer:
            for names in (("step", "exp_avg"), ("step", "state1", "state2")):
                state = optimizer.state_dict()
                state["state"] = {0: dict.fromkeys(names, torch.ones(()))}
                with pytest.raises(ValueError, match="of another optimizer"):
                    optimizer.load_state_dict(state)


@pytest.mark.parametrize("weights_first", [False, True])
def test_weights_and_state_are_loaded_in_either_order(weights_first):
    model = wide_llama()
    with closing(eight_bits(model, streamed := streamed_of(model), False)) as optimizer:
        for step in range(2):
            model(**batch(step)).loss.backward()
            optimizer.step()
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        found = []
        for _ in range(2):
            model(**batch(2)).loss.backward()
            optimizer.step()
            streamed.wait()
            found.append([parameter.clone() for parameter in model.parameters()])
            if weights_first:
                model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            if not weights_first:
                model.load_state_dict(saved[0])
        assert all(map(torch.equal, *found))


# The host


@pytest.mark.parametrize(("in_backward", "most"), [(True, 6.5), (False, 8.5)])
def test_bytes_of_a_parameter_on_the_host(in_backward, most, monkeypatch):
    """Of all memory that is page-locked, or would be on a GPU, and was not given back."""
    made = []
    plain = HostBuffer.__init__

    def noted(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(HostBuffer, "__init__", noted)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).bfloat16()
    numel = sum(p.numel() for p in model.parameters())
    with (
        stream_layers(model, model, "cpu") as streamed,
        closing(eight_bits(model, streamed, in_backward)) as optimizer,
    ):
        for _ in range(2):
            model(torch.randn(4, 512).bfloat16()).square().mean().backward()
            optimizer.step()
        streamed.wait()
        held = sum(each.locked.bytes.nbytes for each in made if not each.locked.is_away)
        assert held / numel <= most
        if in_backward:  # the memory of gradients is there again for microbatches
            with optimizer.no_sync():
                model(torch.randn(4, 512).bfloat16()).square().mean().backward()
            assert not any(each.locked.is_away for each in made)
            optimizer.zero_grad()


def test_what_8_bits_do_not_do_is_refused():
    model = wide_llama()
    streamed = streamed_of(model)
    with closing(streamed):
        for options, words in (
            ({"moments": "4bit"}, "moments are"),
            ({"moments": "8bit", "threads": 2}, "leave threads out"),
            ({"moments": "8bit", "amsgrad": True}, "no setting amsgrad"),
        ):
            with pytest.raises(ValueError, match=words):
                HostAdamW(model.parameters(), streamed, **options)
        streamed.updates = None  # as a model has it that the ranks of a host share
        with pytest.raises(ValueError, match="one_copy_a_host"):
            HostAdamW(model.parameters(), streamed, moments="8bit")
    half = wide_llama(torch.float16)
    with closing(streamed_of(half)) as streamed, pytest.raises(ValueError, match="float16"):
        HostAdamW(half.parameters(), streamed, moments="8bit")
    frozen = wide_llama()
    frozen.lm_head.half().requires_grad_(False)
    with (
        stream_layers(frozen, frozen.model.layers, "cpu") as streamed,
        HostAdamW(frozen.parameters(), streamed, moments="8bit") as optimizer,
    ):
        frozen.lm_head.requires_grad_(True)
        frozen.lm_head.weight.grad = torch.ones_like(frozen.lm_head.weight)
        with pytest.raises(ValueError, match="float16"):
            optimizer.step()


def test_a_small_model_learns_as_with_moments_in_fp32():
    """Three seeds to the end are in benchmarks/results."""
    losses = {}
    for moments in ("fp32", "8bit"):
        model = wide_llama()
        with (
            stream_layers(model, model.model.layers, "cpu") as streamed,
            HostAdamW(model.parameters(), streamed, lr=3e-3, max_norm=1.0, moments=moments) as adam,
        ):
            for step in range(40):
                loss = model(**batch(step % 2)).loss
                loss.backward()
                adam.step()
            losses[moments] = loss.item()
    assert losses["fp32"] < 1.5 and abs(losses["8bit"] - losses["fp32"]) < 0.2, losses
