"""Routing by net benefit to use and net cost to ignore.

Heinsen: An Algorithm for Routing Capsules in All Domains (2019), Algorithm 1.

As in the authors' code, `eps` joins the denominators and the variances, log N leaves out its constants, and
a soft k-means may stand in for the Gaussian.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Gaussian, Votes, as_votes, at_least_float32, contract
from torchcaps.routing.base import Routing, missing_parameters, presence
from torchcaps.routing.loop import Gradient, Step, iterate

Model = Literal["gaussian", "kmeans"]


def heinsen_routing(
    votes: Tensor | Votes,
    scores: Tensor | None,
    beta_use: Tensor,
    beta_ignore: Tensor | None = None,
    iterations: int = 3,
    model: Model = "gaussian",
    eps: float = 1e-5,
    gradient: Gradient = "unrolled",
    return_coefficients: bool = True,
) -> Capsules:
    r"""Activate parents by the benefit of the data they use, less the cost of the data they ignore.

    With f the logistic function and :math:`R_{ij} = 1/\text{parents}` at first, in each iteration

    .. math::
        R_{ij} = \frac{f(a_j) N(V_{ij}; \mu_j, \sigma_j^2)}{\sum_k f(a_k) N(V_{ik}; \mu_k, \sigma_k^2)}, \quad
        D^{use}_{ij} = f(a_i) R_{ij}, \quad D^{ign}_{ij} = f(a_i) - D^{use}_{ij}, \\
        a_j = \sum_i \beta^{use}_{ij} D^{use}_{ij} - \sum_i \beta^{ign}_{ij} D^{ign}_{ij}, \quad
        \mu_j = \frac{\sum_i D^{use}_{ij} V_{ij}}{\sum_i D^{use}_{ij}}, \quad
        \sigma_j^2 = \frac{\sum_i D^{use}_{ij} (V_{ij} - \mu_j)^2}{\sum_i D^{use}_{ij}}

    Args:
        votes: `(batch, children, parents, *pose)`.
        scores: `(batch, children)` logits a_i, from -inf (padding: changes nothing) to inf; None is all inf.
        beta_use, beta_ignore: `(groups, parents or 1)`: children in groups of equal size share theirs, as many
            groups as children is one each; without beta_ignore one beta serves for both.
        iterations: at least 1.
        model: "gaussian", or "kmeans": log N is minus the squared distance.
        eps: added to denominators and variances; 0 gives the paper's formulas to the letter, NaN where they divide 0
            by 0: for a sample of padding alone, and for votes that all agree.
        gradient: "unrolled", or "last": through the last iteration only.
        return_coefficients: return R of the last iteration, `(batch, children, parents)`.

    Returns:
        Capsules with poses (the means), scores a_j, variances and coefficients.

    Reference:
        Heinsen 2019, Algorithm 1, equations 1 to 5.
    """
    check_model(model)
    votes = as_votes(votes).gated(presence(scores))
    parents, agreement = iterate(_step(votes, beta_use, beta_ignore, model, eps), iterations, gradient)
    return votes.with_coefficients(parents, votes.coefficients(agreement)) if return_coefficients else parents


def _step(votes: Votes, beta_use: Tensor, beta_ignore: Tensor | None, model: Model, eps: float) -> Step:
    beta_ignore = beta_use if beta_ignore is None else beta_ignore
    # Lines 13, 16: sum_i use D_use - ign (f(a_i) - D_use) = sum_i (use + ign) D_use - sum_i ign f(a_i).
    betas = beta_use + beta_ignore
    cost_of_all = _cost_of_all(beta_ignore, votes)

    def step(agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        m = votes.moments(agreement, betas, eps)  # lines 12, 17, 18
        assert m.benefit is not None
        score = m.benefit - cost_of_all  # line 16
        variance = m.variance + eps
        prior = F.logsigmoid(score)  # lines 7, 8 of the next iteration
        if model == "gaussian":
            prior, precision = prior - 0.5 * variance.log().sum(-1), 1 / variance
        else:
            precision = torch.full_like(variance, 2)
        return votes.capsules(m.mean, score, variance), Gaussian(m.mean, precision, prior)

    return step


def _cost_of_all(beta_ignore: Tensor, votes: Votes) -> Tensor:
    """What ignoring all children would cost each parent: sum_i beta_ign[i,j] f(a_i), `(batch or 1, parents or 1)`."""
    each = votes.children // beta_ignore.shape[0]
    if votes.gates is None:
        return each * beta_ignore.sum(0, keepdim=True)
    return contract("bg,gj->bj", votes.gates.unflatten(1, (-1, each)).sum(2), at_least_float32(beta_ignore))


def check_model(model: str) -> None:
    if model not in ("gaussian", "kmeans"):
        raise ValueError(f"model must be 'gaussian' or 'kmeans', got {model!r}")


class HeinsenRouting(Routing):
    """Routing by net benefit and net cost (Heinsen 2019) as a plug-in for capsule layers.

    Learns beta_use and beta_ignore, `(children or 1, parents or 1)`, starting at zero.

    Args:
        iterations: at least 1.
        single_beta: one beta for the benefit and the cost.
        model: "gaussian" or "kmeans".
        eps: added to denominators and variances.
        gradient: "unrolled" or "last".

    See :func:`torchcaps.functional.heinsen_routing`.
    """

    gives_scores = True

    def __init__(
        self,
        iterations: int = 3,
        single_beta: bool = False,
        model: Model = "gaussian",
        eps: float = 1e-5,
        gradient: Gradient = "unrolled",
    ):
        super().__init__(iterations, gradient)
        check_model(model)
        self.single_beta, self.model, self.eps = single_beta, model, eps
        self.register_parameter("beta_use", None)
        self.register_parameter("beta_ignore", None)

    def make_parameters(self, children: int, parents: int, features: int) -> None:
        self.beta_use = nn.Parameter(torch.empty(children, parents))
        if not self.single_beta:
            self.beta_ignore = nn.Parameter(torch.empty(children, parents))

    def reset_parameters(self) -> None:
        for beta in self.parameters():
            nn.init.zeros_(beta)

    def step(self, votes: Votes) -> Step:
        if self.beta_use is None:
            raise missing_parameters(self)
        return _step(votes, self.beta_use, self.beta_ignore, self.model, self.eps)

    def extra_repr(self) -> str:
        return (
            f"iterations={self.iterations}, single_beta={self.single_beta}, model={self.model!r}, "
            f"eps={self.eps}, gradient={self.gradient!r}"
        )
