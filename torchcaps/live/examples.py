"""Test images for the page, if the data is on this machine."""

from pathlib import Path
from typing import Any

import pooch
from torch import Tensor

from torchcaps.arguments import checked
from torchcaps.data import (
    CIFAR10,
    CIFAR100,
    SVHN,
    AffNIST,
    DataError,
    Digits,
    ImageData,
    ImageNet,
    SmallNORB,
    StereoToys,
)
from torchcaps.data.files import own_folder

# Below the root of all data sets; others have an attribute `folder`.
FOLDERS: dict[type[ImageData], str] = {
    AffNIST: "affnist",
    CIFAR10: "cifar-10",
    CIFAR100: "cifar-100",
    ImageNet: "imagenet",
    SVHN: "svhn",
    SmallNORB: "smallnorb",
    StereoToys: "stereo-toys",
}
MOST = 10
BATCHES = 20  # that are searched for an image of each class


@checked
def test_images(data: ImageData) -> list[tuple[Tensor, str]]:
    """Return the first test image of each of the first classes, `(1, *shape)`, and the names of its classes.

    Nothing is downloaded or rendered: there are none if the folder of the data set is not there.
    """
    if not _is_here(data):
        return []
    found: dict[tuple[int, ...], Tensor] = {}
    try:
        data.setup("test")
        for number, (images, labels, *_) in enumerate(data.test_dataloader()):
            for image, label in zip(data.center(images), labels, strict=True):
                key = (int(label),) if label.dim() == 0 else tuple(label.nonzero().flatten().tolist())
                found.setdefault(key, image.unsqueeze(0))
            if len(found) >= min(MOST, data.classes) or number + 1 == BATCHES:
                break
    except (DataError, OSError):
        return []
    return [(found[key], " and ".join(data.names[label] for label in key)) for key in sorted(found)[:MOST]]


@checked
def check_ways(data: ImageData, examples: list[tuple[Tensor, str]]) -> None:
    """Check that there is a way to give a network an image: to draw it, to drop it, or to take a test image.

    Raises:
        DataError: there is none.
    """
    if data.shape[0] not in (1, 3) and not examples:
        raise DataError(
            f"the network takes images of {data.shape[0]} channels, which nobody can draw, and there are no test "
            f"images of {type(data).__name__} on this machine: test the network first"
        )


def _is_here(data: Any) -> bool:
    if isinstance(data, Digits):  # part of scikit-learn
        return True
    folder = next((name for kind, name in FOLDERS.items() if isinstance(data, kind)), getattr(data, "folder", None))
    if folder is None:
        return False
    places = (own_folder(getattr(data, "root", None), folder), Path(pooch.os_cache("torchcaps")) / folder, Path(folder))
    return any(place is not None and place.is_dir() for place in places)
