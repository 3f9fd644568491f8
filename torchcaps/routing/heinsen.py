"""Heinsen routing: by the net benefit of using a vote and the net cost of ignoring it.

Heinsen: An Algorithm for Routing Capsules in All Domains (2019), Algorithm 1.

Three points follow the author's code: `eps` is added to denominators and variances, log N leaves out its constants, and
a soft k-means can replace the Gaussian.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Gaussian, WeightedVotes, at_least_float32, contract
from torchcaps.ops.triton import parents
from torchcaps.routing.base import Gradient, Init, Routing
from torchcaps.routing.gaussian import Fit
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import Count, Range, checked


class HeinsenRouting(Routing):
    r"""Activate parents by the benefit of the data they use minus the cost of the data they ignore.

    Let f be the logistic function, so that :math:`f(a_i)` is the gate of child i. The assignments start at
    :math:`R_{ij} = 1/\text{parents}`. Each iteration computes

    .. math::
        R_{ij} = \frac{f(a_j) N(V_{ij}; \mu_j, \sigma_j^2)}{\sum_k f(a_k) N(V_{ik}; \mu_k, \sigma_k^2)}, \quad
        D^{use}_{ij} = f(a_i) R_{ij}, \quad D^{ign}_{ij} = f(a_i) - D^{use}_{ij}, \\
        a_j = \sum_i \beta^{use}_{ij} D^{use}_{ij} - \sum_i \beta^{ign}_{ij} D^{ign}_{ij}, \quad
        \mu_j = \frac{\sum_i D^{use}_{ij} V_{ij}}{\sum_i D^{use}_{ij}}, \quad
        \sigma_j^2 = \frac{\sum_i D^{use}_{ij} (V_{ij} - \mu_j)^2}{\sum_i D^{use}_{ij}}

    Parents have scores :math:`a_j` and variances.

    The learned parameters are beta_use and beta_ignore, `(groups, parents)` each, initially zero. Children that share
    their vote weights share these too.

    Args:
        iterations: number of iterations, at least 1.
        model: "gaussian", or "kmeans", where log N is minus the squared distance.
        eps: number added to denominators and variances, at least 1e-6. The paper has none, and divides 0 by 0 for a
            sample of padding alone and for votes that all agree.
        gradient, init: see :class:`torchcaps.Routing`.

    Reference:
        Heinsen 2019, Algorithm 1, equations 1 to 5.
    """

    averages = True
    gain = 0.3
    shared_variance = 0.9
    gives_scores = True

    @checked
    def __init__(
        self,
        iterations: Count = 3,
        model: Literal["gaussian", "kmeans"] = "gaussian",
        eps: Annotated[float, Range(1e-6)] = 1e-5,
        gradient: Gradient = "unrolled",
        init: Init = "fan_in",
    ):
        super().__init__(iterations, gradient, init)
        self.model, self.eps = model, eps

    def build(self, shape: LayerShape) -> None:
        self.beta_use, self.beta_ignore = (nn.Parameter(torch.zeros(shape.groups, shape.parents)) for _ in range(2))

    def agreement(self, fit: Fit | Gaussian) -> Gaussian:  # lines 7, 8
        if isinstance(fit, Gaussian):
            return fit
        if self.model == "kmeans":
            return Gaussian(fit.mean, torch.full_like(fit.mean, 2), F.logsigmoid(fit.score))
        return fit.agreement()

    def step(self, votes: WeightedVotes, fit: Fit | Gaussian | None, t: int) -> tuple[Capsules, Fit | Gaussian]:
        # Lines 13 and 16 together: sum_i use D_use - ign (f(a_i) - D_use) = sum_i (use + ign) D_use - sum_i ign f(a_i).
        betas = at_least_float32(self.beta_use) + at_least_float32(self.beta_ignore)
        m = votes.moments(betas, self.eps)  # lines 12, 17, 18
        assert m.benefit is not None
        score = m.benefit - _cost_of_all(self.beta_ignore, votes)  # line 16
        known = votes.has_kernels and self.model == "gaussian"
        if known and parents.takes(m.variance.shape[-1], m.variance, score):
            # All below in one kernel, and the next iteration's Gaussian.
            variance, _, *gaussian = parents.fit(m.variance, score, eps=self.eps)
            return votes.capsules(m.mean, score, variance), Gaussian(m.mean, *gaussian)
        variance = m.variance + self.eps
        return votes.capsules(m.mean, score, variance), Fit(m.mean, 0.5 * variance.log(), score)


def _cost_of_all(beta_ignore: Tensor, votes: WeightedVotes) -> Tensor:
    """Return the cost of ignoring all children, sum_i beta_ign[i,j] f(a_i), `(batch or 1, parents or 1)`."""
    each = votes.children // beta_ignore.shape[0]
    if votes.gates is None:
        return each * at_least_float32(beta_ignore).sum(0, keepdim=True)
    return contract("bg,gj->bj", votes.gates.unflatten(1, (-1, each)).sum(2), beta_ignore.to(votes.gates.dtype))
