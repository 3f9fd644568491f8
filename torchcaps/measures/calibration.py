"""One temperature for the scores of a network, so that its probabilities are as often right as they say."""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchcaps.utils.arguments import Positive, check_input, checked

LOWEST, HIGHEST = 1e-3, 1e3
BINS = 15
RESAMPLES, DRAWN = 20, 2000  # for the standard error of a temperature; each has so many samples at most
UNCERTAIN = 0.1  # largest standard error of the logarithm of a temperature that is used


@checked
def best_temperature(scores: Tensor, labels: Tensor) -> float:
    r"""Return the temperature T at which the probabilities :math:`\text{softmax}(\text{scores} / T)` fit labels best.

    It minimizes the cross-entropy. Dividing by it does not change which class is the likeliest. For activations in
    [0, 1], as those of class capsules, it is usually well below 1, because their softmax is almost uniform. Where all
    of n samples are right, any lower temperature would fit better: their classes then count as (n + 1) / (n + 2)
    likely.

    Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017, section 4.2; targets below 1 as in J.
    Platt, Probabilistic Outputs for Support Vector Machines, 1999.

    Args:
        scores: scores `(n, classes)` of samples that the network was not trained on.
        labels: their classes `(n,)` int64.
    """
    from scipy.optimize import minimize_scalar  # slow to import

    check_input("scores", scores, None)
    scores, classes = scores.double(), scores.shape[1]
    all_right = bool((scores.argmax(1) == labels).all())
    doubt = classes / (classes - 1) / (len(scores) + 2) if all_right else 0.0  # shared by all classes

    def loss(logarithm: float) -> float:
        return float(cross_entropy(scores / math.exp(logarithm), labels, label_smoothing=doubt))

    minimum = minimize_scalar(loss, bounds=(math.log(LOWEST), math.log(HIGHEST)), method="bounded")
    return math.exp(minimum.x)


@checked
def calibrated_temperature(scores: Tensor, labels: Tensor) -> float | None:
    """Return the best temperature, or None if these samples are too few to know it: the standard error of its logarithm
    over 20 resamples, always the same ones, is above 0.1.

    Where all samples are right, so are all resamples, but the next sample may be wrong. So each resample also takes
    some right answers for wrong ones and the reverse, at a rate that may go unseen in as many samples.

    Args:
        scores, labels: see `best_temperature`.
    """
    n, classes = scores.shape
    drawn = min(n, DRAWN)
    generator = torch.Generator().manual_seed(0)
    logarithms = []
    for _ in range(RESAMPLES):
        places = torch.randint(n, (drawn,), generator=generator)
        likeliest, true = scores[places].argmax(1), labels[places]
        other = (likeliest + torch.randint(1, classes, (drawn,), generator=generator)) % classes
        rate = 1 - torch.rand((), generator=generator) ** (1 / (n + 1))
        changed = torch.rand(drawn, generator=generator) < rate
        true = torch.where(changed, torch.where(likeliest == true, other, likeliest), true)
        logarithms.append(math.log(best_temperature(scores[places], true)))
    error = float(torch.tensor(logarithms).std()) * math.sqrt(drawn / n)
    return None if error > UNCERTAIN else best_temperature(scores, labels)


@checked
def calibration_error(scores: Tensor, labels: Tensor, temperature: Positive = 1.0) -> float:
    """Return the expected calibration error of probabilities: the mean difference between the probability of the
    likeliest class and how often it is right, over 15 bins of that probability.

    Args:
        scores, labels: see `best_temperature`.
        temperature: number by which the scores are divided.
    """
    from torchmetrics.functional.classification import multiclass_calibration_error  # slow to import

    probabilities = (scores.double() / temperature).softmax(-1)
    return float(multiclass_calibration_error(probabilities, labels, scores.shape[1], n_bins=BINS))


@checked
def reliability(scores: Tensor, labels: Tensor, temperature: Positive = 1.0) -> list[tuple[float, float]]:
    """Return the mean probability of the likeliest class, and how often it is right, in each of the bins of
    `calibration_error` that has samples; arguments are as there."""
    confidences, likeliest = (scores.double() / temperature).softmax(-1).max(-1)
    right = (likeliest == labels).double()
    bins = (BINS * confidences).long().clamp_max(BINS - 1)
    counts = bins.bincount(minlength=BINS)
    means = (bins.bincount(values, BINS)[counts > 0] / counts[counts > 0] for values in (confidences, right))
    return list(zip(*(x.tolist() for x in means), strict=True))
