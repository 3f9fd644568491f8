"""Signals and volumes of one's own, as arrays in files: in a folder for each class or named by a table."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.arrays import (
    LAYOUTS,
    LETTERS,
    SUFFIXES,
    Layout,
    by,
    mean_and_deviation,
    moments_of,
    read_array,
    read_shape,
    standardized,
    unreadable,
)
from torchcaps.data.file_lists import FileKind
from torchcaps.data.files import DataError
from torchcaps.data.images import FileData, FileSet
from torchcaps.data.labeled import Batch
from torchcaps.data.notes import listed, say, together
from torchcaps.data.order import evenly_chosen
from torchcaps.data.own_files import OwnFiles
from torchcaps.data.pictures import in_threads
from torchcaps.data.splits import PART_WORDS, Part
from torchcaps.utils.arguments import Count, FloatTensor, Positive, checked
from torchcaps.utils.checks import counted

ENOUGH = 256  # training arrays whose mean and deviation are taken


class Form(NamedTuple):
    """How an array in a file becomes an input.

    Fields:
        layout, key: see `read_array`.
        shape: channels and size of the input.
        means, deviations: those of each channel.
    """

    layout: Layout
    key: str | None
    shape: tuple[int, ...]
    means: Sequence[float]
    deviations: Sequence[float]

    def values(self, path: Path) -> np.ndarray:
        """Return the values of a file that an input is made of, `(channels, ...)`; DataError if there is none."""
        array = read_array(path, self.layout, self.key, self.shape[1:])
        if len(array) != self.shape[0]:
            reason = f"by data.layout {self.layout} it has {counted(len(array), 'channel')}, not {self.shape[0]}"
            raise unreadable(path, reason, "give arrays with the same channels")
        return array

    def read(self, path: Path) -> Tensor:
        """Read a file as an input of a network, float32 `(channels, *size)`."""
        return standardized(self.values(path), self.shape[1:], self.means, self.deviations)


class ArrayFolder(OwnFiles, FileData):
    """Signals and volumes of one's own, as `.npy` or `.npz` files in a folder for each class, or in one folder beside a
    table. How they are found and split, and the options of that, are those of `OwnFiles`.

    A file has one array of numbers: bool, int or float, all finite, at most 2^28 of them. Nothing in it is unpickled.
    `layout` says what its dimensions are. Batches are float32 `(batch, channels, *size)`: of longer arrays the middle
    is kept, and shorter ones are padded at both ends with the mean of the channel. Each channel is standardized by its
    mean and its deviation in the training arrays, of at most 256 of them.

    Args:
        folder: folder of the files.
        layout: the dimensions of the arrays in the files: L for the moments of a signal, H and W for the height and the
            width of an image, D, H and W for the depth, the height and the width of a volume, and C for channels, such
            as the leads of a signal. A line says which layouts fit; none is guessed.
        key: name of the array in `.npz` files that have several.
        size: length of each dimension of the inputs, without the channels; None for the one size that all training
            arrays have.
        means, deviations: number that is taken from each channel, and by which it is then divided; None for those of
            the training arrays.
        array: name of the column of the table with the files.
        augmentations: random changes of training arrays. "shift": by up to an eighth of each dimension, and the gap has
            the mean.
        options: see `OwnFiles`.

    Raises:
        ValueError: an argument is out of range.
        DataError: the folder, or a file in it, cannot be used; see `OwnFiles`.
    """

    kind = FileKind("array", SUFFIXES)

    @checked
    def __init__(
        self,
        folder: str | None = None,
        layout: Layout | None = None,
        key: str | None = None,
        size: list[Count] | None = None,
        means: list[float] | None = None,
        deviations: list[Positive] | None = None,
        array: str = "file",
        augmentations: list[Literal["shift"]] | None = None,
        **options: Any,
    ) -> None:
        self.key, self.file_column, self.augmentations = key, array, list(augmentations or ())
        self._layout, self._size, self._means, self._deviations = layout, size, means, deviations
        super().__init__(folder, **options)
        if size is not None and len(size) != self.dims:
            raise ValueError(f"size must have a number for each dimension of layout {self.layout}, got {size}")
        if (means is None) != (deviations is None) or len(means or ()) != len(deviations or ()):
            raise ValueError("means and deviations must have a number for each channel, or both be None")
        self._digests: dict[str, bytes] = {}  # of the files that were read, by their paths

    @cached_property
    def layout(self) -> Layout:
        """The dimensions of the arrays in the files."""
        if self._layout is not None:
            return self._layout
        path = self._trained[0]
        shape = read_shape(self._folder / path, None, self.key)
        fitting = [layout for layout in LAYOUTS if len(layout) == len(shape)]
        advice = (
            f"give --data.layout {' or '.join(fitting)} ({LETTERS})" if fitting else "give arrays of 1 to 4 dimensions"
        )
        raise DataError(f"data.layout is missing, and arrays such as {path} have the shape {by(shape)}: {advice}")

    @property
    def dims(self) -> int:
        """Number of dimensions of an input without the channels."""
        return len(self.layout.replace("C", ""))

    @cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # that of the arrays, if it was not given
        """Channels and size of an input."""
        if self._size is not None and self._means is not None:
            return len(self._means), *self._size
        counts = Counter(shape[0] for shape in self._shapes.values())
        channels = counts.most_common(1)[0][0]
        if self._means is not None and len(self._means) != channels:
            raise ValueError(f"means and deviations must have {channels} numbers each, as arrays have channels")
        if self._size is not None:
            return channels, *self._size
        files = {shape[1:]: path for path, shape in self._shapes.items() if shape[0] == channels}  # one of each size
        if len(files) > 1:
            (size, path), (other_size, other) = list(files.items())[:2]
            sizes = [shape[1:] for shape in self._shapes.values() if shape[0] == channels]
            raise DataError(
                f"{self.folder}: training arrays have several sizes, such as {by(size)} in {path} and {by(other_size)} "
                f"in {other}: give --data.size '{[*map(median_low, zip(*sizes, strict=True))]}', to which longer ones "
                "are cut and shorter ones are padded"
            )
        return channels, *next(iter(files))

    @cached_property
    def form(self) -> Form:
        """How an array in a file becomes an input."""
        if self._means is not None and self._deviations is not None:
            return Form(self.layout, self.key, self.shape, self._means, self._deviations)
        raw = Form(self.layout, self.key, self.shape, [], [])

        def measure(path: Path) -> np.ndarray | None:
            try:
                return moments_of(raw.values(path))
            except DataError:  # which is said when all arrays are read
                return None

        paths = [*self._shapes]
        chosen = [self._folder / paths[i] for i in evenly_chosen(len(paths), ENOUGH)]
        moments = [x for x in in_threads(measure, chosen, "finding means and deviations") if x is not None]
        if not moments:
            raw.values(chosen[0])  # which raises its error
        means, deviations = mean_and_deviation(moments)
        if steady := [str(k) for k, deviation in enumerate(deviations) if deviation == 0]:
            say(f"{self.folder}: in all training arrays a channel has one value alone: channel {listed(steady)} from 0")
        return raw._replace(means=means, deviations=[deviation or 1.0 for deviation in deviations])

    def network_arguments(self) -> dict[str, Any]:
        return super().network_arguments() | {"in_channels": self.shape[0], "dims": self.dims}

    def resolved_arguments(self) -> dict[str, Any]:
        of_form = {"means": [*self.form.means], "deviations": [*self.form.deviations]}
        return super().resolved_arguments() | {"size": [*self.shape[1:]], **of_form}

    def prepare_data(self) -> None:
        super().prepare_data()
        channels, *size = self.shape
        sizes = [shape[1:] for shape in self._shapes.values()]
        cut = sum(any(a > b for a, b in zip(each, size, strict=True)) for each in sizes)
        padded = sum(any(a < b for a, b in zip(each, size, strict=True)) for each in sizes)
        if cut or padded:
            of = counted(len(sizes), "training array")
            say(f"{self.folder}: of {of}, {cut:,} are longer than data.size {by(size)} and cut, {padded:,} are padded")
        if channels > max(size):
            say(
                f"{self.folder}: by data.layout {self.layout} an array has {channels} channels of the size {by(size)}: "
                "if C stands in the wrong place, the network learns little"
            )

    def picture(self, path: Path) -> Tensor:
        """Read a file as an input of these data, float32 `(channels, *size)`."""
        array = self.form.read(path)
        if (size := read_shape(path, self.layout, self.key)[1:]) != self.shape[1:]:
            line = f"{path}: has the size {by(size)}, and was cut or padded to {by(self.shape[1:])}; so are others"
            say(line, once="size")
        return array

    def center(self, images: Tensor) -> Tensor:
        """Return inputs as they are: they were standardized when they were read."""
        return images

    @checked
    def augment(self, arrays: FloatTensor) -> Tensor:
        """Augment training arrays `(n, channels, *size)`, each one independently, on their device."""
        for dim in range(2, arrays.dim()) if "shift" in self.augmentations else ():
            arrays = _shifted(arrays, dim)
        return arrays

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        arrays, *rest = batch
        assert self.trainer is not None  # the Trainer calls this hook
        return self.augment(arrays) if self.trainer.training else arrays, *rest

    def _errors(self, paths: list[str]) -> list[str]:
        form = self.form

        def check(path: Path) -> tuple[str, bytes, bool]:
            try:
                values = form.values(path)
                with path.open("rb") as file:
                    return "", hashlib.file_digest(file, "sha256").digest(), values.min() == values.max()
            except DataError as error:
                return str(error), b"", False

        files = [self._folder / path for path in paths]
        readings = [*in_threads(check, files, f"reading {counted(len(paths), 'array')}")]
        self._digests |= zip(paths, (digest for _, digest, _ in readings), strict=True)
        if flat := [path for path, (_, _, is_flat) in zip(paths, readings, strict=True) if is_flat]:
            say(f"{self.folder}: {counted(len(flat), 'array')} with one value alone: {listed(flat)}")
        return [error for error, _, _ in readings]

    def _samples(self, part: Part, paths: list[str], labels: Tensor) -> FileSet:
        if part == "train":
            trained = {self._digests[path] for path in paths}
            others: tuple[Part, ...] = ("val", "test")
            for other in others:
                names = self._readable(other)
                if copies := [name for name in names if self._digests[name] in trained]:
                    count = counted(len(names), f"{PART_WORDS[other]} array")
                    say(f"{self.folder}: training has {len(copies)} of {count} too")
        return FileSet(self._folder, np.array(paths), labels, self.form.read)

    @cached_property
    def _trained(self) -> list[str]:
        """The paths of the training arrays in the folder."""
        paths = [path for path, part in self.parts.items() if part == "train"]
        if not paths:
            raise DataError(f"{self.folder}: has no training array: choose another split")
        return paths

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Channels and size of each training array that can be read, by its path in the folder."""
        shapes: dict[str, tuple[int, ...]] = {}
        errors: list[tuple[str, str]] = []
        layout = self.layout  # whose error is about no single file
        for path in self._trained:
            try:
                shapes[path] = read_shape(self._folder / path, layout, self.key)
            except DataError as error:
                errors.append((path, str(error)))
        if not shapes:
            raise DataError(together(errors))
        return shapes


def _shifted(arrays: Tensor, dim: int) -> Tensor:
    """Shift each array along a dimension by a random part of at most an eighth; the gap has zeros, the means."""
    length = arrays.shape[dim]
    most = length // 8
    offset = torch.randint(-most, most + 1, (len(arrays), 1), device=arrays.device)
    source = torch.arange(length, device=arrays.device) + offset
    source = source.view(len(arrays), *[1] * (dim - 1), length, *[1] * (arrays.dim() - 1 - dim))
    inside = (source >= 0) & (source < length)
    return arrays.gather(dim, source.clamp(0, length - 1).expand_as(arrays)) * inside
