"""Test images for the page, if the data is on this machine."""

from copy import copy

import torch
from torch import Tensor

from torchcaps.data import DataError, ImageData, ImageFolder
from torchcaps.data.files import forbid_downloads
from torchcaps.data.order import evenly_chosen
from torchcaps.explain.page import Samples, samples_of
from torchcaps.utils.arguments import checked

MAX_IMAGES = 10
SEARCHED, AT_ONCE = 640, 32  # images that are searched for one of each class


@checked
def test_images(data: ImageData) -> Samples | None:
    """Return a test image of each of the first classes, found among evenly spaced ones; ten images that have
    numbers or masks.

    Nothing is downloaded or rendered: there are none if the files of the data set are not there.
    """
    here, by_place = copy(data), data.target in ("numbers", "masks")
    first: dict[tuple[int, ...], tuple[int, Tensor, Tensor]] = {}
    try:
        with forbid_downloads():
            here.setup("test")
        some = evenly_chosen(len(here.part("test")), SEARCHED)  # type: ignore[arg-type]
        for start in range(0, len(some), AT_ONCE):
            indices = some[start : start + AT_ONCE]
            for index, image, label in zip(indices, *here.samples("test", indices), strict=True):
                labels = label if by_place or label.dim() == 0 else label.nonzero()
                key = (index,) if by_place else tuple(labels.flatten().tolist())
                first.setdefault(key, (index, image, label))
            if len(first) >= min(MAX_IMAGES, MAX_IMAGES if by_place else here.classes):
                break
    except (DataError, OSError):
        return None
    keys = sorted(first)[:MAX_IMAGES]
    titles = [f"test image {key[0]}" for key in keys]
    if not by_place:
        titles = [f"test image: {' and '.join(here.names[label] for label in key) or 'no label'}" for key in keys]
    places, images, labels = zip(*(first[key] for key in keys), strict=True)
    if isinstance(here, ImageFolder):
        files = here.keys("test")
        titles = [files[index] for index in places]
    return samples_of(torch.stack(images), torch.stack(labels), here.names, titles, here.target)
