"""On which inputs a network is right, and how often."""

import torch
from torch import Tensor

from torchcaps.nn.inputs import check_labels
from torchcaps.utils.arguments import checked, shown


@checked
def is_right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return on which inputs a network is right, `(batch,)` bool.

    With one label per input, it is right if no other class has as high a score. With several, as in MultiMNIST, it is
    right if no other class has as high a score as any of the labels. Without a label, or with scores that are
    NaN or infinite (-inf, which rules a class out, is allowed), it is not right.

    Args:
        scores: `(batch, classes)`.
        labels: `(batch,)`, or 1 for each class of an input and 0 for the others, `(batch, classes)`.

    Raises:
        TypeError: labels `(batch,)` are no integers.
        ValueError: labels have another shape, or are out of range.
    """
    if labels.shape not in (scores.shape[:1], scores.shape):
        expected = f"(batch,) = {tuple(scores.shape[:1])} or (batch, classes) = {tuple(scores.shape)}"
        raise ValueError(f"expected labels of shape {expected}, got {shown(labels)}")
    if labels.dim() == 1:
        check_labels(labels, scores.shape[1], scores.device)
        labeled = torch.zeros_like(scores, dtype=torch.bool).scatter(1, labels.long().unsqueeze(1), True)
    else:
        labeled = labels > 0
    highest_other = scores.where(~labeled, -torch.inf).amax(1)
    return (scores.where(labeled, torch.inf).amin(1) > highest_other) & labeled.any(1) & scores.amax(1).isfinite()


def is_among(scores: Tensor, labels: Tensor, top_k: int) -> Tensor:
    """Return on which samples the class is among the `top_k` highest scores, `(n,)` bool.

    Args:
        scores: `(n, classes)`.
        labels: class of each sample, `(n,)`.
        top_k: number of scores; of equal scores, one is taken.
    """
    highest = scores.argmax(1, keepdim=True) if top_k == 1 else scores.topk(top_k, 1).indices
    return (highest == labels[:, None]).any(1)


def balanced_accuracy(right: Tensor, labels: Tensor) -> float:
    """Return the balanced accuracy: the mean, over the classes that have samples, of the share that is right.

    Args:
        right: on which samples a network is right, `(n,)` bool.
        labels: class of each sample, `(n,)`.
    """
    counts = labels.long().bincount()
    return float((labels.long().bincount(right.double(), len(counts)) / counts)[counts > 0].mean())
