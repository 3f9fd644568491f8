"""What routings with a Gaussian for each parent share."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from torchcaps.ops import Gaussian


class Fit(NamedTuple):
    """A Gaussian for each parent, and the logit of its activation."""

    mean: Tensor
    log_sigma: Tensor
    score: Tensor

    def agreement(self) -> Gaussian:
        """Return log a_j + log N(V_ij; mu_j, sigma_j^2) without constants, which cancel in the softmax over parents."""
        prior = F.logsigmoid(self.score) - self.log_sigma.sum(-1)
        return Gaussian(self.mean, (-2 * self.log_sigma).exp(), prior)
