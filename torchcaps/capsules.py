"""What flows between layers, and what a model returns."""

from typing import NamedTuple

from torch import Tensor
from torch.linalg import vector_norm
from torch.utils._pytree import _register_namedtuple


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
        """How present each capsule is: sigmoid(scores), or the length of its pose if there are no scores."""
        if self.scores is not None:
            return self.scores.sigmoid()
        matrix = self.poses.dim() in (4, 6)  # (batch, capsules, rows, features), or that on a grid
        return vector_norm(self.poses, dim=(-2, -1) if matrix else -1)


class Prediction(NamedTuple):
    """What a classifier returns.

    Fields:
        scores: `(batch, classes)`, larger is likelier, in the range that the model's loss expects: activations in
            [0, 1] for a CapsNet and its margin loss, logits for a network trained by cross-entropy.
        capsules: the class capsules, if it has any.
    """

    scores: Tensor
    capsules: Capsules | None = None


for _cls in (Capsules, Prediction):
    # torch.export.save stores what a model returns by name; it has no public way to give a NamedTuple one.
    _register_namedtuple(_cls, serialized_type_name=f"torchcaps.{_cls.__name__}")
