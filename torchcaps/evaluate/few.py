"""How many labeled images does the network need?

Procedure: the recipe of the run is trained anew on the first 10, 50, 100 and 500 images of each class in a random
order, for all of its steps, without early stopping, and its last weights are tested on the test set. This takes four
times as long as the training. A number that some class does not have is left out, with a note.

Source: Hinton et al. 2011 and Sabour et al. 2017 claim that capsules generalize from fewer examples; neither has a
protocol for it.
"""

from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject

COUNTS = (10, 50, 100, 500)  # images of each class


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_one_label()
    if subject.training is None:
        raise DoesNotApply("there is no recipe to train: name a run")
    points: list[tuple[float | str, float]] = []
    notes: list[str] = []
    for count in COUNTS:
        subject.progress(f"few: training on {count} images per class")
        try:
            network = subject.training(count)
        except DoesNotApply as reason:
            if not points:
                raise
            left_out = " and ".join(map(str, COUNTS[len(points) :]))
            notes.append(f"{left_out} images per class: {reason}.")
            break
        points.append((float(count), Subject(network, subject.images, subject.labels).accuracy(subject.images)))
    numbers = {f"{count:g} images per class: accuracy (%)": value for count, value in points}
    return Outcome(numbers, {"": Curve("images per class", "accuracy (%)", points)}, notes)


PROTOCOL = Protocol("How many labeled images does it need?", (), run)
