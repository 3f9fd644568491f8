"""The projector and the loss of Konstantinou, Leontidis, Thota, Durrant: EquiCaps (2025).

A network learns without labels from pairs of views of one object, whose relative rotation is known. The presence of
the capsules shall be the same in both views, and their poses shall turn with the object. Shapes, terms and weights
follow the authors' code.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn import CapsuleLinear
from torchcaps.nn.inputs import check_map
from torchcaps.routing import SelfRouting
from torchcaps.utils.arguments import Count, NotNegative, checked


class EquiCapsProjector(nn.Module):
    r"""Capsules with matrices as poses, behind any backbone that gives a feature map.

    Two 3x3 convolutions, each with batch normalization, give each position a pose and a score of each child type. All
    children of the map then vote for the parents, and :class:`torchcaps.SelfRouting` decides which votes count.

    Args:
        in_channels: channels of the feature map.
        size: height and width of the feature map.
        capsules: number of parents, and of child types; 32 as published.
        rows: rows and columns of a pose: 3 for rotations as published, 4 for rotations with translations.

    Shape:
        - Input: `(batch, in_channels, size, size)`.
        - Output: Capsules: poses `(batch, capsules, rows, rows)`, and scores `(batch, capsules)`, whose sigmoids sum
          to 1 over the capsules.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchcaps.models import EquiCapsProjector
        >>> backbone = nn.Sequential(nn.Conv2d(1, 16, 5, stride=4), nn.ReLU())
        >>> network = nn.Sequential(backbone, EquiCapsProjector(16, size=6, capsules=8))
        >>> network(torch.rand(2, 1, 28, 28)).poses.shape
        torch.Size([2, 8, 3, 3])

    Reference:
        Konstantinou et al. 2025.
    """

    @checked
    def __init__(self, in_channels: Count, size: Count, capsules: Count = 32, rows: Count = 3):
        super().__init__()
        self.in_channels, self.size, self.capsules, self.rows = in_channels, size, capsules, rows
        features = rows * rows
        self.pose = nn.Sequential(
            nn.Conv2d(in_channels, capsules * features, 3, padding=1, bias=False), nn.BatchNorm2d(capsules * features)
        )
        self.score = nn.Sequential(nn.Conv2d(in_channels, capsules, 3, padding=1, bias=False), nn.BatchNorm2d(capsules))
        self.parents = CapsuleLinear(capsules * size * size, capsules, features, features, SelfRouting())
        nn.init.normal_(self.parents.weight, std=(2 / (capsules * features**2)) ** 0.5)  # as in the authors' code

    @checked
    def forward(self, features: Tensor) -> Capsules:
        check_map(features, self.in_channels, self.parents.weight, 2)
        if features.shape[2:] != (self.size, self.size):
            sides = "x".join(map(str, features.shape[2:]))
            raise ValueError(
                f"expected a map of {self.size}x{self.size} positions, got {sides}: build it with its size"
            )
        poses = self.pose(features).unflatten(1, (self.capsules, -1)).movedim(2, -1)
        parents = self.parents(Capsules(poses, self.score(features), pose_dims=1))
        return Capsules(parents.poses.unflatten(-1, (self.rows, self.rows)), parents.scores, pose_dims=2)


@checked
def equicaps_loss(
    first: Capsules,
    second: Capsules,
    transforms: Tensor,
    invariance: NotNegative = 0.1,
    equivariance: NotNegative = 5.0,
    deviation: NotNegative = 10.0,
    covariance: NotNegative = 1.0,
    mean_entropy: NotNegative = 1.0,
) -> Tensor:
    r"""Loss of EquiCaps: VICReg, in which poses turn with the view instead of staying the same.

    A view has n capsules, with activations :math:`a` that sum to 1, and poses :math:`P_j`. The transform T leads from
    the first view to the second. With normalized poses :math:`u_j = P_j T / |P_j T|` of the first view and
    :math:`u'_j = P'_j / |P'_j|` of the second (Frobenius norms), the five terms are

    .. math::
        L_{inv} &= -\tfrac1B \sum_b \sum_j a'_{bj} \log a_{bj}, \qquad
        L_{equi} = \tfrac{1}{B n d} \sum_b \sum_j |u_{bj} - u'_{bj}|^2, \\
        L_{dev} &= \tfrac12 \sum_{views} \tfrac1D \sum_k \max\left(0, 1 - \sqrt{\mathrm{var}(z_k) + 10^{-4}}\right),
        \qquad L_{cov} = \sum_{views} \tfrac1D \sum_{k \neq l} \mathrm{cov}(z_k, z_l)^2, \\
        L_{ent} &= \sum_{views} \left(\log n + \sum_j \bar a_j \log \bar a_j\right)

    with z the D = n (1 + d) activations and entries of normalized poses of a view, d the entries of a pose, B the size
    of the batch, :math:`\bar a` the mean over the batch, variances and covariances over the batch, divided by B - 1.

    Args:
        first, second: capsules of both views: poses `(batch, capsules, rows, rows)`, and scores `(batch, capsules)`,
            whose sigmoids sum to 1 over the capsules. Any network may give them.
        transforms: T, `(batch, rows, rows)`, such as `ViewPairs.transforms`.
        invariance, equivariance, deviation, covariance, mean_entropy: weights of the terms in this order, those of the
            authors' code.

    Returns:
        The weighted sum, a scalar. With several devices, the statistics are those of each device's own batch.

    Raises:
        ValueError: the shapes do not fit together, the capsules have no scores, or the batch has fewer than two pairs.

    Reference:
        Konstantinou et al. 2025, and Bardes et al. 2022 (VICReg) for deviation and covariance.
    """
    if first.scores is None or second.scores is None:
        raise ValueError("both views need capsules with scores, such as those of an EquiCapsProjector")
    batch, count = first.scores.shape
    rows = first.poses.shape[-1]
    if first.poses.shape != (batch, count, rows, rows) or second.poses.shape != first.poses.shape:
        raise ValueError(
            "expected poses of shape (batch, capsules, rows, rows) in both views, got "
            f"{tuple(first.poses.shape)} and {tuple(second.poses.shape)}"
        )
    if transforms.shape != (batch, rows, rows):
        raise ValueError(f"expected transforms of shape {(batch, rows, rows)}, got {tuple(transforms.shape)}")
    if batch < 2:
        raise ValueError("the loss compares the pairs of a batch with each other: give it two pairs at least")
    cross_entropy = -(second.scores.sigmoid() * F.logsigmoid(first.scores)).sum(1).mean()
    turned = F.normalize((first.poses @ transforms.unsqueeze(1)).flatten(2), dim=-1)
    expected = F.normalize(second.poses.flatten(2), dim=-1)
    loss = invariance * cross_entropy + equivariance * F.mse_loss(turned, expected)
    for scores, poses in ((first.scores, turned), (second.scores, expected)):
        activations = scores.sigmoid()
        embedding = torch.cat([activations, poses.flatten(1)], 1)
        covariances = embedding.T.cov()
        variances = covariances.diagonal()
        below = (1 - (variances + 1e-4).sqrt()).clamp_min(0).mean() / 2
        redundant = (covariances.square().sum() - variances.square().sum()) / embedding.shape[1]
        mean = activations.mean(0)
        entropy = -torch.special.xlogy(mean, mean).sum()
        loss = loss + deviation * below + covariance * redundant + mean_entropy * (math.log(count) - entropy)
    return loss
