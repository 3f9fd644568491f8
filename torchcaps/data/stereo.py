"""Stereo pairs of toys over a grid of poses: what `SmallNORB` and `StereoToys` share."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.images import ImageData
from torchcaps.data.labeled import Batch, LabeledSet
from torchcaps.utils.arguments import checked
from torchcaps.utils.memory import free_bytes

# smallNORB's split of the ten toys of each class, and its grid of poses. The numbers are those of `Metadata`.
TRAINING_INSTANCES, TEST_INSTANCES = (4, 6, 7, 8, 9), (0, 1, 2, 3, 5)
ELEVATIONS, AZIMUTHS, LIGHTINGS = range(9), range(0, 36, 2), range(6)


class Metadata(NamedTuple):
    """Toy, pose and lighting of n stereo pairs: (n,) int64 each."""

    category: Tensor  # label, 0 to 4
    instance: Tensor  # toy of the category, 0 to 9
    elevation: Tensor  # 0 to 8: the cameras are 30, 35, ..., 70 degrees above the horizontal
    azimuth: Tensor  # 0, 2, ..., 34: the toy is turned by 0, 20, ..., 340 degrees
    lighting: Tensor  # 0 to 5

    def at(self, indices: np.ndarray | Tensor) -> "Metadata":
        """Return the metadata of the pairs at the indices, or where a mask is true."""
        return Metadata(*(column[indices] for column in self))


class StereoSet(LabeledSet):
    """Stereo pairs with their metadata: n of the m pairs that an array holds.

    Args:
        images: all pairs, (m, 2, h, w) uint8. They may be memory-mapped, and are never copied as a whole.
        chosen: indices of the n pairs in `images`, (n,) int64.
        metadata: metadata of the n pairs.
    """

    def __init__(self, images: Tensor, chosen: Tensor, metadata: Metadata) -> None:
        self.images, self.chosen, self.metadata = images, chosen, metadata
        self.labels = metadata.category

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # where its tensors are
        return self.images.device

    def on(self, device: torch.device) -> Self:
        if device == self.device or self.images.nbytes > free_bytes(device) / 2:
            return self
        metadata = Metadata(*(column.to(device) for column in self.metadata))
        return type(self)(self.images.to(device), self.chosen.to(device), metadata)

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        return self.images[self.chosen[indices]].float() / 255, self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        return type(self)(self.images, self.chosen[indices], self.metadata.at(indices))


class StereoData(ImageData):
    """Base of the data sets that show toys to two cameras, over a grid of elevations, azimuths and lightings.

    A subclass implements `read`. An image has two channels: the left and the right camera's picture. `metadata(stage)`
    gives the toy, the pose and the lighting of every pair. To test on unseen poses, choose some poses for the training
    and others for the test. The test always shows other toys than the training.

    `shift` moves both pictures of a pair together and repeats their edges where they leave a gap. `flip` mirrors both
    and exchanges them, as a mirror does with the cameras. `val_size` holds out random images: they show toys that are
    also trained on, so scores on them are higher than in the test.
    `val_instances` holds out all images of some toys, so the validation shows unseen toys, as the test does.

    Args:
        train_elevations, test_elevations: some of 0, 1, ..., 8, see `Metadata`; None for all.
        train_azimuths, test_azimuths: some of 0, 2, ..., 34; None for all.
        train_lightings, test_lightings: some of 0, 1, ..., 5; None for all.
        val_instances: some of 4, 6, 7, 8 and 9: toys of every class to hold out, in place of `val_size`; None for none.
        options: see `ImageData`.

    Raises:
        ValueError: an argument is out of range.
    """

    classes = 5
    padding = "replicate"

    @checked
    def __init__(
        self,
        train_elevations: list[int] | None = None,
        test_elevations: list[int] | None = None,
        train_azimuths: list[int] | None = None,
        test_azimuths: list[int] | None = None,
        train_lightings: list[int] | None = None,
        test_lightings: list[int] | None = None,
        val_instances: list[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.val_instances = val_instances or []
        if not set(self.val_instances) < set(TRAINING_INSTANCES):
            choices = spelled(TRAINING_INSTANCES)
            raise ValueError(f"val_instances must be some of {choices}, but not all of them, got {val_instances}")
        if self.val_instances and self.val_size:
            raise ValueError("val_instances takes the place of val_size: leave out one of the two")
        self.train_elevations = _chosen("train_elevations", train_elevations, ELEVATIONS)
        self.test_elevations = _chosen("test_elevations", test_elevations, ELEVATIONS)
        self.train_azimuths = _chosen("train_azimuths", train_azimuths, AZIMUTHS)
        self.test_azimuths = _chosen("test_azimuths", test_azimuths, AZIMUTHS)
        self.train_lightings = _chosen("train_lightings", train_lightings, LIGHTINGS)
        self.test_lightings = _chosen("test_lightings", test_lightings, LIGHTINGS)

    @property
    def names(self) -> list[str]:
        return ["animal", "human", "airplane", "truck", "car"]

    def grid(self, train: bool) -> tuple[list[int], list[int], list[int]]:
        """Return the elevations, azimuths and lightings of the training or the test set."""
        if train:
            return self.train_elevations, self.train_azimuths, self.train_lightings
        return self.test_elevations, self.test_azimuths, self.test_lightings

    def metadata(self, stage: str) -> Metadata:
        """Return the metadata of the pairs for "fit", "validate" or "test", in their order. Call `setup` first."""
        pairs = self._loaded(stage)
        assert isinstance(pairs, StereoSet)
        return pairs.metadata

    @property
    def _validates(self) -> bool:
        return bool(self.val_instances) or super()._validates

    def _split(self, images: LabeledSet) -> Sequence[np.ndarray]:
        if not self.val_instances:
            return super()._split(images)
        assert isinstance(images, StereoSet)
        held_out = np.isin(images.metadata.instance, self.val_instances)
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        """Read the training or the test set, with the poses of `grid(train)` and possibly others.

        Returns:
            Images (n, 2, h, w) uint8, which may be memory-mapped, and their metadata.
        """
        raise NotImplementedError

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        pairs = self._images(train)
        return pairs.images[pairs.chosen], pairs.labels

    def _mirrored(self, images: Tensor) -> Tensor:
        return images.flip((-3, -1))  # in a mirror the cameras change places too; otherwise what is near would be far

    def _images(self, train: bool) -> StereoSet:
        images, metadata = self.read(train)
        chosen = torch.ones(len(images), dtype=torch.bool)
        columns = metadata.elevation, metadata.azimuth, metadata.lighting
        for column, wanted in zip(columns, self.grid(train), strict=True):
            chosen &= torch.isin(column, torch.tensor(wanted))
        indices = chosen.nonzero().squeeze(1)
        return StereoSet(images, indices, metadata.at(indices))


def _chosen(name: str, wanted: list[int] | None, choices: range) -> list[int]:
    if wanted is None:
        return list(choices)
    if not wanted or not set(wanted) <= set(choices):
        raise ValueError(f"{name} must be some of {spelled(choices)}, or None for all, got {wanted}")
    return sorted(set(wanted))


def spelled(numbers: Sequence[int]) -> str:
    """Return numbers as a text for messages: "4, 6, 7"."""
    return ", ".join(map(str, numbers))
