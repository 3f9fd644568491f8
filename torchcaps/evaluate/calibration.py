"""Are its probabilities right as often as they say?

Procedure: probabilities are the softmax of the scores, divided by a temperature. The confidence in an image is the
probability of its likeliest class. The expected calibration error is the mean difference between confidence and
accuracy over 15 bins of the confidence. It is measured at temperature 1, and at the temperature that minimizes the
cross-entropy of the held-out images, see :func:`torchcaps.measures.calibration.calibrated_temperature`. Curves show the
mean confidence and the accuracy of each bin: the same number if the network is calibrated.

Activations of capsules, where there are no other scores, are divided and compared like these. They are in [0, 1], so
their softmax at temperature 1 is almost uniform.

Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017, sections 2 and 4.2.
"""

from torch import Tensor

from torchcaps.evaluate.subject import Curve, Outcome, Protocol, Subject, percent
from torchcaps.measures.accuracy import is_right
from torchcaps.measures.calibration import calibrated_temperature, calibration_error, reliability
from torchcaps.measures.predicting import kind_of_scores, predict
from torchcaps.utils.checks import counted


def _reliability_curve(scores: Tensor, labels: Tensor, temperature: float = 1.0) -> Curve:
    points = [(100 * confidence, 100 * accuracy) for confidence, accuracy in reliability(scores, labels, temperature)]
    return Curve("confidence (%)", "accuracy (%)", points)


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_one_label()
    scores, labels = subject.scores(subject.images), subject.labels
    numbers = {
        "accuracy (%)": percent(is_right(scores, labels)),
        "calibration error (%)": 100 * calibration_error(scores, labels),
    }
    curves = {"as it is": _reliability_curve(scores, labels)}
    notes = []
    if kind_of_scores(predict(subject.network, subject.images[:1])) == "activations":
        notes.append("the scores are activations in [0, 1], whose softmax without a temperature is almost uniform")
    if subject.held_out is None:
        notes.append("there are no held-out images for the temperature: train with some")
        return Outcome(numbers, curves, notes)
    temperature = calibrated_temperature(subject.scores(subject.held_out[0]), subject.held_out[1])
    if temperature is None:
        held_out = counted(len(subject.held_out[1]), "held-out image")
        notes.append(f"{held_out} are too few to choose a temperature")
        return Outcome(numbers, curves, notes)
    numbers["temperature"] = temperature
    numbers["calibration error with it (%)"] = 100 * calibration_error(scores, labels, temperature)
    curves["with the temperature"] = _reliability_curve(scores, labels, temperature)
    return Outcome(numbers, curves, notes)


PROTOCOL = Protocol(
    "Are its probabilities right as often as they say?",
    ("a ResNet of 110 layers on CIFAR-10: 4.6 %, with a temperature 0.83 % (Guo et al. 2017)",),
    run,
)
