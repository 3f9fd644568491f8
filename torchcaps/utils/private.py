"""The private names of PyTorch that the package uses, and why. No other file uses one."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import _register_namedtuple


def register_namedtuple(cls: type, name: str) -> None:
    """Give a NamedTuple the name under which `torch.export.save` stores it. There is no public function for this."""
    _register_namedtuple(cls, serialized_type_name=name)


def is_traced() -> bool:
    """Return whether the running code is compiled, traced or transformed, and must therefore use PyTorch's own
    functions of autograd."""
    return torch.compiler.is_compiling() or is_transformed()


def is_transformed() -> bool:
    """Return whether the running code is traced by `torch.jit.trace`, exported to ONNX, transformed by `torch.func` or
    differentiated in forward mode, and must therefore use PyTorch's own operators. Only private names tell about the
    last two."""
    transformed: bool = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return torch.jit.is_tracing() or transformed or (is_exported() and torch.onnx.is_in_onnx_export())


def in_dispatch_mode() -> bool:
    """Return whether a mode such as that of `make_fx` or of fake tensors sees every operator, and may have no values.
    There is no public function for this."""
    return _get_current_dispatch_mode() is not None


def has_plain_values(*tensors: Tensor | None) -> bool:
    """Return whether tensors are PyTorch's own and have values, and no mode sees their operators."""
    for x in tensors:
        if x is not None and (type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta):
            return False
    return not in_dispatch_mode()


def in_backward() -> bool:
    """Return whether this thread is computing gradients. There is no public function for this."""
    task: int = torch._C._current_graph_task_id()
    return task >= 0


def is_profiled() -> bool:
    """Return whether a profiler of PyTorch sees every operator. There is no public function for this."""
    profiled: bool = torch.autograd._profiler_enabled()
    return profiled


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether `module.compile()` was called. There is no public function for this."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_batched(x: Tensor) -> bool:
    """Return whether a tensor stands for a batch of tensors, in `torch.vmap` or for `is_grads_batched=True`. There is
    no public function for this."""
    batched: bool = torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)
    return batched


def is_exported() -> bool:
    """Return whether the running code is exported by `torch.export`."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def softmax_backward(gradient: Tensor, result: Tensor) -> Tensor:
    """Return the gradient of the logits of a softmax over dimension 1, by the kernel of PyTorch's own backward pass.
    With public operators it would take three passes over memory."""
    return torch._softmax_backward_data(gradient, result, 1, result.dtype)


def shared_store() -> Any:
    """Return the store that the processes of a group share. There is no public function for this."""
    return torch.distributed.distributed_c10d._get_default_store()


def newest_cuda() -> int:
    """Return the newest version of CUDA that the NVIDIA driver can run. There is no public function for this."""
    version: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return version


F = TypeVar("F", bound=Callable[..., object])


def constant_when_compiled(function: F) -> F:
    """Do what `torch.compiler.assume_constant_result` does; that imports the whole compiler to set this attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
