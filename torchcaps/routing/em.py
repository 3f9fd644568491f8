"""EM routing.

Hinton, Sabour, Frosst: Matrix Capsules with EM Routing (2018), Procedure 1.

The inverse temperature follows the schedule that the authors gave in the paper's discussion. A variance
below `eps` counts as `eps`: votes that all agree have none, and the paper's cost would be -inf. In a convolution
the parents of one window compete for its children; the paper lets a child that several windows share be
divided among the parents of all of them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Gaussian, Votes, as_votes
from torchcaps.routing.base import Routing, missing_parameters
from torchcaps.routing.loop import Gradient, Step, iterate


def em_routing(
    votes: Tensor | Votes,
    activations: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    iterations: int = 3,
    inverse_temperature: float = 0.01,
    decay: float = 0.95,
    eps: float = 1e-6,
    gradient: Gradient = "unrolled",
    return_coefficients: bool = True,
) -> Capsules:
    r"""Fit a Gaussian per parent to the votes of the children assigned to it.

    With :math:`R_{ij} = 1/\text{parents}` at first, in iteration t = 0, 1, ... the M-step

    .. math::
        R_{ij} \leftarrow a_i R_{ij}, \quad
        \mu_j = \frac{\sum_i R_{ij} V_{ij}}{\sum_i R_{ij}}, \quad
        \sigma_j^2 = \frac{\sum_i R_{ij} (V_{ij} - \mu_j)^2}{\sum_i R_{ij}}, \quad
        \text{cost}_j = \sum_h (\beta_{u,j} + \log \sigma_j^h) \sum_i R_{ij}, \quad
        a_j = \text{sigmoid}(\lambda_t (\beta_{a,j} - \text{cost}_j))

    with :math:`\lambda_t = \text{inverse\_temperature} \cdot (1 - \text{decay}^{t+1})`, and before the next iteration
    the E-step :math:`R_{ij} = a_j N(V_{ij}; \mu_j, \sigma_j^2) / \sum_k a_k N(V_{ik}; \mu_k, \sigma_k^2)`.

    Args:
        votes: `(batch, children, parents, *pose)`.
        activations: `(batch, children)`, in [0, 1], no logits; None is all ones.
        beta_a, beta_u: `(parents,)`, or one number for all.
        iterations: M-steps, at least 1.
        inverse_temperature: lambda's limit.
        decay: how fast lambda gets there; 0 keeps lambda constant.
        eps: least variance.
        gradient: "unrolled", or "last": through the last M-step only.
        return_coefficients: return R of the last M-step before it is multiplied by the children's
            activations, `(batch, children, parents)`.

    Returns:
        Capsules with poses (the means), scores (the logits of a_j), variances and coefficients.

    Reference:
        Hinton et al. 2018, Procedure 1.
    """
    votes = as_votes(votes).gated(activations)
    for name, beta in (("beta_a", beta_a), ("beta_u", beta_u)):
        if beta.numel() != 1 and beta.shape != (votes.parents,):
            raise ValueError(f"expected {name} of shape (parents,) = ({votes.parents},), got {tuple(beta.shape)}")

    step = _step(votes, beta_a, beta_u, inverse_temperature, decay, eps)
    parents, agreement = iterate(step, iterations, gradient)
    return votes.with_coefficients(parents, votes.coefficients(agreement)) if return_coefficients else parents


def _step(votes: Votes, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float, decay: float, eps: float) -> Step:
    def step(agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        m = votes.moments(agreement)  # M-step, lines 2 to 4
        variance = m.variance.clamp_min(eps)
        score = em_score(variance, m.mass, t, beta_a, beta_u, inverse_temperature, decay)  # lines 5, 6
        # E-step: log a_j + log N(V_ij; mu_j, sigma_j^2), softmax over the parents.
        prior = F.logsigmoid(score) - 0.5 * (variance.log() + math.log(2 * math.pi)).sum(-1)
        return votes.capsules(m.mean, score, variance), Gaussian(m.mean, 1 / variance, prior)

    return step


def em_score(
    variance: Tensor,
    mass: Tensor,
    t: float,
    beta_a: Tensor,
    beta_u: Tensor,
    inverse_temperature: float = 0.01,
    decay: float = 0.95,
) -> Tensor:
    """The logit of a parent's activation in iteration t, `(batch, parents)`; lines 5 and 6."""
    cost = (beta_u.unsqueeze(-1) + 0.5 * variance.log()).sum(-1) * mass
    return inverse_temperature * (1 - decay ** (t + 1)) * (beta_a - cost)


class EMRouting(Routing):
    """EM routing (Hinton et al. 2018) as a plug-in for capsule layers.

    Learns beta_a and beta_u, one each per parent, starting at zero. Children without scores are fully active.

    Args:
        iterations: M-steps, at least 1.
        inverse_temperature, decay: the schedule `inverse_temperature * (1 - decay**(t + 1))`.
        eps: least variance.
        gradient: "unrolled" or "last".

    See :func:`torchcaps.functional.em_routing`.
    """

    gives_scores = True

    def __init__(
        self,
        iterations: int = 3,
        inverse_temperature: float = 0.01,
        decay: float = 0.95,
        eps: float = 1e-6,
        gradient: Gradient = "unrolled",
    ):
        super().__init__(iterations, gradient)
        self.eps = eps
        self.inverse_temperature, self.decay = inverse_temperature, decay
        self.register_parameter("beta_a", None)
        self.register_parameter("beta_u", None)

    def make_parameters(self, children: int, parents: int, features: int) -> None:
        self.beta_a = nn.Parameter(torch.empty(parents))
        self.beta_u = nn.Parameter(torch.empty(parents))

    def reset_parameters(self) -> None:
        if self.beta_a is not None and self.beta_u is not None:
            nn.init.zeros_(self.beta_a)
            nn.init.zeros_(self.beta_u)

    def step(self, votes: Votes) -> Step:
        if self.beta_a is None or self.beta_u is None:
            raise missing_parameters(self)
        return _step(votes, self.beta_a, self.beta_u, self.inverse_temperature, self.decay, self.eps)

    def extra_repr(self) -> str:
        return (
            f"iterations={self.iterations}, inverse_temperature={self.inverse_temperature}, "
            f"decay={self.decay}, gradient={self.gradient!r}"
        )
