"""EM routing.

Hinton, Sabour, Frosst: Matrix Capsules with EM Routing (2018), Procedure 1.

Li et al. (2018) run the same procedure with costs that are stretched to a fixed range, and a lambda that grows by one
in each iteration.

The inverse temperature follows the schedule that the authors gave in the paper's discussion. A variance
below `eps` counts as `eps`: votes that all agree have none, and the paper's cost would be -inf. In a convolution
the parents of one window compete for its children; the paper lets a child that several windows share be
divided among the parents of all of them.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement, Gaussian, Votes, as_votes, nonzero
from torchcaps.routing.base import Routing, missing_parameters
from torchcaps.routing.loop import Gradient, Step, iterate

Temperature = Literal["saturating", "linear"]


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
    schedule: Temperature = "saturating",
    cost_range: float | None = None,
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
        activations: `(batch, children)`, at least 0, no logits; None is all ones.
        beta_a, beta_u: `(parents,)`, or one number for all.
        iterations: M-steps, at least 1.
        inverse_temperature: lambda's limit.
        decay: how fast lambda gets there; 0 keeps lambda constant.
        eps: least variance.
        gradient: "unrolled", or "last": through the last M-step only.
        return_coefficients: return R of the last M-step before it is multiplied by the children's
            activations, `(batch, children, parents)`.
        schedule: of lambda: "saturating" as above, or "linear", `inverse_temperature * (t + 1)`, without decay.
        cost_range: r stretches the costs of each sample's parents, linearly, to run from -r/2 to r/2; None leaves them.

    Returns:
        Capsules with poses (the means), scores (the logits of a_j), variances and coefficients.

    Reference:
        Hinton et al. 2018, Procedure 1; schedule and cost_range: Li et al. 2018, appendix A.1, and the authors' code
        (inverse_temperature=1, schedule="linear", cost_range=10).
    """
    check_schedule(schedule, cost_range)
    votes = as_votes(votes).gated(activations)
    for name, beta in (("beta_a", beta_a), ("beta_u", beta_u)):
        if beta.numel() != 1 and beta.shape != (votes.parents,):
            raise ValueError(f"expected {name} of shape (parents,) = ({votes.parents},), got {tuple(beta.shape)}")

    step = _step(votes, beta_a, beta_u, inverse_temperature, decay, eps, schedule, cost_range)
    parents, agreement = iterate(step, iterations, gradient)
    return votes.with_coefficients(parents, votes.coefficients(agreement)) if return_coefficients else parents


def _step(
    votes: Votes,
    beta_a: Tensor,
    beta_u: Tensor,
    inverse_temperature: float,
    decay: float,
    eps: float,
    schedule: Temperature,
    cost_range: float | None,
) -> Step:
    def step(agreement: Agreement | None, t: float) -> tuple[Capsules, Agreement]:
        m = votes.moments(agreement)  # M-step, lines 2 to 4
        variance = m.variance.clamp_min(eps)
        lambda_t = em_inverse_temperature(t, inverse_temperature, decay, schedule)
        score = em_score(variance, m.mass, beta_a, beta_u, lambda_t, cost_range)  # lines 5, 6
        # E-step: log a_j + log N(V_ij; mu_j, sigma_j^2), softmax over the parents.
        prior = F.logsigmoid(score) - 0.5 * (variance.log() + math.log(2 * math.pi)).sum(-1)
        return votes.capsules(m.mean, score, variance), Gaussian(m.mean, 1 / variance, prior)

    return step


def em_score(
    variance: Tensor,
    mass: Tensor,
    beta_a: Tensor,
    beta_u: Tensor,
    inverse_temperature: float,
    cost_range: float | None = None,
) -> Tensor:
    """The logit of a parent's activation, `(batch, parents)`; lines 5 and 6."""
    cost = (beta_u.unsqueeze(-1) + 0.5 * variance.log()).sum(-1) * mass
    if cost_range is not None:
        least, most = cost.aminmax(dim=1, keepdim=True)
        cost = cost_range * ((cost - least) / nonzero(most - least) - 0.5)
    return inverse_temperature * (beta_a - cost)


def em_inverse_temperature(
    t: float, inverse_temperature: float = 0.01, decay: float = 0.95, schedule: Temperature = "saturating"
) -> float:
    """Lambda in iteration t, which is infinite where a routing runs to its end."""
    if schedule == "saturating":
        return inverse_temperature * (1 - decay ** (t + 1))
    if math.isinf(t):
        raise ValueError("schedule='linear' never comes to rest: an equilibrium needs schedule='saturating'")
    return inverse_temperature * (t + 1)


def check_schedule(schedule: str, cost_range: float | None) -> None:
    if schedule not in ("saturating", "linear"):
        raise ValueError(f"schedule must be 'saturating' or 'linear', got {schedule!r}")
    if cost_range is not None and not 0 < cost_range < math.inf:
        raise ValueError(f"cost_range must be None, or above 0 and finite, got {cost_range}")


class EMRouting(Routing):
    """EM routing (Hinton et al. 2018) as a plug-in for capsule layers.

    Learns beta_a and beta_u, one each per parent, starting at zero. Children without scores are fully active.

    Args:
        iterations: M-steps, at least 1.
        inverse_temperature, decay: the schedule `inverse_temperature * (1 - decay**(t + 1))`.
        eps: least variance.
        gradient: "unrolled" or "last".
        schedule: "saturating", or "linear", `inverse_temperature * (t + 1)`.
        cost_range: stretch the costs of the parents to run over so much, around 0; None leaves them as they are.

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
        schedule: Temperature = "saturating",
        cost_range: float | None = None,
    ):
        super().__init__(iterations, gradient)
        check_schedule(schedule, cost_range)
        self.eps, self.schedule, self.cost_range = eps, schedule, cost_range
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
        return _step(
            votes,
            self.beta_a,
            self.beta_u,
            self.inverse_temperature,
            self.decay,
            self.eps,
            self.schedule,
            self.cost_range,
        )

    def extra_repr(self) -> str:
        return (
            f"iterations={self.iterations}, inverse_temperature={self.inverse_temperature}, "
            f"decay={self.decay}, gradient={self.gradient!r}, schedule={self.schedule!r}, cost_range={self.cost_range}"
        )
