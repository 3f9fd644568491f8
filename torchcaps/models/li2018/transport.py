"""Divergences between two batches of samples, by optimal transport or Kullback-Leibler.

The entropic transport is that of Cuturi: Sinkhorn Distances: Lightspeed Computation of Optimal Transport (2013), the
divergence that of Genevay, Peyré, Cuturi: Learning Generative Models with Sinkhorn Divergences (2018). Both are used as
in Li, Guo, Dai, Ouyang, Wang: Neural Network Encapsulation (2018), section 3.2. The numbers are lost in the text of
that paper; the defaults here are those of the authors' code.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.ops import at_least_float32, normalize
from torchcaps.ops.numerics import autocast_off
from torchcaps.utils.arguments import Count, FloatTensor, Positive, checked

Cost = Literal["cosine", "l2"]


@checked
def transport_cost(x: FloatTensor, y: FloatTensor, cost: Cost = "cosine") -> Tensor:
    r"""Compute the cost of moving each sample of one batch to each sample of another.

    .. math:: C_{ij} = 1 - \frac{x_i \cdot y_j}{|x_i| |y_j|} \quad \text{or} \quad C_{ij} = |x_i - y_j|

    Half-precision inputs are computed in float32.

    Args:
        x: samples `(n, features)`.
        y: samples `(m, features)`.
        cost: "cosine", where a zero vector is at distance 1 from everything and has zero gradients; or "l2", where
            equal samples have zero gradients.

    Returns:
        The costs C, `(n, m)`.
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(
            f"expected samples of shape (n, features) and (m, features), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    _check_pair(x, y)
    x, y = at_least_float32(x), at_least_float32(y)
    with autocast_off(x.device.type):
        if cost == "cosine":
            return 1 - _directions(x) @ _directions(y).T
        # Not by matrix products, which lose all digits where samples are close to each other.
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _directions(x: Tensor) -> Tensor:
    return torch.where(x.any(dim=1, keepdim=True), normalize(x), 0)


@checked
def transport_plan(cost: FloatTensor, eps: Positive = 1.0, iterations: Count = 10) -> Tensor:
    r"""Compute how much of each sample is moved where, by Sinkhorn iterations between two batches of equal weights.

    The iterations start at :math:`v_j = 1/m`. Each one computes

    .. math::
        u_i = \frac{1/n}{\sum_j e^{-C_{ij}/\epsilon} v_j}, \quad v_j = \frac{1/m}{\sum_i e^{-C_{ij}/\epsilon} u_i}

    and the result is :math:`P_{ij} = u_i e^{-C_{ij}/\epsilon} v_j`. It converges to the plan that minimizes

    .. math:: \langle P, C \rangle + \epsilon \sum_{ij} P_{ij} \log P_{ij}, \quad P 1 = 1/n, \quad P^T 1 = 1/m

    The computation is in logarithms, so that no epsilon is too small. Half-precision inputs are computed in float32.

    Args:
        cost: costs C, `(n, m)`.
        eps: epsilon, above 0; the smaller it is, the sharper the plan, and the more iterations it needs.
        iterations: number of iterations, at least 1. The sums of the columns are exact after each iteration, those of
            the rows in the limit.

    Returns:
        The plan P, `(n, m)`.

    Reference:
        Li et al. 2018, section 3.2 and appendix B.
    """
    if cost.dim() != 2 or not cost.numel():
        raise ValueError(f"expected costs of shape (n, m) with at least one sample each, got {tuple(cost.shape)}")
    cost = at_least_float32(cost)
    # Only the product u e^{-C/eps} v is kept: updating u makes its rows sum to 1/n, updating v its columns to 1/m.
    # Kept apart, log u and log v would grow like C/eps, and digits of the plan would be lost. For the same reason each
    # row's least cost is subtracted from C; the first update of u cancels this.
    log_plan = (cost.detach().amin(1, keepdim=True) - cost) / eps
    for _ in range(iterations):
        log_plan = log_plan.log_softmax(1)  # u, without its 1/n, which the update of v cancels
        log_plan = log_plan.log_softmax(0)  # v, without its 1/m, which follows below
    return log_plan.exp() / cost.shape[1]


@checked
def sinkhorn_divergence(
    x: FloatTensor,
    y: FloatTensor,
    eps: Positive = 1.0,
    iterations: Count = 10,
    cost: Cost = "cosine",
    debias: bool = True,
    plan_gradient: bool = False,
) -> Tensor:
    r"""Compute the cost of moving one batch onto another, minus the cost of moving each onto itself.

    With :math:`W(x, y) = \langle P, C \rangle`, where C are the costs and P is the plan between x and y,

    .. math:: D(x, y) = 2 W(x, y) - W(x, x) - W(y, y)

    The order of the samples in a batch does not matter.

    Args:
        x: samples `(n, ...)`; each is flattened.
        y: samples `(m, ...)` with the same number of features.
        eps, iterations: options of :func:`transport_plan`.
        cost: "cosine" or "l2", see :func:`transport_cost`.
        debias: use the paper's bias fix above, by which equal batches are at distance 0; False gives W(x, y).
        plan_gradient: also differentiate the iterations. Otherwise the plan is a constant, which gave the paper's
            networks fewer errors (4.58 % against 4.77 %).

    Returns:
        The divergence, a scalar.

    Reference:
        Li et al. 2018, section 3.2.
    """
    x, y = _samples(x, y)

    def moved(a: Tensor, b: Tensor) -> Tensor:
        costs = transport_cost(a, b, cost)
        plan = transport_plan(costs if plan_gradient else costs.detach(), eps, iterations)
        return (plan * costs).sum()

    return 2 * moved(x, y) - moved(x, x) - moved(y, y) if debias else moved(x, y)


@checked
def feature_kl(x: FloatTensor, y: FloatTensor) -> Tensor:
    r"""Compute the Kullback-Leibler divergence between the features of each sample and those of its counterpart.

    .. math:: \frac{1}{n} \sum_i \text{KL}(\text{softmax}(y_i) \,\|\, \text{softmax}(x_i))

    The softmax over the features is our choice: the paper names the Kullback-Leibler divergence as an alternative to
    transport, but not the distributions. Half-precision inputs are computed in float32.

    Args:
        x, y: samples `(n, ...)`; each is flattened.

    Returns:
        The mean over the batch, a scalar.

    Reference:
        Li et al. 2018, section 3.2 and Table 3, KL_loss.
    """
    x, y = _samples(x, y)
    if len(x) != len(y):
        raise ValueError(f"expected the same number of samples in both batches, got {len(x)} and {len(y)}")
    log_x, log_y = (at_least_float32(z).log_softmax(1) for z in (x, y))
    return F.kl_div(log_x, log_y, reduction="batchmean", log_target=True)


def _check_pair(x: Tensor, y: Tensor) -> None:
    if x.device != y.device:
        raise ValueError(f"one batch is on {x.device} and the other on {y.device}: move one of them")
    if at_least_float32(x).dtype != at_least_float32(y).dtype:
        raise TypeError(
            f"one batch is {x.dtype} and the other {y.dtype}: convert that of torch.float64 by .to(torch.float32)"
        )


def _samples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    _check_pair(x, y)
    if min(x.dim(), y.dim()) < 2 or x.shape[1:].numel() != y.shape[1:].numel() or not x.numel() * y.numel():
        raise ValueError(
            f"expected two batches of samples with the same number of features, got shapes {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    return x.flatten(1), y.flatten(1)
