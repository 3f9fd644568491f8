"""`Capsules`, the input and output of capsule layers, and `Prediction` and `Segmentation`, the outputs of models."""

import warnings
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.utils.arguments import can_read, shown, shown_with_type
from torchcaps.utils.private import register_namedtuple

IGNORED = -100  # in masks: a position that does not count, as for nn.CrossEntropyLoss


class Capsules(NamedTuple):
    """Capsules of one layer: poses, and the other results of their routing.

    Fields:
        poses: `(batch, capsules, *pose)`; on a line `(batch, types, length, *pose)`, on a grid `(batch, types, height,
            width, *pose)`, in a volume `(batch, types, depth, height, width, *pose)`; a pose is `(features,)` (a
            vector) or `(rows, features)` (a matrix).
        scores: how present each capsule is, as a logit from -inf (padding) to inf, in the shape of `poses` without the
            pose; None if the algorithm has no scores. As input of a layer they may also be a bool mask: True for a
            capsule, False for padding. A `key_padding_mask` of PyTorch is the opposite: give `~mask`.
        variances: variances of the votes for each pose, like `poses`, if the routing has a Gaussian model; else None.
        coefficients: routing coefficients between children and these capsules, if they were requested; else None.
        pose_dims: number of dimensions of a pose, 1 or 2, which layers give where the shape of the poses does not say
            it. None: 1 if `poses` has 3 or 5 dimensions, 2 if it has 7, and unknown if it has 4 or 6: matrices, or
            vectors with one place dimension more.
    """

    poses: Tensor
    scores: Tensor | None = None
    variances: Tensor | None = None
    coefficients: Tensor | None = None
    pose_dims: int | None = None

    @property
    def activations(self) -> Tensor:
        """How present each capsule is: `sigmoid(scores)`, or the length of its pose if there are no scores."""
        if self.scores is not None:
            sizes = (self.known_pose_dims(),) if self.pose_dims else (1, 2)  # scores alone need no pose_dims
            if self.scores.shape not in [self.poses.shape[:-size] for size in sizes]:
                raise ValueError(f"scores {tuple(self.scores.shape)} do not fit poses {tuple(self.poses.shape)}")
            return as_logits(self.scores, self.poses).sigmoid()
        return vector_norm(self.poses, dim=(-2, -1) if self.known_pose_dims() == 2 else -1)

    def flatten_grid(self) -> Self:
        """Return the same capsules as one list, types before positions: poses `(batch, capsules, *pose)`. The
        coefficients are dropped."""
        dims = self.known_pose_dims()
        return type(self)(
            self.poses.flatten(1, -1 - dims),
            None if self.scores is None else self.scores.flatten(1),
            None if self.variances is None else self.variances.flatten(1, -1 - dims),
            pose_dims=dims if dims == 2 else None,
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the capsules on another device or in another precision. Takes the arguments of `torch.Tensor.to`."""
        capsules = self
        if self.scores is not None and not self.scores.is_floating_point():  # a mask, whose 0 and 1 are no logits
            capsules = self._replace(scores=as_logits(self.scores.to(self.poses.device), self.poses))
        fields: Any = (x.to(*args, **kwargs) if isinstance(x, Tensor) else x for x in capsules)
        return type(self)(*fields)

    def detach(self) -> Self:
        """Return the capsules as constants: no gradient flows through them."""
        fields: Any = (x.detach() if isinstance(x, Tensor) else x for x in self)
        return type(self)(*fields)

    def known_pose_dims(self) -> int:
        """Return the number of dimensions of a pose, or raise a ValueError if nothing says it."""
        if self.pose_dims not in (None, 1, 2):
            raise ValueError(f"pose_dims must be 1 (vectors), 2 (matrices) or None, got {shown(self.pose_dims)}")
        if not isinstance(self.poses, Tensor) or not self.poses.is_floating_point() or self.poses.dim() < 3:
            raise TypeError(f"poses must be a tensor (batch, capsules, *pose) of numbers, got {shown(self.poses)}")
        if self.pose_dims is None and self.poses.dim() in (4, 6):
            of_matrices, of_vectors = (
                ("capsules", "types, length")
                if self.poses.dim() == 4
                else ("types, height, width", "types, depth, height, width")
            )
            raise ValueError(
                f"poses {tuple(self.poses.shape)} may be matrices (batch, {of_matrices}, rows, features) or vectors "
                f"(batch, {of_vectors}, features): give Capsules pose_dims=2 or pose_dims=1"
            )
        if self.pose_dims == 2 and self.poses.dim() == 3:
            raise ValueError(f"poses of 2 dimensions are (batch, capsules, rows, features), got {shown(self.poses)}")
        return self.pose_dims or (2 if self.poses.dim() == 7 else 1)


class Prediction(NamedTuple):
    """Output of a classifier: scores or activations of the classes, one of the two.

    Fields:
        scores: logits of the classes, `(batch, classes)`, for a cross-entropy; None if the model gives activations.
        capsules: the class capsules, or None if the model has none.
        activations: how present each class is, `(batch, classes)`, from 0 to 1 where a squash or a sigmoid makes it so,
            for a margin loss or a spread loss; None if the model gives scores.
    """

    scores: Tensor | None = None
    capsules: Capsules | None = None
    activations: Tensor | None = None

    @property
    def evidence(self) -> Tensor:
        """The scores, or the activations: `(batch, classes)`, larger for likelier classes."""
        evidence = _one_of(self)
        if evidence.dim() != 2:
            raise ValueError(
                f"the scores or activations of a Prediction must be a tensor (batch, classes), got {shown(evidence)}"
            )
        return evidence

    def detach(self) -> Self:
        """Return the prediction as constants: no gradient flows through it."""
        fields: Any = (x if x is None else x.detach() for x in self)
        return type(self)(*fields)


class Segmentation(NamedTuple):
    """Output of a network that segments: scores or activations of the classes at each position, one of the two.

    Fields:
        scores: logits of the classes, `(batch, classes, *sides)`, such as `(batch, classes, height, width)`; None if
            the model gives activations.
        capsules: the class capsules, poses `(batch, classes, *sides, features)`, or None if the model has none.
        activations: how present each class is, `(batch, classes, *sides)`, from 0 to 1; None if the model gives scores.
    """

    scores: Tensor | None = None
    capsules: Capsules | None = None
    activations: Tensor | None = None

    @property
    def evidence(self) -> Tensor:
        """The scores, or the activations: `(batch, classes, *sides)`, larger for likelier classes."""
        evidence = _one_of(self)
        if evidence.dim() < 3:
            raise ValueError(
                "the scores or activations of a Segmentation must be a tensor (batch, classes, *sides), got "
                f"{shown(evidence)}"
            )
        return evidence

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the classes at each position, `(batch, classes, *sides)`: the softmax of the scores, or the
        activations divided by their sum."""
        evidence = self.evidence
        if self.activations is None:
            return evidence.softmax(1)
        return evidence / evidence.sum(1, keepdim=True).clamp_min(torch.finfo(evidence.dtype).tiny)


def _one_of(output: "Prediction | Segmentation") -> Tensor:
    """Return the scores or the activations of an output, which has one of the two."""
    if (output.scores is None) == (output.activations is None):
        given, name = "neither" if output.scores is None else "both", type(output).__name__
        raise ValueError(f"a {name} has scores (logits) or activations, got {given}: give it one of the two")
    evidence: Any = output.activations if output.scores is None else output.scores
    if not isinstance(evidence, Tensor):
        raise ValueError(
            f"the scores or activations of a {type(output).__name__} must be a tensor, got {shown(evidence)}"
        )
    return evidence


def as_logits(scores: Tensor, like: Any) -> Tensor:
    """Return scores as logits: a bool mask becomes inf for True and -inf for False.

    Args:
        scores: the scores.
        like: poses or votes, which have the device and the precision of the scores.

    Raises:
        TypeError: the scores are no tensor, or integers.
        ValueError: the scores are on another device.
    """
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"scores must be a tensor of logits or a bool mask, got {shown_with_type(scores, torch.is_tensor)}"
        )
    if scores.device != like.device:
        raise ValueError(f"the capsules are on {like.device} and their scores on {scores.device}: move one of them")
    if scores.dtype == torch.bool:
        inf = torch.full((), torch.inf, dtype=like.dtype, device=like.device)
        return torch.where(scores, inf, -inf)
    if not scores.is_floating_point():
        raise TypeError(f"scores must be logits or a bool mask, got {scores.dtype}: use mask.bool() for a mask")
    if not scores.dim() or not can_read(scores):
        return scores
    if scores.detach().isnan().any():
        warnings.warn("NaN scores make all parents NaN: find the layer that produced them", stacklevel=2)
    elif _is_mask(scores):
        warnings.warn(
            "the scores are all 0 or 1, as in a mask, but scores are logits: 0 stands for a capsule that is present "
            "with probability 0.5. Use mask.bool() for a mask",
            stacklevel=2,
        )
    return scores


def _is_mask(scores: Tensor) -> bool:
    # The first value usually rules out a mask, so most calls read one number.
    if scores.numel() == 0 or scores.detach()[(0,) * scores.dim()].item() not in (0, 1):
        return False
    return bool(((scores == 0) | (scores == 1)).all()) and bool((scores == 1).any())


register_namedtuple(Capsules, "torchcaps.Capsules")
register_namedtuple(Prediction, "torchcaps.Prediction")
register_namedtuple(Segmentation, "torchcaps.Segmentation")
