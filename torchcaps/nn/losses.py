"""Losses on the activations of class capsules, and what a loss reads of a prediction."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps.capsules import IGNORED, Prediction, Segmentation
from torchcaps.nn.inputs import check_labels, check_masks
from torchcaps.utils.arguments import FloatTensor, Fraction, NotNegative, can_read, checked, shown

TINY = 1e-6
Reads = Literal["scores", "activations", "prediction"]


def input_of_loss(loss: nn.Module, prediction: Prediction | Segmentation) -> Any:
    """Return what a loss reads of a prediction: the scores, or what its attribute `reads` says.

    Raises:
        ValueError: the prediction has the other of the two.
    """
    reads, evidence = getattr(loss, "reads", "scores"), prediction.evidence
    if reads == "prediction":
        return prediction
    if getattr(prediction, reads) is not evidence:
        given, remedy = ("activations", "MarginLoss") if reads == "scores" else ("scores", "CrossEntropyLoss")
        remedy = "SegmentationLoss" if isinstance(prediction, Segmentation) else remedy
        raise ValueError(
            f"{type(loss).__name__} reads {reads}, and the network gives {given}: use another loss, such as {remedy}, "
            f"or set loss.reads = {given!r} if it is made for them"
        )
    return evidence


@checked
def margin_loss(
    lengths: FloatTensor,
    targets: Tensor,
    positive_margin: Fraction = 0.9,
    negative_margin: Fraction = 0.1,
    down_weight: NotNegative = 0.5,
    weight: Tensor | None = None,
) -> Tensor:
    r"""Margin loss: capsules of present classes should be long, those of absent classes short.

    .. math:: \sum_k T_k \max(0, m^+ - |v_k|)^2 + \lambda (1 - T_k) \max(0, |v_k| - m^-)^2

    Class weights w multiply the loss of each sample by the weight of its class, or by the mean weight
    :math:`\sum_k T_k w_k / \sum_k T_k` of its classes; that of a sample without a class stays as it is.

    Args:
        lengths: lengths of the class capsules, `(batch, classes)`, in [0, 1]; no logits.
        targets: class indices `(batch,)`, or T, the presence of each class, `(batch, classes)`, in [0, 1].
        positive_margin, negative_margin, down_weight: m+, m- and lambda; m+ is larger than m-.
        weight: w, one number for each class, `(classes,)`, at least 0; None for 1.

    Returns:
        The sum of the weighted losses, divided by the number of samples: a scalar. (`nn.CrossEntropyLoss` divides by
        the sum of the weights of the batch, so that a batch of one class alone counts as if it had no weight.)

    Raises:
        ValueError: a length is negative, or all lengths are equal and above 1, as a LayerNorm leaves them (read on the
            CPU alone); or an argument is out of range.

    Reference:
        Sabour et al. 2017, equation 4.
    """
    _check_margins(positive_margin, negative_margin)
    present = _presence_of_classes(lengths, targets)
    if can_read(lengths) and lengths.numel():
        _check_lengths(lengths.detach())
    wanted = (positive_margin - lengths).clamp_min(0).square()
    unwanted = (lengths - negative_margin).clamp_min(0).square()
    losses = (present * wanted + down_weight * (1 - present) * unwanted).sum(1)
    return _weighted_mean(losses, present, weight)


@checked
def spread_loss(
    activations: FloatTensor, targets: Tensor, margin: Fraction | Tensor = 0.9, weight: Tensor | None = None
) -> Tensor:
    r"""Spread loss: the activation of the true class t should lead every other by a margin.

    .. math:: w_t \sum_{i \neq t} \max(0, m - (a_t - a_i))^2

    Args:
        activations: activations of the classes, `(batch, classes)`.
        targets: class indices `(batch,)`.
        margin: m; the paper raises it from 0.2 to 0.9 during training.
        weight: w, one number for each class, `(classes,)`, at least 0; None for 1.

    Returns:
        The sum of the weighted losses, divided by the number of samples as in :func:`margin_loss`: a scalar.

    Reference:
        Hinton et al. 2018, equation 3.
    """
    if targets.dim() != 1:
        raise ValueError(
            f"expected class indices of shape (batch,), got shape {tuple(targets.shape)}: for several classes of a "
            "sample use margin_loss"
        )
    if isinstance(margin, Tensor):
        if margin.numel() != 1:
            raise ValueError(f"expected one number as margin, got {tuple(margin.shape)}")
        if can_read(margin) and not 0 <= margin.item() <= 1:
            raise ValueError(f"margin must be from 0 to 1, got {margin.item():g}")
    present = _presence_of_classes(activations, targets)
    target = activations.gather(1, targets.long().unsqueeze(1))
    losses = ((1 - present) * (margin - (target - activations)).clamp_min(0).square()).sum(1)
    return _weighted_mean(losses, present, weight)


@checked
def segmentation_loss(
    segmentation: Segmentation,
    masks: Tensor,
    cross_entropy: NotNegative = 1.0,
    dice: NotNegative = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    r"""Cross-entropy of each pixel, and one minus the Dice coefficient of the batch.

    .. math:: a \frac{\sum_p w_{c(p)} \, H_p}{\sum_p w_{c(p)}}
        + b \Big(1 - \frac{1}{K} \sum_k \frac{2 \sum_p P_{kp} T_{kp} + 1}{\sum_p (P_{kp} + T_{kp}) + 1}\Big)

    Here p are the pixels of all samples that count, c(p) is the class of a pixel, and :math:`T_{kp}` is 1 for it. Of
    scores, P is their softmax and :math:`H_p = -\log P_{c(p)p}`. Of activations, P are the activations themselves and
    :math:`H_p` is the mean binary cross-entropy of the classes, as SegCaps has it for one class.

    Args:
        segmentation: output of a network that segments, with scores or activations `(batch, classes, *sides)`.
        masks: class of each pixel, `(batch, *sides)`, integers; -100 for a pixel that does not count.
        cross_entropy, dice: a and b.
        weight: w, one number for each class in the cross-entropy, `(classes,)`, at least 0; None for 1.

    Reference:
        Milletari et al. 2016, V-Net, section 3 (Dice); LaLonde & Bagci 2018, section 4 (both).
    """
    evidence = segmentation.evidence
    evidence = evidence.to(torch.promote_types(evidence.dtype, torch.float32))  # sums of many pixels
    check_masks(masks, evidence)
    counts = (masks != IGNORED).to(evidence.dtype)
    classes = masks.long() * (masks != IGNORED)
    present = torch.zeros_like(evidence).scatter(1, classes.unsqueeze(1), counts.unsqueeze(1))
    if segmentation.activations is None:
        probabilities = evidence.softmax(1)
        entropies = -evidence.log_softmax(1).gather(1, classes.unsqueeze(1)).squeeze(1)
    else:
        probabilities = evidence
        inside = evidence.clamp(TINY, 1 - TINY)
        entropies = -(present * inside.log() + (1 - present) * (1 - inside).log()).mean(1)
    entropies = entropies.where(counts > 0, 0)  # where a pixel does not count it may be infinite
    weights = counts
    if weight is not None:
        check_class_weights(weight, evidence.shape[1])
        weights = counts * weight.to(evidence)[classes]
    loss: Tensor = cross_entropy * (entropies * weights).sum() / weights.sum().clamp_min(TINY)
    if dice:
        pixels = (0, *range(2, evidence.dim()))
        both = (probabilities * present).sum(pixels)
        either = ((probabilities + present) * counts.unsqueeze(1)).sum(pixels)
        loss = loss + dice * (1 - ((2 * both + 1) / (either + 1)).mean())
    return loss


def _weighted_mean(losses: Tensor, present: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of losses `(batch,)`, each times the mean weight of the classes that are present."""
    if weight is None:
        return losses.mean()
    check_class_weights(weight, present.shape[1])
    if weight.device != present.device:
        raise ValueError(f"the weights are on {weight.device} and the scores on {present.device}: move one of them")
    total = present.sum(1)
    mean = (present * weight.to(present.dtype)).sum(1) / total.where(total > 0, 1)
    return (losses * mean.where(total > 0, 1)).mean()


