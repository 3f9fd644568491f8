"""What flows between layers, and what a model returns."""

from typing import NamedTuple

from torch import Tensor
from torch.linalg import vector_norm


class Capsules(NamedTuple):
    """Capsules of one layer: poses, and what their routing found out beside them.

    Fields:
        poses: `(batch, capsules, *pose)` or, on a grid, `(batch, types, height, width, *pose)`;
            a pose is `(features,)` (a vector) or `(rows, features)` (a matrix).
        scores: how present each capsule is, as a logit from -inf (padding) to inf; the shape of
            `poses` without the pose. None where the algorithm has no such thing.
        variances: like `poses`, for the routings with a Gaussian model; else None.
        coefficients: how much of each child each parent takes, if they were asked for; else None.
    """

    poses: Tensor
    scores: Tensor | None = None
    variances: Tensor | None = None
    coefficients: Tensor | None = None

    @property
    def activations(self) -> Tensor:
        """Presence in [0, 1]: sigmoid(scores), or the length of each (vector) pose if there are no scores."""
        return vector_norm(self.poses, dim=-1) if self.scores is None else self.scores.sigmoid()


class Prediction(NamedTuple):
    """What a classifier returns: `scores` (batch, classes), larger is likelier, and its class capsules."""

    scores: Tensor
    capsules: Capsules | None = None
