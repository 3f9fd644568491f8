"""Base of the labeled image sets, in memory or on disk: splits, batches, augmentation; and what arrays have of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from torchcaps.data.file_lists import FileKind
from torchcaps.data.files import DataError
from torchcaps.data.labeled import STAGES, Batch, LabeledData, LabeledSet
from torchcaps.data.notes import together
from torchcaps.data.pictures import SUFFIXES, Fit, Window, in_threads, read_picture
from torchcaps.data.stratified import stratified_split
from torchcaps.utils.arguments import Count, CountOrZero, Range, check_input, checked
from torchcaps.utils.checks import check_choice, counted
from torchcaps.utils.memory import free_bytes

# Not the run's seed: validation scores are comparable only if every run holds out the same images.
VAL_SEED = 0


def _as_float(images: Tensor) -> Tensor:
    """Return images in [0, 1]: bytes are divided by 255, floats stay as they are."""
    return images.float() / 255 if images.dtype == torch.uint8 else images  # ImageNet's loader returns bytes


def color_jitter(strength: float) -> Callable[[Tensor], Tensor]:
    from kornia.augmentation import ColorJitter  # slow to import

    return ColorJitter(strength, strength, strength, strength)


class ImageSet(LabeledSet):
    """Images (n, c, h, w) uint8 and labels (n,) int64, both in memory. Batches have float32 images in [0, 1]. Inputs
    that are floats already, of any shape, stay as they are."""

    @checked
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # where its tensors are
        return self.labels.device

    def on(self, device: torch.device) -> Self:
        if device == self.device or self.images.nbytes > free_bytes(device) / 2:
            return self
        return type(self)(self.images.to(device), self.labels.to(device))

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        # Two gathers are faster than stacking 128 small tensors.
        return _as_float(self.images[indices]), self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        return type(self)(self.images[indices], self.labels[indices])


@dataclass(frozen=True, eq=False)
class FileSet(LabeledSet):
    """Labeled inputs of one shape that are read from their files when a batch needs them.

    Args:
        folder: folder with the files.
        names: paths of the files in it, an array (n,).
        labels: labels of the files, see `LabeledData`.
        read: returns the input in a file.
    """

    folder: Path
    names: np.ndarray
    labels: Tensor
    read: Callable[[Path], Tensor]

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        return torch.stack([self.read(self.folder / self.names[index]) for index in indices]), self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        return replace(self, names=self.names[indices], labels=self.labels[indices])

    def on(self, device: torch.device) -> LabeledSet:
        """Return the inputs as an `ImageSet` on a device, read once, or as they are if its memory is too small."""
        paths = [self.folder / name for name in self.names]
        first = self.read(paths[0])
        if len(self) * first.nbytes > free_bytes(device) / 2:
            return self
        inputs = first.new_empty(len(self), *first.shape)
        for place, each in enumerate(in_threads(self.read, paths, f"reading {counted(len(paths), 'file')}")):
            inputs[place] = each
        return ImageSet(inputs.to(device), self.labels.to(device))


class FileData(LabeledData):
    """Base of data whose inputs are tensors of one shape, `(channels, *size)`, which files may hold: images and arrays.

    A subclass sets `shape` and `kind`, the kind of such files, and defines `picture` and `center`.
    """

    shape: tuple[int, ...]
    kind: FileKind
    ten_crop = False  # whether test inputs are ten crops each

    def picture(self, path: Path) -> Tensor:
        """Read a file; `center` makes a network's input of it."""
        raise NotImplementedError

    def center(self, images: Tensor) -> Tensor:
        """Return inputs as in a validation, of a batch that was read."""
        raise NotImplementedError

    @checked
    def samples(self, stage: str, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs of a stage that was set up, prepared as in a validation, `(n, *shape)`, and their labels, on
        the CPU."""
        part: Any = self.part(stage)
        batches = [part.__getitems__(list(indices[start : start + 256])) for start in range(0, len(indices), 256)]
        images = torch.cat([self.center(batch[0]).cpu() for batch in batches])  # some sets make theirs on a device
        return images, torch.cat([batch[1].cpu() for batch in batches])

    @checked
    def pictures(self, paths: Sequence[Path], skipped: list[str] | None = None) -> dict[int, Tensor]:
        """Read files, see `picture`, and return the inputs by their places among the paths.

        Args:
            paths: the files.
            skipped: list to which the errors of files that cannot be read are appended; None raises one for all.
        """
        images: dict[int, Tensor] = {}
        errors: list[tuple[str, str]] = []
        for place, path in enumerate(paths):
            try:
                images[place] = self.picture(path)
            except DataError as error:
                errors.append((str(path), str(error)))
        if errors and skipped is None:
            raise DataError(together(errors))
        if skipped is not None:
            skipped += [message for _, message in errors]
        return images


class ImageData(FileData):
    """Base of the labeled image sets.

    A subclass sets `classes`, `shape`, `padding` if zeros do not fit its images, and `stored_shape` if its loaders
    return images of another shape. It implements `load`. It works with a Trainer and without one:

        data.setup("test")
        for images, labels in data.test_dataloader(): ...

    Images are float32 in [0, 1] of shape (batch, c, h, w), labels are int64 of shape (batch,). (The loaders of
    `ImageNet` return bytes, which the hook or the methods below convert.) Training batches are shuffled. Only training
    images are augmented. With a Trainer, a hook augments, resizes and crops on the device. A loop of your own calls
    `data.augment(images)` in training, `data.center(images)` in validation and `data.crops(images)` in the test.

    Args:
        batch_size: images in a batch. The last batch of an epoch may be smaller.
        shift: largest shift in training, in pixels. Every image moves by whole numbers of pixels, uniform over
            -shift..shift, down and across. Gaps are filled with zeros, or as the class's `padding` says.
        val_size: number of training images to hold out for validation, by a stratified split that is the same in every
            run. With 0 there is no validation.
        num_workers: worker processes. 0 is fastest for images in memory: making a batch takes less time than passing it
            between processes.
        flip: whether training images are mirrored left to right, each with probability 1/2.
        resize: length of the shorter side, in pixels, to which images are enlarged (bilinear) before they are cropped
            back to `shape`. In training each crop is at a random place, uniform over all, with the margin that `shift`
            adds; otherwise it is at the center. None for no resizing.
        jitter: strength of random color changes in training. Brightness, contrast and saturation of every image are
            multiplied by random numbers, uniform over 1 - jitter..1 + jitter. Its hue turns by up to this part of a
            circle each way.
        ten_crop: whether the test takes ten crops of every image after `resize`: top left, top right, bottom left,
            bottom right and center, then the mirror images of these. Batches then have shape (batch, 10, c, h, w).
        shuffle_labels: whether to shuffle the training labels and the validation labels, see `LabeledData`.

    Raises:
        ValueError: an argument is out of range; or `augment`, `center` or `crops` gets images of another shape.
        DataError: in `setup`, if the data is missing or damaged, or too small for `val_size`.
    """

    shape: tuple[int, int, int]
    stored_shape: tuple[int, int, int] | None = None  # of an image from the loaders; None: `shape`
    kind = FileKind("picture", SUFFIXES)
    fit: Fit = "crop"  # how `picture` makes a picture of other proportions fit
    window: Window | None = None  # what is black and white in a picture of more than 8 bits
    padding = "constant"  # how `shift` fills gaps: "constant" with zeros, "replicate" with the image's edge

    @checked
    def __init__(
        self,
        batch_size: Count = 128,
        shift: CountOrZero = 0,
        val_size: CountOrZero = 0,
        num_workers: CountOrZero = 0,
        flip: bool = False,
        resize: Count | None = None,
        jitter: Annotated[float, Range(0, 0.5)] = 0.0,
        ten_crop: bool = False,
        shuffle_labels: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, shuffle_labels)
        channels, height, width = self.shape
        if shift >= min(height, width):
            raise ValueError(f"shift must be from 0 to {min(height, width) - 1} pixels, got {shift}")
        if resize is not None and resize < min(height, width):
            raise ValueError(f"resize must be None or at least {min(height, width)} pixels, got {resize}")
        if jitter and channels != 3:
            raise ValueError(f"jitter is for color images of 3 channels, and these have {channels}: set it to 0")
        if ten_crop and resize is None:
            raise ValueError(
                f"ten_crop needs resize, the side of the image that is cropped: set resize to more than "
                f"{min(height, width)} pixels"
            )
        self.shift, self.flip, self.val_size = shift, flip, val_size
        self.resize, self.jitter, self.ten_crop = resize, jitter, ten_crop
        self._jitter = color_jitter(jitter) if jitter else None

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        """Return the training or the test set: images (n, c, h, w) uint8 and labels (n,) int64."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Load the training set for "fit" or "validate", the test set for "test", both for None."""
        check_choice("stage", stage, STAGES)
        if stage in ("fit", "validate", None) and self.train_set is None:
            images = self._images(train=True)
            if self._validates:
                kept, held_out = self._split(images)
                self.val_set = self._with_labels(self._for_validation(images.subset(held_out)), "validate")
                images = images.subset(kept)
            self.train_set = self._with_labels(images, "fit")
        if stage in ("test", None) and self.test_set is None:
            self.test_set = self._images(train=False)

    @property
    def _validates(self) -> bool:
        return self.val_size > 0

    def _images(self, train: bool) -> LabeledSet:
        """Return the training or the test set. A set that does not fit in memory overrides this instead of `load`."""
        return ImageSet(*self.load(train))

    def _for_validation(self, images: LabeledSet) -> LabeledSet:
        """Return the validation set for the training images that are held out."""
        return images

    def _split(self, images: LabeledSet) -> Sequence[np.ndarray]:
        """Return the indices of the training images to train on, and of those to hold out."""
        labels = images.labels
        most = len(labels) - self.classes  # stratified: both parts need an image of every class
        if not self.classes <= self.val_size <= most:
            others = f" or from {self.classes} to {most}" if most >= self.classes else ""
            raise DataError(
                f"val_size must be 0{others} for "
                f"{counted(len(labels), 'training image')} of {self.classes} classes, got {self.val_size}"
            )
        return stratified_split(labels.numpy(), self.val_size, VAL_SEED)

    @checked
    def picture(self, path: Path) -> Tensor:
        """Read a picture file as an image of these data, bytes `(c, h, w)`; `center` makes a network's input of it."""
        return read_picture(path, self.stored_shape or self.shape, self.fit, self.window)

    @checked
    def augment(self, images: Tensor) -> Tensor:
        """Augment training images (n, c, h, w): crop, shift, mirror and jitter each one independently.

        This happens on the device of the images, with torch's default generator.
        """
        images = self._moved(self._enlarged(images))
        return images if self._jitter is None else self._jitter(images)

    def augmented(self, batch: Batch) -> Batch:
        """Return a training batch with images that were augmented, see `augment`."""
        images, *rest = batch
        return self.augment(images), *rest

    @checked
    def center(self, images: Tensor) -> Tensor:
        """Return validation images: the center of each image `(n, c, h, w)` after `resize`, `(n, *shape)`."""
        images = self._enlarged(images)
        return images if self.resize is None else self._at_places(images)[-1]

    @checked
    def crops(self, images: Tensor) -> Tensor:
        """Return test images for images `(n, c, h, w)`: their centers `(n, *shape)`, or with `ten_crop` all ten
        crops `(n, 10, *shape)`."""
        if not self.ten_crop:
            return self.center(images)
        crops = torch.stack(self._at_places(self._enlarged(images)), 1)
        return torch.cat([crops, self._mirrored(crops)], 1)

    def _moved(self, images: Tensor) -> Tensor:
        """Crop, shift and mirror each of the images independently."""
        if self.shift or self.resize:
            images = self._cropped(images)
        if self.flip:
            mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, self._mirrored(images), images)
        return images

    def _padded(self, images: Tensor) -> Tensor:
        """Pad images by `shift`."""
        return pad(images, (self.shift,) * 4, mode=self.padding)

    def _cropped(self, images: Tensor) -> Tensor:
        """Pad images, and crop each one at a random place. One operator does it for all of them."""
        height, width = self.shape[1:]
        images = self._padded(images)
        left, top = (
            (torch.rand(len(images), device=images.device) * (whole - part + 1)).long()
            for whole, part in zip((images.shape[-1], images.shape[-2]), (width, height), strict=True)
        )
        places = images.unfold(2, height, 1).unfold(3, width, 1)  # (n, c, top, left, height, width), nothing is copied
        return places[torch.arange(len(images), device=images.device), :, top, left].contiguous()

    def _mirrored(self, images: Tensor) -> Tensor:
        """Return the mirror images of images (..., c, h, w), left to right."""
        return images.flip(-1)

    def _at_places(self, images: Tensor) -> list[Tensor]:
        """Return the four corners and the center of enlarged images, each (n, *shape)."""
        height, width = self.shape[1:]
        down, right = images.shape[-2] - height, images.shape[-1] - width
        places = ((0, 0), (0, right), (down, 0), (down, right), (down // 2, right // 2))
        return [images[..., top : top + height, left : left + width] for top, left in places]

    def _enlarged(self, images: Tensor) -> Tensor:
        """Return images (n, c, h, w) as floats, resized to `resize`; some may have the size that this gives already."""
        images = _as_float(images)
        check_input("images", images, None)
        channels, height, width = self.shape
        shapes = [self.stored_shape or self.shape]
        if self.resize is not None:
            scale = self.resize / min(height, width)
            shapes.append((channels, round(height * scale), round(width * scale)))
        if images.shape[1:] not in shapes:
            expected = " or ".join(f"(n, {', '.join(map(str, shape))})" for shape in dict.fromkeys(shapes))
            raise ValueError(
                f"{type(self).__name__} has images of shape {expected}, got {tuple(images.shape)}: give a batch of its "
                "own images"
            )
        return images if self.resize is None else interpolate(images, shapes[-1][1:], mode="bilinear")

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        images, *rest = batch
        assert self.trainer is not None  # the Trainer calls this hook
        if images.dtype == torch.uint8:
            # Lightning has converted only floats to the precision of the run.
            images = _as_float(images).to(self.trainer.lightning_module.dtype)
        if self.trainer.training:
            return self.augmented((images, *rest))
        return self.crops(images) if self.trainer.testing else self.center(images), *rest
