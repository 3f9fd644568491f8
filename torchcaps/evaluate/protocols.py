"""All protocols by name, and the function that runs them."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from torchcaps.evaluate import PROTOCOL_NAMES, TRAINING_PROTOCOL_NAMES
from torchcaps.evaluate.subject import DoesNotApply, Protocol, Subject
from torchcaps.nn.inputs import check_labels
from torchcaps.utils.arguments import checked, shown
from torchcaps.utils.checks import check_choice

PROTOCOLS: dict[str, Protocol] = {
    name: import_module(f"torchcaps.evaluate.{name}").PROTOCOL for name in (*PROTOCOL_NAMES, *TRAINING_PROTOCOL_NAMES)
}


@checked
def evaluate(subject: Subject, protocols: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Measure a trained network.

        subject = Subject(network, images, labels)
        evaluate(subject, ["affine", "attack"])["affine"]["numbers"]

    Args:
        subject: the network and its test images.
        protocols: names in `PROTOCOLS`; None for all that train nothing.

    Returns:
        By protocol either `numbers`, `curves` and `notes`, see :class:`Outcome`, as JSON can hold them, and the number
        of `images`; or `reason`, why it does not apply.

    Raises:
        TypeError: the labels are no integers.
        ValueError: there is no such protocol, or no image; there is not one label for each image, or it is no class of
            the network; or the network's scores are NaN or infinite.
    """
    images, labels = subject.images, subject.labels
    if not len(images):
        raise ValueError("there is no image to test on: give at least one")
    if subject.target == "masks":
        if labels.shape != (len(images), *images.shape[2:]):
            raise ValueError(f"expected a mask of the size of its image for each image, got {shown(labels)}")
    else:
        classes = subject.scores(images[:1]).shape[1]
        if labels.shape not in ((len(images),), (len(images), classes)):
            raise ValueError(
                f"expected labels of shape ({len(images)},) or ({len(images)}, {classes}), as there are {len(images)} "
                f"images and {classes} classes, got {shown(labels)}"
            )
        if labels.dim() == 1:
            check_labels(labels, classes, labels.device)
    names = PROTOCOL_NAMES if protocols is None else list(protocols)
    for name in names:
        check_choice("protocols", name, PROTOCOLS)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        subject.progress(f"{name}: {PROTOCOLS[name].question}")
        try:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(subject.seed)
                count = PROTOCOLS[name].max_images
                some = replace(subject, images=subject.images[:count], labels=subject.labels[:count])
                outcome = PROTOCOLS[name].run(some)
        except DoesNotApply as error:
            results[name] = {"reason": str(error)}
            continue
        curves = {curve: values._asdict() for curve, values in outcome.curves.items()}
        tested = len(some.images) if outcome.images is None else outcome.images
        results[name] = {"numbers": outcome.numbers, "curves": curves, "notes": list(outcome.notes), "images": tested}
    return results
