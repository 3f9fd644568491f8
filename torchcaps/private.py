"""The names of PyTorch that are not public, and why each of them is needed. No other file uses one."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple


def register_namedtuple(cls: type, name: str) -> None:
    """Give a NamedTuple the name by which `torch.export.save` stores it: there is no public way."""
    _register_namedtuple(cls, serialized_type_name=name)


def is_traced() -> bool:
    """Whether PyTorch compiles, traces or transforms what runs now, so that it must see its own operators: only the
    private function knows of `torch.func`."""
    transformed: bool = torch._C._are_functorch_transforms_active()
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed


def softmax_backward(gradient: Tensor, result: Tensor) -> Tensor:
    """The gradient of what a softmax over dimension 1 was taken of, by the kernel of PyTorch's own backward pass: in
    public operators it takes three passes over memory."""
    return torch._softmax_backward_data(gradient, result, 1, result.dtype)


F = TypeVar("F", bound=Callable[..., object])


def constant_when_compiled(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which imports the whole compiler only to set this attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
