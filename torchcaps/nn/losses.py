"""Losses on the activations of class capsules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def margin_loss(
    lengths: Tensor,
    targets: Tensor,
    positive_margin: float = 0.9,
    negative_margin: float = 0.1,
    down_weight: float = 0.5,
) -> Tensor:
    r"""Margin loss: capsules of present classes should be long, those of absent classes short.

    .. math:: \sum_k T_k \max(0, m^+ - |v_k|)^2 + \lambda (1 - T_k) \max(0, |v_k| - m^-)^2

    Args:
        lengths: lengths of the class capsules, `(batch, classes)`, in [0, 1].
        targets: class indices `(batch,)`, or T, the presence of each class, `(batch, classes)`, in [0, 1].
        positive_margin, negative_margin, down_weight: m+, m- and lambda.

    Returns:
        The mean loss over the batch, a scalar.

    Reference:
        Sabour et al. 2017, equation 4.
    """
    present = _presence_of_classes(lengths, targets)
    wanted = (positive_margin - lengths).clamp_min(0).square()
    unwanted = (lengths - negative_margin).clamp_min(0).square()
    return (present * wanted + down_weight * (1 - present) * unwanted).sum(1).mean()


def spread_loss(activations: Tensor, targets: Tensor, margin: float | Tensor = 0.9) -> Tensor:
    r"""Spread loss: the activation of the true class t should lead every other by a margin.

    .. math:: \sum_{i \neq t} \max(0, m - (a_t - a_i))^2

    Args:
        activations: activations of the classes, `(batch, classes)`.
        targets: class indices `(batch,)`.
        margin: m; the paper raises it from 0.2 to 0.9 during training.

    Returns:
        The mean loss over the batch, a scalar.

    Reference:
        Hinton et al. 2018, equation 3.
    """
    if targets.dim() != 1:
        raise ValueError(f"expected class indices of shape (batch,), got shape {tuple(targets.shape)}")
    wrong = 1 - _presence_of_classes(activations, targets)
    target = activations.gather(1, targets.unsqueeze(1))
    return (wrong * (margin - (target - activations)).clamp_min(0).square()).sum(1).mean()


def _presence_of_classes(scores: Tensor, targets: Tensor) -> Tensor:
    if targets.dim() == 1:
        targets = F.one_hot(targets, scores.shape[1])
    if targets.shape != scores.shape:
        raise ValueError(
            f"expected targets of shape (batch,) or {tuple(scores.shape)}, got shape {tuple(targets.shape)}"
        )
    return targets.to(scores.dtype)


class MarginLoss(nn.Module):
    """:func:`torchcaps.functional.margin_loss` as a module."""

    def __init__(self, positive_margin: float = 0.9, negative_margin: float = 0.1, down_weight: float = 0.5):
        super().__init__()
        self.positive_margin, self.negative_margin, self.down_weight = positive_margin, negative_margin, down_weight

    def forward(self, lengths: Tensor, targets: Tensor) -> Tensor:
        return margin_loss(lengths, targets, self.positive_margin, self.negative_margin, self.down_weight)

    def extra_repr(self) -> str:
        return f"{self.positive_margin}, {self.negative_margin}, down_weight={self.down_weight}"


class SpreadLoss(nn.Module):
    """:func:`torchcaps.functional.spread_loss` as a module.

    Attributes:
        margin: m, a buffer, so that checkpoints keep the value that `torchcaps.training.SpreadMargin` has set.
    """

    margin: Tensor

    def __init__(self, margin: float = 0.9):
        super().__init__()
        self.register_buffer("margin", torch.tensor(margin))

    def forward(self, activations: Tensor, targets: Tensor) -> Tensor:
        return spread_loss(activations, targets, self.margin)

    def extra_repr(self) -> str:
        return f"margin={self.margin:g}"
