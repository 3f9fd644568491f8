"""Accuracy at viewpoints that the training did not have.

Procedure: the network was trained on stereo pairs of toys at some elevations or azimuths (`train_elevations`,
`train_azimuths` of its data). It is tested on the test's toys at the angles of the training, and at all others, with
all lightings, on 4,000 pairs of each kind at most. Curves show every angle.

Source: Hinton et al. 2018, section 5.1, on smallNORB. There the training stops where the accuracy at familiar
viewpoints is that of the network it is compared with.
"""

import copy

import torch
from torch import Tensor

from torchcaps.data import StereoData
from torchcaps.data.stereo import AZIMUTHS, ELEVATIONS, LIGHTINGS
from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject
from torchcaps.explain.poses import DEGREES
from torchcaps.measures.accuracy import is_right

MAX_PAIRS = 4000  # images of one kind of viewpoint


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    data = subject.data
    if not isinstance(data, StereoData):
        raise DoesNotApply("the data has no viewpoints: train on torchcaps.data.StereoToys or SmallNORB")
    elevations, azimuths, _ = data.grid(train=True)
    if len(elevations) == len(ELEVATIONS) and len(azimuths) == len(AZIMUTHS):
        raise DoesNotApply(
            "the training had all viewpoints: train with some, by data.train_azimuths or data.train_elevations"
        )
    everything = copy.copy(data)
    everything.test_elevations, everything.test_azimuths = list(ELEVATIONS), list(AZIMUTHS)
    everything.test_lightings, everything.test_set = list(LIGHTINGS), None
    everything.setup("test")
    pairs, metadata = everything.test_set, everything.metadata("test")
    assert pairs is not None
    familiar = torch.isin(metadata.elevation, torch.tensor(elevations))
    familiar &= torch.isin(metadata.azimuth, torch.tensor(azimuths))
    kinds = {"familiar viewpoints": familiar, "new viewpoints": ~familiar}
    hits = torch.full((len(familiar),), torch.nan)
    for name, chosen in kinds.items():
        subject.progress(f"viewpoint: {name}")
        indices = chosen.nonzero()[:, 0]
        indices = indices[torch.randperm(len(indices), generator=subject.generator())[:MAX_PAIRS]].sort().values
        for some in indices.split(100):
            images, labels = pairs.__getitems__(some.tolist())
            hits[some] = 100.0 * is_right(subject.scores(everything.center(images)), labels)
    shares = {name: float(hits[chosen].nanmean()) for name, chosen in kinds.items()}
    curves = {"viewpoints": Curve("", "accuracy (%)", list(shares.items()))}
    for name, column, trained in (
        ("elevation", metadata.elevation, elevations),
        ("azimuth", metadata.azimuth, azimuths),
    ):
        values = column.unique()
        if len(values) > len(trained):
            first, each = DEGREES[name]
            points = [(float(first + each * int(v)), _mean(hits, column == v, familiar)) for v in values]
            curves[name] = Curve(f"{name} (degrees)", "accuracy (%)", points)
    numbers = {f"{name}: accuracy (%)": value for name, value in shares.items()}
    return Outcome(numbers, curves, images=int(hits.isfinite().sum()))


def _mean(hits: Tensor, at: Tensor, familiar: Tensor) -> float:
    """Return the mean of all pairs at an angle, where only some of each kind have a value."""
    kinds = [hits[at & kind] for kind in (familiar, ~familiar)]
    tested = [kind for kind in kinds if kind.isfinite().any()]
    return float(sum(len(kind) * kind.nanmean() for kind in tested) / sum(map(len, tested)))


PROTOCOL = Protocol(
    "Does it recognize toys from viewpoints that it was not trained on?",
    (
        "smallNORB, new azimuths: capsules 86.5 %, a CNN 80.0 %, both at 96.3 % on familiar ones (Hinton et al. 2018)",
        "smallNORB, new elevations: capsules 87.7 %, a CNN 82.2 %, both at 95.7 % on familiar ones (the same)",
    ),
    run,
)
