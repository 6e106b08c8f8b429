"""One call around a stock loop streams its layers, another around it has their Adam on the host."""

import pytest
import torch
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
    same,
)

from overlap_recipes.offload import HostAdamW, resident_bytes, stream_layers

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("budget_layers", [0, 2])
def test_a_stock_loop_in_two_blocks_has_the_resident_runs_bits(in_backward, budget_layers):
    resident, model = llama(torch.bfloat16), llama(torch.bfloat16)
    max_norm = None if in_backward else MAX_NORM
    reference = Resident(resident, max_norm)
    layers = model.model.layers
    budget = budget_layers * resident_bytes(layers[0])
    options = {"lr": RATE, "max_norm": max_norm, "in_backward": in_backward}
    with stream_layers(model, layers, "cpu", budget=budget, slots=3) as streamed:
        assert len(streamed.layers) == LAYERS - budget_layers and streamed.slots == 3
        with HostAdamW(groups_of(model), streamed, **options) as optimizer:
            scheduler = falling(optimizer)
            for step in range(3):
                reference.step(resident(**batch(step)).loss)
                model(**batch(step)).loss.backward()
                optimizer.step()
                scheduler.step()
        assert same(model, resident), "the optimizer's end waits for its last updates"
        loads = streamed.loads
        with torch.no_grad():
            logits = model(**batch(9)).logits
            assert torch.equal(logits, resident(**batch(9)).logits)
        assert streamed.loads > loads, "the model is streamed until its own block ends"
    assert "forward" not in vars(layers[LAYERS - 1])


def held_back(optimizer: HostAdamW) -> None:
    """Let the threads begin their updates when they are waited for, no earlier."""
    start = optimizer.host.start
    due = []
    optimizer.host.start = lambda *args: due.append(args)
    ends = optimizer.host.before_host

    def starts_and_ends(raises: bool) -> None:
        optimizer.host.latest.exception()
        while due:
            start(*due.pop())
        ends(raises)

    optimizer.host.before_host = starts_and_ends


def one_step(closes: bool) -> torch.nn.Module:
    """A model behind a step of an optimizer without a block; with ``closes`` that is closed."""
    model = llama()
    with stream_layers(model, model.model.layers, CPU) as streamed:
        optimizer = HostAdamW(model.parameters(), streamed, lr=RATE)
        held_back(optimizer)
        model(**batch(0)).loss.backward()
        optimizer.step()
        if closes:
            optimizer.close()
    return model


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("handles", [False, True])
def test_the_end_waits_for_an_optimizer_that_has_no_block(handles, closes):
    """In a handler of another error, where a smaller batch is tried, it did not."""
    resident = llama()
    resident(**batch(0)).loss.backward()
    torch.optim.AdamW(resident.parameters(), lr=RATE, fused=True).step()
    if not handles:
        model = one_step(closes)
    else:
        try:
            raise MemoryError
        except MemoryError:
            model = one_step(closes)
    assert same(model, resident)


def failing_step(model: torch.nn.Module, error: type | None = None) -> None:
    """A step whose update of layer 1 fails, in two blocks, and then an error of the loop."""
    with (
        stream_layers(model, model.model.layers, CPU) as streamed,
        HostAdamW(model.parameters(), streamed, lr=RATE) as optimizer,
    ):
        optimizer.host.blocks[1][0] = None
        model(**batch(0)).loss.backward()
        optimizer.step()
        if error:
            raise error


def test_an_error_in_the_block_ends_both_and_is_raised_itself():
    model = llama()
    with pytest.raises(ZeroDivisionError):
        failing_step(model, ZeroDivisionError)
    assert "forward" not in vars(model.model.layers[0])
    with stream_layers(model, model.model.layers, CPU):
        model(**batch(0)).loss.backward()


def test_what_an_update_raises_is_raised_by_the_end_of_the_block():
    model = llama()
    with pytest.raises(TypeError):
        failing_step(model)
    assert "forward" not in vars(model.model.layers[0])
