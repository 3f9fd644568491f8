"""The reductions over children as Triton kernels, with the arguments of `torchcaps.ops.tiled`.

Only without a grid: windows are taken out of the map before, and height, width and kernel are 1.
"""

from torch import Tensor

from torchcaps.ops import kernels


def weighted_sum(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    query: Tensor,
    unit: bool,
    over_children: bool,
    leaky: bool,
    stride: int,
) -> tuple[Tensor, Tensor]:
    return kernels.weighted_sum(*_without_grid(poses, weight, bias, gates), query, unit, over_children, leaky)


def weighted_sum_backward(
    grad: Tensor,
    sums: Tensor,
    log_masses: Tensor,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    query: Tensor,
    unit: bool,
    over_children: bool,
    leaky: bool,
    stride: int,
    *buffers: Tensor | None,
) -> Tensor:
    children = _without_grid(poses, weight, bias, gates)
    *found, grad_query = kernels.weighted_sum_backward(
        grad, sums, log_masses, *children, query, unit, over_children, leaky
    )
    _add(found, buffers)
    assert grad_query is not None  # for there is a query
    return grad_query


def moments(
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    betas = None if betas is None else betas[:, 0, 0]
    children = _without_grid(poses, weight, bias, gates)
    mass, center, variance, benefit = kernels.moments(*children, target, precision, prior, betas, eps)
    return mass, center, variance, mass.new_empty(0) if benefit is None else benefit


def moments_backward(
    grad_mass: Tensor,
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_benefit: Tensor,
    mass: Tensor,
    mean_after: Tensor,
    variance_after: Tensor,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    target: Tensor | None,
    precision: Tensor | None,
    prior: Tensor | None,
    betas: Tensor | None,
    eps: float,
    stride: int,
    *buffers: Tensor | None,
) -> tuple[Tensor, ...]:
    children = _without_grid(poses, weight, bias, gates)
    grads = grad_mass, grad_mean, grad_variance, None if betas is None else grad_benefit
    before = target, precision, prior, None if betas is None else betas[:, 0, 0]
    found = kernels.moments_backward(*grads, mass, mean_after, variance_after, *children, *before, eps)
    _add(found[:4], buffers)
    *of_agreement, grad_betas = (mass.new_empty(0) if x is None else x for x in found[4:])
    return *of_agreement, grad_betas if betas is None else grad_betas.view(betas.shape)


def _without_grid(
    poses: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    bias, gates = None if bias is None else bias[:, 0, 0], None if gates is None else gates[:, :, 0, 0]
    return poses[:, :, 0, 0], weight[:, 0, 0], bias, gates


def _add(found: list[Tensor | None] | tuple[Tensor | None, ...], buffers: tuple[Tensor | None, ...]) -> None:
    for gradient, buffer in zip(found, buffers, strict=True):
        if buffer is not None and gradient is not None:
            buffer += gradient.view(buffer.shape)
