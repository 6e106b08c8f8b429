"""Activations on the host, from scratch: what is outside the file's scope stays, or raises."""

import pytest
import torch
from activations import NBYTES, ROWS, WIDTH, activation, chain

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def host(scratch, monkeypatch):
    """For tensors of ``NBYTES``, of which four may be on their way."""
    monkeypatch.setattr(scratch, "SMALLEST", NBYTES)
    return scratch.HostActivations(CPU, 4 * NBYTES)


def squares(host, change) -> torch.Tensor:
    """A loss whose backward needs a tensor that ``change`` is given while it is copied."""
    with host.saving():
        middle = activation() * 1
        loss = middle.square().sum()
        with torch.no_grad():
            change(middle)
    return loss


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    "change",
    [lambda x: x.zero_(), lambda x: x.untyped_storage().resize_(0)],
    ids=["changed in place", "freed by its owner"],
)
def test_a_change_during_a_copy_is_an_error_when_backward_reads_it(host, change, wait):
    loss = squares(host, change)
    if wait:
        host.release(0)
    with pytest.raises(RuntimeError, match="changed or freed while copied"):
        loss.backward()


def test_a_change_behind_the_copy_is_harmless(host):
    x = activation()
    host.window = 1
    with host.saving():
        middle = (x * 0.1).exp()
        y = (middle * 0.1).exp().sum()  # its copy makes that of `middle` complete
        with torch.no_grad():
            middle.zero_()
    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(chain(x, 2).sum(), x)[0])


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize(
    "kept",
    [
        lambda: torch.randn(ROWS, WIDTH, dtype=torch.complex64).conj(),
        lambda: torch.randn(ROWS, WIDTH).to_sparse(),
        lambda: torch.randn(ROWS, WIDTH).as_subclass(type("Parts", (torch.Tensor,), {})),
        lambda: torch.nn.Parameter(torch.randn(ROWS, WIDTH)).t(),
        lambda: torch.nested.nested_tensor([torch.randn(ROWS, WIDTH)]),
        lambda: torch.randn(1),
        lambda: torch.empty(ROWS, WIDTH, device="meta"),
    ],
    ids=["conjugated", "sparse", "a subclass", "a parameter", "nested", "small", "elsewhere"],
)
def test_what_is_more_than_its_bytes_or_not_worth_a_copy_stays(host, kept):
    tensor = kept()
    with host.saving():
        packed = host.pack(tensor)
    assert host.moved == 0
    back = host.unpack(packed)
    assert (type(back), back.layout, back.is_conj()) == (
        type(tensor.detach()),
        tensor.layout,
        tensor.is_conj(),
    )


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[3:5, 7::9], lambda x: x.view(torch.int32)]
)
def test_a_view_comes_back_with_its_strides(host, view):
    tensor = view(torch.randn(ROWS, WIDTH))
    with host.saving():
        packed = host.pack(tensor)
        host.release(0)
    back = host.unpack(packed)
    assert back.data_ptr() != tensor.data_ptr()
    assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
    assert torch.equal(back, tensor)


def test_two_forwards_and_two_backwards_of_one_graph(host):
    x = activation()
    host.window = NBYTES
    with host.saving():
        first = chain(x, 4).sum()
    with host.saving():
        second = chain(x, 4).sum()
    (once,) = torch.autograd.grad(first, x, retain_graph=True)
    (again,) = torch.autograd.grad(first, x)
    (other,) = torch.autograd.grad(second, x)
    assert host.moved == 8 * NBYTES
    assert torch.equal(once, again)
    assert torch.equal(once, other)


def test_another_stream_is_refused(host, monkeypatch):
    with host.saving():
        monkeypatch.setattr(host, "compute", torch.cpu.Stream())
        with pytest.raises(RuntimeError, match="on the stream of saving"):
            chain(activation(), 1)


def test_a_window_of_nothing_is_refused(scratch):
    with pytest.raises(ValueError, match="pass bytes"):
        scratch.HostActivations(CPU, 0)
