"""The reductions as Triton kernels, for CUDA devices. They know no windows: these are taken out of the map before."""

from typing import Any

from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options

Tensors = tuple[Tensor, ...]


def weighted_sum(children: Children, query: Tensor, offset: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    from torchcaps.ops.triton import launch  # Triton may be missing

    return launch.weighted_sum(_without_grid(children), query, _row(offset), options)


def weighted_sum_backward(grads: Any, results: Any, children: Children, *rest: Any) -> tuple[Tensor | None, ...]:
    from torchcaps.ops.triton import launch

    query, offset, options, into = rest
    found = launch.weighted_sum_backward(grads, results, _without_grid(children), query, _row(offset), options)
    _add(found[:4], into)
    return found[4], _like(found[5], offset)


def moments(children: Children, *rest: Any) -> Tensors:
    from torchcaps.ops.triton import launch

    target, precision, prior, offset, betas, options = rest
    about = target, precision, prior, _row(offset), _row(betas)
    *found, benefit = launch.moments(_without_grid(children), *about, options)
    return *found, found[0].new_empty(0) if benefit is None else benefit


def moments_backward(grads: Any, results: Any, children: Children, *rest: Any) -> tuple[Tensor | None, ...]:
    from torchcaps.ops.triton import launch

    target, precision, prior, offset, betas, options, into = rest
    about = target, precision, prior, _row(offset), _row(betas)
    found = launch.moments_backward(grads, results, _without_grid(children), *about, options)
    _add(found[:4], into)
    return *found[4:7], _like(found[7], offset), _like(found[8], betas)


def _without_grid(children: Children) -> Children:
    poses, weight, bias, gates = children
    return Children(poses[:, :, 0, 0], weight[:, 0, 0], _row(bias), None if gates is None else gates[:, :, 0, 0])


def _row(x: Tensor | None) -> Tensor | None:
    """`(groups, ...)` of `(groups, 1, 1, ...)`."""
    return None if x is None else x[:, 0, 0]


def _like(gradient: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if gradient is None or x is None else gradient.view(x.shape)


def _add(found: tuple[Tensor | None, ...], into: Gradients) -> None:
    for gradient, buffer in zip(found, into, strict=True):
        if buffer is not None and gradient is not None:
            buffer += gradient.view(buffer.shape)
