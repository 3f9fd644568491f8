"""EM routing.

Hinton, Sabour, Frosst: Matrix Capsules with EM Routing (2018), Procedure 1.

The inverse temperature follows the schedule that the authors gave in the paper's discussion. Variances are at least
`eps`: votes that all agree have variance 0, and the paper's cost would be -inf. In a convolution the parents of one
window compete for its children; in the paper the parents of all windows that share a child do. The linear schedule and
the range of costs are from Li et al. (2018), appendix A.1, and their code.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import Gaussian, WeightedVotes
from torchcaps.ops.triton import parents
from torchcaps.routing.base import Gradient, Init, Routing
from torchcaps.routing.gaussian import Fit
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import Count, Positive, Range, checked


class EMRouting(Routing):
    r"""Route by fitting one Gaussian per parent to the votes of the children assigned to it.

    The assignments start at :math:`R_{ij} = 1/\text{parents}`. With the gates :math:`a_i` of the children, the M-step
    of iteration t = 0, 1, ... computes

    .. math::
        R_{ij} \leftarrow a_i R_{ij}, \quad
        \mu_j = \frac{\sum_i R_{ij} V_{ij}}{\sum_i R_{ij}}, \quad
        \sigma_j^2 = \frac{\sum_i R_{ij} (V_{ij} - \mu_j)^2}{\sum_i R_{ij}}, \\
        \text{cost}_j = \sum_h (\beta_{u,j} + \log \sigma_j^h) \sum_i R_{ij}, \quad
        a_j = \text{sigmoid}(\lambda_t (\beta_{a,j} - \text{cost}_j))

    with :math:`\lambda_t = \text{inverse\_temperature} \cdot (1 - \text{decay}^{t+1})`. Between two M-steps the E-step
    computes :math:`R_{ij} = a_j N(V_{ij}; \mu_j, \sigma_j^2) / \sum_k a_k N(V_{ik}; \mu_k, \sigma_k^2)`. Parents have
    scores, the logits of :math:`a_j`, and variances.

    The learned parameters are beta_a and beta_u, `(parents,)` each, initially zero.

    Args:
        iterations: number of M-steps, at least 1.
        inverse_temperature, decay: limit of lambda, and the factor by which lambda's distance to it shrinks in each
            iteration; 0 keeps lambda constant. Only schedule="saturating" has a decay.
        eps: least variance, at least 1e-6: votes that agree still differ by the rounding of float32, and divided by a
            smaller variance, this rounding would decide the logits and the gradients.
        schedule: schedule of lambda: "saturating" as above, or "linear" for `inverse_temperature * (t + 1)`.
        cost_range: r rescales the costs of each sample's parents to [-r/2, r/2]; None leaves them as they are.
        gradient, init: see :class:`torchcaps.Routing`.

    Reference:
        Hinton et al. 2018, Procedure 1.
    """

    averages = True
    gain = 0.3
    shared_variance = 0.9
    gives_scores = True

    @checked
    def __init__(
        self,
        iterations: Count = 3,
        inverse_temperature: Positive = 0.01,
        decay: Annotated[float, Range(0, 1, open="most")] = 0.95,
        eps: Annotated[float, Range(1e-6)] = 1e-6,
        gradient: Gradient = "unrolled",
        schedule: Literal["saturating", "linear"] = "saturating",
        cost_range: Positive | None = None,
        init: Init = "fan_in",
    ):
        super().__init__(iterations, gradient, init)
        if schedule == "linear" and decay != 0.95:
            raise ValueError("decay is of schedule='saturating': leave it out, or take this schedule")
        self.inverse_temperature, self.decay, self.eps = inverse_temperature, decay, eps
        self.schedule, self.cost_range = schedule, cost_range

    def build(self, shape: LayerShape) -> None:
        self.beta_a, self.beta_u = (nn.Parameter(torch.zeros(shape.parents)) for _ in range(2))

    def agreement(self, fit: Fit | Gaussian) -> Gaussian:
        return fit if isinstance(fit, Gaussian) else fit.agreement()  # E-step

    def step(self, votes: WeightedVotes, fit: Fit | Gaussian | None, t: int) -> tuple[Capsules, Fit | Gaussian]:
        m = votes.moments()  # M-step, lines 2 to 4
        rise = 1 - self.decay ** (t + 1) if self.schedule == "saturating" else t + 1
        factor, betas = self.inverse_temperature * rise, (self.beta_a, self.beta_u)
        known = votes.has_kernels and self.cost_range is None
        if known and parents.takes(m.variance.shape[-1], m.variance, m.mass, *betas):
            # All below in one kernel, and the next E-step's Gaussian.
            variance, score, *gaussian = parents.fit(m.variance, None, m.mass, *betas, factor, floor=self.eps)
            return votes.capsules(m.mean, score, variance), Gaussian(m.mean, *gaussian)
        variance = m.variance.clamp_min(self.eps)
        log_sigma = 0.5 * variance.log()
        cost = (self.beta_u.unsqueeze(-1) + log_sigma).sum(-1) * m.mass  # line 5
        if self.cost_range is not None:
            cost = self.cost_range * _rescaled(cost, m.mass, log_sigma)
        score = factor * (self.beta_a - cost)  # line 6
        return votes.capsules(m.mean, score, variance), Fit(m.mean, log_sigma, score)


def _rescaled(cost: Tensor, mass: Tensor, log_sigma: Tensor) -> Tensor:
    """Move the costs of each sample to [-1/2, 1/2]; if they differ by rounding errors only, to -1/2."""
    least, most = cost.amin(1, keepdim=True), cost.amax(1, keepdim=True)
    noise = 64 * torch.finfo(cost.dtype).eps * (mass + 2 * mass * log_sigma.abs().sum(-1)).amax(1, keepdim=True)
    spread = torch.where(most - least <= noise.clamp_min(1e-30), torch.inf, most - least)
    return (cost - least) / spread - 0.5
