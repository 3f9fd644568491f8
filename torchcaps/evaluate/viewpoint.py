"""Accuracy at viewpoints that the training did not have.

Procedure: the network was trained on stereo pairs of toys at some elevations or azimuths (`train_elevations`,
`train_azimuths` of its data). It is tested on the test's toys at the angles of the training, and at all others, with
all lightings. Curves show every angle.

Source: Hinton et al. 2018, section 5.1, on smallNORB. There the training stops where the accuracy at familiar
viewpoints is that of the network it is compared with.
"""

from typing import Any

import torch

from torchcaps.data import StereoData
from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject
from torchcaps.explain.poses import DEGREES

MOST = 4000  # images of one kind of viewpoint


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    data = subject.data
    if not isinstance(data, StereoData):
        raise DoesNotApply("the data has no viewpoints: train on torchcaps.data.StereoToys or SmallNORB")
    elevations, azimuths, _ = data.grid(train=True)
    options: dict[str, Any] = {**data.hparams, "test_elevations": None, "test_azimuths": None, "test_lightings": None}
    everything = type(data)(**options)
    everything.setup("test")
    all_elevations, all_azimuths, _ = everything.grid(train=False)
    if len(elevations) == len(all_elevations) and len(azimuths) == len(all_azimuths):
        raise DoesNotApply("the training had all viewpoints: set data.train_azimuths or data.train_elevations")
    pairs, metadata = everything.test_set, everything.metadata("test")
    assert pairs is not None
    familiar = torch.isin(metadata.elevation, torch.tensor(elevations))
    familiar &= torch.isin(metadata.azimuth, torch.tensor(azimuths))
    kinds = {"familiar viewpoints (%)": familiar, "new viewpoints (%)": ~familiar}
    hits = torch.full((len(familiar),), torch.nan)
    for name, chosen in kinds.items():
        subject.progress(f"viewpoint: {name[:-4]}")
        indices = chosen.nonzero()[:, 0]
        indices = indices[torch.randperm(len(indices), generator=subject.generator())[:MOST]].sort().values
        for some in indices.split(100):
            images, labels = pairs.__getitems__(some.tolist())
            predicted = subject.scores(everything.center(images)).argmax(1)
            hits[some] = 100.0 * (predicted == labels)
    numbers = {name: float(hits[chosen].nanmean()) for name, chosen in kinds.items()}
    curves = {}
    for name, column, trained in (
        ("elevation", metadata.elevation, elevations),
        ("azimuth", metadata.azimuth, azimuths),
    ):
        values = column.unique()
        if len(values) > len(trained):
            first, each = DEGREES[name]
            points = [(float(first + each * int(v)), float(hits[column == v].nanmean())) for v in values]
            curves[name] = Curve(f"{name} (degrees)", "accuracy (%)", points)
    return Outcome(numbers, curves)


PROTOCOL = Protocol(
    "Does it recognize toys from viewpoints that it was not trained on?",
    "Hinton et al. 2018, section 5.1",
    (
        "smallNORB, new azimuths: capsules 86.5 %, a CNN 80.0 %, both at 96.3 % on familiar ones (Hinton et al. 2018)",
        "smallNORB, new elevations: capsules 87.7 %, a CNN 82.2 %, both at 95.7 % on familiar ones (the same)",
    ),
    run,
)
