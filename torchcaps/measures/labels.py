"""How well several labels of a sample, or none, are predicted, and from which probability on a label counts."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.capsules import Prediction
from torchcaps.utils.arguments import FloatTensor, checked

LEAST_POSITIVES = 5  # validation samples with a label, and without it, from which its threshold is chosen
DEFAULT = 0.5  # threshold of the others


class OfLabel(NamedTuple):
    """How well one label is predicted.

    Fields:
        precision, recall, f1: of the samples that are predicted to have it; 0 where they are not defined.
        average_precision: mean precision over all thresholds, each weighted by the recall that it adds; NaN if no
            sample has the label.
        samples: number of samples that have it.
    """

    precision: float
    recall: float
    f1: float
    average_precision: float
    samples: int


def label_probabilities(prediction: Prediction) -> Tensor:
    r"""Return the probability of each label, `(batch, labels)`: :math:`\sigma(\text{scores})`, or the activations."""
    scores = prediction.scores
    return prediction.evidence.clamp(0, 1) if scores is None else scores.sigmoid()


@checked
def exact_match(predicted: Tensor, labels: Tensor) -> float:
    """Return the share of samples of which exactly the labels that they have are predicted.

    Args:
        predicted, labels: `(n, labels)`, true or above 0 for each label of a sample.
    """
    return float(((predicted > 0) == (labels > 0)).all(1).double().mean())


@checked
def of_each_label(probabilities: FloatTensor, labels: Tensor, thresholds: FloatTensor) -> list[OfLabel]:
    """Return how well each label is predicted.

    Args:
        probabilities: `(n, labels)`.
        labels: 1 for each label of a sample and 0 for the others, `(n, labels)`.
        thresholds: probability above which a label is predicted, `(labels,)`.
    """
    from sklearn.metrics import average_precision_score  # slow to import

    present, predicted = labels > 0, probabilities > thresholds
    counts = (x.sum(0).tolist() for x in (present & predicted, predicted, present))
    rows = []
    for k, (both, of_network, samples) in enumerate(zip(*counts, strict=True)):
        average = float(average_precision_score(present[:, k], probabilities[:, k])) if samples else math.nan
        f1 = 2 * both / max(1, of_network + samples)
        rows.append(OfLabel(both / max(1, of_network), both / max(1, samples), f1, average, samples))
    return rows


@checked
def best_thresholds(probabilities: FloatTensor, labels: Tensor) -> Tensor:
    r"""Return for each label the threshold with the highest F1, :math:`2 TP / (2 TP + FP + FN)`, `(labels,)`.

    Candidates lie in the middle between two probabilities that follow each other. Of equally good ones the one nearest
    to 0.5 is taken. A label that fewer than 5 samples have, or that fewer than 5 do not have, gets 0.5.

    Args:
        probabilities: `(n, labels)`, of samples that the network was not trained on.
        labels: 1 for each label of a sample and 0 for the others, `(n, labels)`.
    """
    chosen = torch.full(probabilities.shape[1:], DEFAULT, dtype=torch.float64)
    for k, (values, present) in enumerate(zip(probabilities.double().T, labels.T > 0, strict=True)):
        positives = int(present.sum())
        if min(positives, len(present) - positives) < LEAST_POSITIVES:
            continue
        ordered, order = values.sort(descending=True)
        found = present[order].cumsum(0)
        f1 = 2 * found / (torch.arange(1, len(found) + 1) + positives)  # where the first 1, 2, ... are predicted
        following = torch.cat([ordered[1:], ordered.new_zeros(1)])
        f1[ordered == following] = -1  # equal probabilities are predicted together, and those of 0 never
        middles = (ordered + following) / 2
        best = (f1 >= f1.max() - 1e-12).nonzero().squeeze(1)
        chosen[k] = middles[best[(middles[best] - DEFAULT).abs().argmin()]]
    return chosen