def check_class_weights(weight: Tensor, classes: int | None = None) -> None:
    """Check class weights: one number of at least 0 for each class. Values are read on the CPU alone.

    Raises:
        ValueError: they have another shape, or one of them is negative, infinite or NaN.
    """
    if weight.dim() != 1 or classes not in (None, len(weight)) or not weight.is_floating_point():
        expected = "one number for each class" if classes is None else f"{classes} numbers, one for each class"
        raise ValueError(f"weight must be a floating-point tensor of {expected}, got {shown(weight)}")
    if can_read(weight) and not ((weight >= 0) & weight.isfinite()).all():
        raise ValueError(f"weight must have finite numbers of at least 0, got {shown(weight.tolist())}")


def _presence_of_classes(scores: Tensor, targets: Tensor) -> Tensor:
    """Return T, the presence of each class, `(batch, classes)`."""
    if scores.dim() != 2 or 0 in scores.shape:
        raise ValueError(
            f"expected one number per class of at least one sample, (batch, classes), got {tuple(scores.shape)}"
        )
    if targets.shape not in (scores.shape[:1], scores.shape):
        raise ValueError(
            f"expected targets of shape ({scores.shape[0]},) or {tuple(scores.shape)}, got {tuple(targets.shape)}"
        )
    if targets.dim() == 1:
        check_labels(targets, scores.shape[1], scores.device)
        return torch.zeros_like(scores).scatter(1, targets.long().unsqueeze(1), 1)  # vmap has no one_hot
    if targets.device != scores.device:
        raise ValueError(f"the targets are on {targets.device} and the scores on {scores.device}: move one of them")
    if can_read(targets) and targets.numel():
        least, most = targets.aminmax()
        if not (least >= 0 and most <= 1):
            raise ValueError(f"targets of shape (batch, classes) must be from 0 to 1, got {least:g} to {most:g}")
    return targets.to(scores.dtype)


