"""One temperature for the scores of a network, so that its probabilities are as often right as they say."""

import math

from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import multiclass_calibration_error

from torchcaps.utils.arguments import Positive, check_input, checked

LOWEST, HIGHEST = 1e-3, 1e3
BINS = 15


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
    check_input("scores", scores, None)
    scores, classes = scores.double(), scores.shape[1]
    all_right = bool((scores.argmax(1) == labels).all())
    doubt = classes / (classes - 1) / (len(scores) + 2) if all_right else 0.0  # shared by all classes

    def loss(logarithm: float) -> float:
        return float(cross_entropy(scores / math.exp(logarithm), labels, label_smoothing=doubt))

    minimum = minimize_scalar(loss, bounds=(math.log(LOWEST), math.log(HIGHEST)), method="bounded")
    return math.exp(minimum.x)


@checked
def calibration_error(scores: Tensor, labels: Tensor, temperature: Positive = 1.0) -> float:
    """Return the expected calibration error of probabilities: the mean difference between the probability of the
    likeliest class and how often it is right, over 15 bins of that probability.

    Args:
        scores, labels: see `best_temperature`.
        temperature: number by which the scores are divided.
    """
    probabilities = (scores.double() / temperature).softmax(-1)
    return float(multiclass_calibration_error(probabilities, labels, scores.shape[1], n_bins=BINS))
