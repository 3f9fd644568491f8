"""Variational Bayes routing.

De Sousa Ribeiro, Leontidis, Kollias: Capsule Routing via Variational Bayes (2020), Algorithm 1.

Three points differ from the authors' code. It divides by the mass of a parent, which gives NaN if no child is left to
it; here such a parent has its prior. In convolutions its coefficients sum to one over all windows that contain a child;
here they do over the parents of one window. It clamps the sum of a child's densities at 1e-11 before it divides by it,
so that children far from all parents lose weight (55 % of them at 16 entries and votes of standard deviation 1), and at
last gives NaN; here the coefficients are a softmax.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Gaussian, WeightedVotes
from torchcaps.ops.triton import parents
from torchcaps.routing.base import Gradient, Init, Routing
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import Count, checked


class VBRouting(Routing):
    r"""Route by variational inference of a mixture of Gaussians in D dimensions, one for each parent.

    From :math:`R_{ij} = 1/\text{parents}` on, with the gates :math:`a_i` of the children, each iteration computes

    .. math::
        R_{ij} \leftarrow a_i R_{ij}, \quad R_j = \sum_i R_{ij}, \quad
        \alpha_j = 1 + R_j, \quad \kappa_j = 1 + R_j, \quad \nu_j = D + 1 + R_j, \\
        \mu_j = \frac{1}{R_j} \sum_i R_{ij} V_{ij}, \quad m_j = \frac{R_j}{\kappa_j} \mu_j, \quad
        P_j = 1 + \sum_i R_{ij} (V_{ij} - \mu_j)^2 + \frac{R_j}{\kappa_j} \mu_j^2, \\
        E \ln \pi_j = \psi(\alpha_j) - \psi \Big( \sum_k \alpha_k \Big), \quad
        E \ln |\Lambda_j| = \sum_{h<D} \psi \Big( \frac{\nu_j - h}{2} \Big) + D \ln 2 - \sum_h \ln P_j^h, \\
        R_{ij} \leftarrow \text{softmax}_j \Big( E \ln \pi_j + \tfrac12 E \ln |\Lambda_j|
            - \tfrac12 \Big( \frac{D}{\kappa_j} + \nu_j \sum_h \frac{(V_{ij}^h - m_j^h)^2}{P_j^h} \Big) \Big)

    With :math:`H_j = \frac{D}{2} \ln(2 \pi e) - \frac12 E \ln |\Lambda_j|`, the parents have the poses
    :math:`\text{BN}(m_j)` and the activations :math:`\text{sigmoid}(\text{BN}(-e^{E \ln \pi_j} H_j))`. As in the
    authors' code, the batch normalization BN has one mean and one variance for each parent, over all samples and
    positions (and all entries of a pose), an epsilon of 1e-5, and nothing learned. Because it subtracts the mean,
    adding the paper's :math:`\beta_a` and :math:`\beta_u` would change nothing: they are left out.
    The running values follow the last iteration alone, so a concurrent stack cannot use it.

    Args:
        iterations: number of iterations, at least 1; with 1 the coefficients are uniform.
        gradient, init: see :class:`torchcaps.Routing`; init="paper" is the authors' Xavier uniform.

    Reference:
        De Sousa Ribeiro et al. 2020, Algorithm 1.
    """

    gain = 0.125  # batch norm sets the lengths
    max_difference = 0.1  # votes that spread more than the prior's 1 make hard coefficients
    gives_scores = True

    @checked
    def __init__(self, iterations: Count = 3, gradient: Gradient = "unrolled", init: Init = "paper"):
        super().__init__(iterations, gradient, init)

    def build(self, shape: LayerShape) -> None:
        self.pose_norm, self.score_norm = (nn.BatchNorm1d(shape.parents, affine=False) for _ in range(2))

    def reset_weight_as_in_paper(self, weight: Tensor, shape: LayerShape) -> None:
        # As of the weights of a convolution: those that shared positions share count once.
        fans = shape.groups * shape.rows * shape.in_features + shape.window * shape.parents * shape.features
        nn.init.uniform_(weight, -((6 / fans) ** 0.5), (6 / fans) ** 0.5)

    def step(self, votes: WeightedVotes, logits: Gaussian | None, t: int) -> tuple[Capsules, Gaussian]:
        r, mean, variance, _ = votes.moments()
        d, is_last = mean.shape[-1], t == self.iterations - 1
        if votes.has_kernels and parents.takes(votes.parents * d, r, mean, variance):  # all below in one kernel
            m, precision, prior, scores = parents.posterior(r, mean, variance)
            return self._parents(votes, m, scores, is_last), Gaussian(m, precision, prior)
        alpha, kappa, nu = 1 + r, 1 + r, d + 1 + r
        m = (r / kappa).unsqueeze(-1) * mean
        p = 1 + r.unsqueeze(-1) * variance + (r / kappa).unsqueeze(-1) * mean.square()
        log_share = torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))
        below = torch.arange(d, device=nu.device, dtype=nu.dtype)
        log_det = (torch.digamma((nu.unsqueeze(-1) - below) / 2) + math.log(2) - p.log()).sum(-1)
        entropy = d / 2 * math.log(2 * math.pi * math.e) - log_det / 2
        after = Gaussian(m, nu.unsqueeze(-1) / p, log_share + (log_det - d / kappa) / 2)
        return self._parents(votes, m, -log_share.exp() * entropy, is_last), after

    def _parents(self, votes: WeightedVotes, poses: Tensor, scores: Tensor, is_last: bool) -> Capsules:
        """Return the parents, after the batch norms."""
        pairs = (poses, self.pose_norm), (scores, self.score_norm)
        return votes.capsules(*(_normalized(x, norm, is_last) for x, norm in pairs))


def _normalized(x: Tensor, norm: Any, counts: bool) -> Tensor:
    """Return the batch norm of `(batch, parents, ...)`; `counts` says whether running values change in training."""
    types = norm.num_features  # 1 where parents share their weights
    values = x.reshape(x.shape[0] * x.shape[1] // types, types, x.shape[2:].numel()).to(norm.running_mean)
    if norm.training and values.shape[0] * values.shape[2] == 1:
        raise ValueError("batch normalization needs more than one sample in training: use a larger batch, or eval()")
    if norm.training and not counts:
        return nn.functional.batch_norm(values, None, None, training=True, eps=norm.eps).view_as(x)
    if norm.training:
        return norm(values).view_as(x)
    # Running values start at 0 and 1, which the first hundred batches would not outweigh: true variances are small.
    # Without the share that is left of this start, they are means of the batches alone.
    left = (1 - norm.momentum) ** norm.num_batches_tracked.to(values.dtype)
    left = torch.where(left < 1, left, 0)  # no batch yet
    mean, variance = norm.running_mean / (1 - left), (norm.running_var - left).clamp_min(0) / (1 - left)
    return nn.functional.batch_norm(values, mean, variance, eps=norm.eps).view_as(x)
