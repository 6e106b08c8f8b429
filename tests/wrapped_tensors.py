"""A tensor that is made of another."""

import torch


class Wrapper(torch.Tensor):
    """A tensor around another, without memory of its own, as quantized weights are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None) -> object:
        inner = [x.inner if isinstance(x, Wrapper) else x for x in args]
        out = function(*inner, **(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out
