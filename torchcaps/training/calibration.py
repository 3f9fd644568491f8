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
    [0, 1], as those of class capsules, it is usually well below 1, because their softmax is almost uniform.

    Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017, section 4.2.

    Args:
        scores: scores `(n, classes)` of samples that the network was not trained on.
        labels: their classes `(n,)` int64.
    """
    check_input("scores", scores, None)
    scores = scores.double()

    def loss(logarithm: float) -> float:
        return float(cross_entropy(scores / math.exp(logarithm), labels))

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
