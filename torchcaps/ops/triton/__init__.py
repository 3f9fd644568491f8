"""The "triton" backend: the reductions as kernels for CUDA devices. `library.py` makes operators of these functions."""

from typing import Any

from torch import Tensor

Tensors = tuple[Tensor, ...]

# The kernels are imported at the first call, because Triton may not be installed.


def vote_sum(*arguments: Any) -> Tensors:
    from torchcaps.ops.triton import uniform

    return uniform.vote_sum(*arguments)


def vote_sum_backward(*arguments: Any) -> tuple[()]:
    from torchcaps.ops.triton import uniform

    return uniform.vote_sum_backward(*arguments)


def weighted_sum(*arguments: Any) -> Tensors:
    from torchcaps.ops.triton import launch

    return launch.weighted_sum(*arguments)


def weighted_sum_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from torchcaps.ops.triton import launch

    return launch.weighted_sum_backward(*arguments)


def moments(*arguments: Any) -> Tensors:
    from torchcaps.ops.triton import launch

    return launch.moments(*arguments)


def moments_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from torchcaps.ops.triton import launch

    return launch.moments_backward(*arguments)
