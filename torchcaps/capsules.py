"""What flows between layers, and what a model returns."""

from typing import Any, NamedTuple, Self

from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.private import register_namedtuple


class Capsules(NamedTuple):
    """Capsules of one layer: poses, and what their routing found out beside them.

    Fields:
        poses: `(batch, capsules, *pose)`, or on a grid `(batch, types, height, width, *pose)`, or on a line `(batch,
            types, length, *pose)`; a pose is `(features,)` (a vector) or `(rows, features)` (a matrix).
        scores: how present each capsule is, as a logit from -inf (padding) to inf; the shape of
            `poses` without the pose. None where the algorithm has no such thing.
        variances: like `poses`, for the routings with a Gaussian model; else None.
        coefficients: how much of each child each parent takes, if they were asked for; else None.
        pose_dims: dimensions of a pose, 1 or 2; None: 2 if `poses` have 4 or 6 dimensions, else 1. It must be given on
            a line, whose shapes could also be those of matrices, or of a grid.
    """

    poses: Tensor
    scores: Tensor | None = None
    variances: Tensor | None = None
    coefficients: Tensor | None = None
    pose_dims: int | None = None

    @property
    def activations(self) -> Tensor:
        """How present each capsule is: sigmoid(scores), or the length of its pose if there are no scores."""
        if self.scores is not None:
            return self.scores.sigmoid()
        return vector_norm(self.poses, dim=(-2, -1) if self._pose_dims() == 2 else -1)

    def flatten_grid(self) -> Self:
        """The same capsules in one list, types before positions, without their coefficients: poses `(batch, capsules,
        *pose)`."""
        last = -1 - self._pose_dims()
        return type(self)(
            self.poses.flatten(1, last),
            None if self.scores is None else self.scores.flatten(1),
            None if self.variances is None else self.variances.flatten(1, last),
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same capsules on another device or in another precision; arguments as for :meth:`torch.Tensor.to`."""
        fields: Any = (x.to(*args, **kwargs) if isinstance(x, Tensor) else x for x in self)
        return type(self)(*fields)

    def detach(self) -> Self:
        """The same capsules as constants: no gradient goes through them."""
        fields: Any = (x.detach() if isinstance(x, Tensor) else x for x in self)
        return type(self)(*fields)

    def _pose_dims(self) -> int:
        return self.pose_dims or (2 if self.poses.dim() in (4, 6) else 1)


class Prediction(NamedTuple):
    """What a classifier returns.

    Fields:
        scores: `(batch, classes)`, larger is likelier, in the range that the model's loss expects: activations in
            [0, 1] for a CapsNet and its margin loss, logits for a network trained by cross-entropy.
        capsules: the class capsules, if it has any.
    """

    scores: Tensor
    capsules: Capsules | None = None


register_namedtuple(Capsules, "torchcaps.Capsules")
register_namedtuple(Prediction, "torchcaps.Prediction")
