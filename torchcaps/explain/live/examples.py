"""Test images for the page, if the data is on this machine."""

from copy import copy
from pathlib import Path
from typing import Any

import pooch
import torch
from torch import Tensor

from torchcaps.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    AffNIST,
    DataError,
    Digits,
    ImageData,
    ImageFolder,
    ImageNet,
    SmallNORB,
    StereoToys,
)
from torchcaps.data.files import own_folder
from torchcaps.explain.page import Samples, samples_of
from torchcaps.utils.arguments import checked

MOST = 10
BATCHES = 20  # that are searched for an image of each class


@checked
def test_images(data: ImageData) -> Samples | None:
    """Return the first test image of each of the first classes.

    Nothing is downloaded or rendered: there are none if the files of the data set are not there.
    """
    here = _here(data)
    if here is None:
        return None
    first: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    try:
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


@checked
def check_ways(data: ImageData, examples: Samples | None) -> None:
    """Check that there is a way to give a network an image: to draw it, to drop it, or to take a test image.

    Raises:
        DataError: there is none.
    """
    if data.shape[0] not in (1, 3) and examples is None:
        raise DataError(
            f"the network takes images of {data.shape[0]} channels, which nobody can draw, and there are no test "
            f"images of {type(data).__name__} on this machine: test the network first"
        )


def _here(data: Any) -> Any:
    """Return the data set with a root that has its test files, of which it then downloads none; None without them."""
    if isinstance(data, (AffNIST, Digits, ImageFolder, ImageNet)):  # they are never downloaded
        return data
    files = _test_files(data)
    if files is None:
        return None
    for root in (own_folder(data.root, ""), Path(pooch.os_cache("torchcaps"))):
        if root is not None and all(any((root / name).exists() for name in names) for names in files):
            found = copy(data)
            found.root = str(root)
            if isinstance(data, StereoToys):
                found._render = _refuse
            return found
    return None


def _test_files(data: Any) -> list[list[str]] | None:
    """Return the test files of a data set below its root, and for each the other names that it can have; None if it is
    not known where they are."""
    if isinstance(data, MNIST):
        return [[f"{data.folder}/{name}"] for name in data.md5 if name.startswith("t10k")]
    if isinstance(data, (CIFAR10, CIFAR100)):
        return [[f"{file.folder}/{file.name}" for file in (*data.test_batches, data.archive)]]
    if isinstance(data, SVHN):
        return [[f"{data.test_file.folder}/{data.test_file.name}"]]
    if isinstance(data, SmallNORB):
        return [[f"smallnorb/{name}{end}" for end in (".mat", ".mat.gz")] for name in data.md5 if "testing" in name]
    return [["stereo-toys"]] if isinstance(data, StereoToys) else None


def _refuse(*_: Any) -> None:
    raise DataError("the toys are not rendered for a few examples")