def _check_margins(positive_margin: float, negative_margin: float) -> None:
    if negative_margin >= positive_margin:
        raise ValueError(
            f"negative_margin must be below positive_margin, got {negative_margin:g} and {positive_margin:g}"
        )


def _check_lengths(lengths: Tensor) -> None:
    least, most = lengths.aminmax()
    if least < 0:
        raise ValueError(
            f"lengths must be from 0 to 1, got {least:g}: for logits use another loss, such as cross_entropy, or "
            "their sigmoid"
        )
    # Not quite equal: a LayerNorm adds eps to its variance.
    if lengths.shape[1] > 1 and least > 1 and most - least < (0.02 if least > 1.5 else 1e-3) * most:
        raise ValueError(
            f"all lengths are about {most:.3g}, as after a LayerNorm, and say nothing about the classes: use a "
            "classifier on the poses, or InvertedAttentionRouting(activations=True)"
        )


class MarginLoss(nn.Module):
    """Margin loss as a module: :func:`torchcaps.functional.margin_loss`. The class weights are a buffer."""

    reads: Reads = "activations"
    weight: Tensor | None

    @checked
    def __init__(
        self,
        positive_margin: Fraction = 0.9,
        negative_margin: Fraction = 0.1,
        down_weight: NotNegative = 0.5,
        weight: Tensor | None = None,
    ):
        super().__init__()
        if weight is not None:
            check_class_weights(weight)
        self.register_buffer("weight", weight)
        _check_margins(positive_margin, negative_margin)
        self.positive_margin, self.negative_margin, self.down_weight = positive_margin, negative_margin, down_weight

    def forward(self, lengths: Tensor, targets: Tensor) -> Tensor:
        margins = self.positive_margin, self.negative_margin, self.down_weight
        return margin_loss(lengths, targets, *margins, self.weight)

    def extra_repr(self) -> str:
        return f"{self.positive_margin}, {self.negative_margin}, down_weight={self.down_weight}"


class SpreadLoss(nn.Module):
    """Spread loss as a module: :func:`torchcaps.functional.spread_loss`. The class weights are a buffer.

    Attributes:
        margin: m, a buffer, so that checkpoints keep the value that `torchcaps.training.SpreadMargin` has set.
    """

    reads: Reads = "activations"
    margin: Tensor
    weight: Tensor | None

    @checked
    def __init__(self, margin: Fraction = 0.9, weight: Tensor | None = None):
        super().__init__()
        if weight is not None:
            check_class_weights(weight)
        self.register_buffer("weight", weight)
        self._first_margin = float(margin)
        self.register_buffer("margin", torch.tensor(self._first_margin))

    def reset_parameters(self) -> None:
        """Set the margin to its initial value."""
        self.margin.fill_(self._first_margin)

    def forward(self, activations: Tensor, targets: Tensor) -> Tensor:
        return spread_loss(activations, targets, self.margin, self.weight)

    def extra_repr(self) -> str:
        return f"margin={'?' if self.margin.is_meta else format(self.margin.item(), 'g')}"


class SegmentationLoss(nn.Module):
    """:func:`torchcaps.functional.segmentation_loss` as a module. The class weights are a buffer, as in
    CrossEntropyLoss."""

    reads: Reads = "prediction"
    weight: Tensor | None

    @checked
    def __init__(self, cross_entropy: NotNegative = 1.0, dice: NotNegative = 1.0, weight: Tensor | None = None):
        super().__init__()
        if weight is not None:
            check_class_weights(weight)
        if not cross_entropy and not dice:
            raise ValueError("cross_entropy or dice must be above 0, got 0 for both")
        self.register_buffer("weight", weight)
        self.cross_entropy, self.dice = cross_entropy, dice

    def forward(self, segmentation: Segmentation, masks: Tensor) -> Tensor:
        return segmentation_loss(segmentation, masks, self.cross_entropy, self.dice, self.weight)

    def extra_repr(self) -> str:
        return f"cross_entropy={self.cross_entropy:g}, dice={self.dice:g}"
