"""Test images for the page, if the data is on this machine."""

from copy import copy

import torch
from torch import Tensor

from torchcaps.data import DataError, ImageData
from torchcaps.data.files import present_files_only
from torchcaps.explain.page import Samples, samples_of
from torchcaps.utils.arguments import checked

MOST = 10
BATCHES = 20  # that are searched for an image of each class


@checked
def test_images(data: ImageData) -> Samples | None:
    """Return the first test image of each of the first classes.

    Nothing is downloaded or rendered: there are none if the files of the data set are not there.
    """
    here = copy(data)
    first: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    try:
        with present_files_only():
            here.setup("test")
        for number, (images, labels, *_) in enumerate(here.test_dataloader()):
            for image, label in zip(here.center(images), labels, strict=True):
                key = (int(label),) if label.dim() == 0 else tuple(label.nonzero().flatten().tolist())
                first.setdefault(key, (image, label))
            if len(first) >= min(MOST, here.classes) or number + 1 == BATCHES:
                break
    except (DataError, OSError):
        return None
    keys = sorted(first)[:MOST]
    titles = ["test image: " + " and ".join(here.names[label] for label in key) for key in keys]
    images, labels = (torch.stack(list(parts)) for parts in zip(*(first[key] for key in keys), strict=True))
    return samples_of(images, labels, here.names, titles)
