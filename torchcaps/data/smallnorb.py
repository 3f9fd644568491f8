"""smallNORB from its six original files, and what every set of stereo pairs over a grid of poses shares."""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile, DataError
from torchcaps.data.images import ImageData
from torchcaps.data.labelled import Batch, LabelledSet

SIDE = 96
TRAINING_INSTANCES, TEST_INSTANCES = (4, 6, 7, 8, 9), (0, 1, 2, 3, 5)
ELEVATIONS, AZIMUTHS, LIGHTINGS = range(9), range(0, 36, 2), range(6)

BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54


class Metadata(NamedTuple):
    """What is known of n stereo pairs: (n,) int64 each."""

    category: Tensor  # 0 to 4, the label
    instance: Tensor  # 0 to 9, which toy of the category
    elevation: Tensor  # 0 to 8: the cameras are 30, 35, ..., 70 degrees above the horizontal
    azimuth: Tensor  # 0, 2, ..., 34: tens of degrees that the toy is turned by
    lighting: Tensor  # 0 to 5

    def at(self, indices: np.ndarray | Tensor) -> "Metadata":
        return Metadata(*(column[indices] for column in self))


class StereoSet(LabelledSet):
    """Stereo pairs and what is known of them.

    Args:
        images: (m, 2, h, w) uint8, memory-mapped or not; never copied as a whole.
        chosen: (n,) int64, which of them these are.
        metadata: of those n.
    """

    def __init__(self, images: Tensor, chosen: Tensor, metadata: Metadata) -> None:
        self.images, self.chosen, self.metadata = images, chosen, metadata
        self.labels = metadata.category

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.images[self.chosen[indices]].float() / 255, self.labels[indices]

    def subset(self, indices: np.ndarray) -> Self:
        return type(self)(self.images, self.chosen[indices], self.metadata.at(indices))


class StereoData(ImageData):
    """Base of the sets of toys seen by two cameras, over a grid of elevations, azimuths and lightings.

    A subclass implements `read`. An image has two channels, what the left and what the right camera sees.
    `metadata(stage)` says of every pair which toy it shows, and how. To test on poses that were not trained on, choose
    some for the training and others for the test; the instances are other ones anyway. Numbers are those of
    `Metadata`, None stands for all.

    `shift` moves both images of a pair together, and what moves in is the edge, repeated. `val_size` holds out images
    at random: they show the toys that are trained on, so that scores on them are higher than in the test.
    `val_instances` holds out all images of some toys, which are then unseen, as those of the test are.

    Args:
        train_elevations, test_elevations: from 0, 1, ..., 8.
        train_azimuths, test_azimuths: from 0, 2, ..., 34.
        train_lightings, test_lightings: from 0, 1, ..., 5.
        val_instances: some of 4, 6, 7, 8 and 9, held out of every class in place of `val_size`; None stands for none.
        options: see `ImageData`.

    Raises:
        ValueError: an argument is out of range.
    """

    classes = 5
    padding = "replicate"

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
            those = _spelled(TRAINING_INSTANCES)
            raise ValueError(f"val_instances must be some of {those}, but not all of them, got {val_instances}")
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
        """The elevations, azimuths and lightings of the training or the test set."""
        if train:
            return self.train_elevations, self.train_azimuths, self.train_lightings
        return self.test_elevations, self.test_azimuths, self.test_lightings

    def metadata(self, stage: str) -> Metadata:
        """Of the pairs of "fit", "validate" or "test", in the order of that set; after `setup`."""
        pairs = self._loaded(stage)
        assert isinstance(pairs, StereoSet)
        return pairs.metadata

    @property
    def _validates(self) -> bool:
        return bool(self.val_instances) or super()._validates

    def _split(self, images: LabelledSet) -> Sequence[np.ndarray]:
        if not self.val_instances:
            return super()._split(images)
        assert isinstance(images, StereoSet)
        held_out = np.isin(images.metadata.instance, self.val_instances)
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        """Images (n, 2, h, w) uint8 that may be memory-mapped, of all poses that `grid` gives or of more."""
        raise NotImplementedError

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        pairs = self._images(train)
        return pairs.images[pairs.chosen], pairs.labels

    def _images(self, train: bool) -> StereoSet:
        images, metadata = self.read(train)
        chosen = torch.ones(len(images), dtype=torch.bool)
        columns = metadata.elevation, metadata.azimuth, metadata.lighting
        for column, wanted in zip(columns, self.grid(train), strict=True):
            chosen &= torch.isin(column, torch.tensor(wanted))
        indices = chosen.nonzero().squeeze(1)
        return StereoSet(images, indices, metadata.at(indices))


def _chosen(name: str, wanted: list[int] | None, those: range) -> list[int]:
    if wanted is None:
        return list(those)
    if not wanted or not set(wanted) <= set(those):
        raise ValueError(f"{name} must be some of {_spelled(those)}, or None for all, got {wanted}")
    return sorted(set(wanted))


def _spelled(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def read_norb(path: str | os.PathLike[str]) -> Tensor:
    """Read a matrix in the format of NORB, gzipped if the file's name ends in .gz.

    The format, of little-endian 32-bit integers: a magic number, 0x1E3D4C55 for unsigned bytes or 0x1E3D4C54 for
    32-bit integers; the number of dimensions; their sizes, at least three numbers, of which those beyond the number of
    dimensions say nothing; then the elements, last dimension fastest.

    Returns:
        A uint8 or int32 tensor of the shape that the header gives. Bytes that are not gzipped are memory-mapped:
        writing to them does not change the file.

    Raises:
        DataError: the file cannot be read, or it is not exactly this.
    """
    path = Path(path)
    zipped = path.suffix == ".gz"
    try:
        with gzip.open(path) if zipped else path.open("rb") as file:
            is_bytes, sizes, start = _read_header(path, file)  # type: ignore[arg-type]  # GzipFile reads like any
            mapped = is_bytes and not zipped
            data = b"" if mapped else file.read()
        found = path.stat().st_size - start if mapped else len(data)
        expected = math.prod(sizes) * (1 if is_bytes else 4)
        if found != expected:
            raise DataError(f"{path}: the header says shape {sizes}, {expected} bytes, but {found} follow")
        if mapped:
            return torch.from_numpy(np.memmap(path, np.uint8, mode="c", offset=start, shape=sizes))
    except EOFError:
        raise DataError(f"{path}: truncated gzip, the file ends too early") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if is_bytes:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(sizes)
    return torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int32).reshape(sizes))


def _read_header(path: Path, file: IO[bytes]) -> tuple[bool, tuple[int, ...], int]:
    """Whether the elements are bytes, the shape, and where the elements begin."""
    raw = file.read(8)
    if len(raw) < 8:
        raise DataError(f"{path}: the header needs 20 bytes, the file has {len(raw)}")
    magic, dimensions = struct.unpack("<2I", raw)
    if magic not in (BYTES, INTEGERS):
        raise DataError(
            f"{path}: wrong magic 0x{magic:08x}, expected 0x{BYTES:08x} (bytes) or 0x{INTEGERS:08x} (integers)"
        )
    if not 1 <= dimensions <= 8:
        raise DataError(f"{path}: the header says {dimensions} dimensions, expected 1 to 8")
    length = 4 * max(3, dimensions)
    raw = file.read(length)
    if len(raw) < length:
        raise DataError(f"{path}: the header needs {8 + length} bytes, the file has {8 + len(raw)}")
    sizes = struct.unpack_from(f"<{dimensions}i", raw)
    if min(sizes) < 1:
        raise DataError(f"{path}: the header says shape {sizes}, expected sizes of 1 and more")
    return magic == BYTES, sizes, 8 + length


class SmallNORB(StereoData):
    """smallNORB: 24,300 training and 24,300 test stereo pairs of toys, 96 x 96 in grey, 5 classes.

    Source: Y. LeCun, F. J. Huang and L. Bottou, Learning Methods for Generic Object Recognition with Invariance to
    Pose and Lighting, CVPR 2004; https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/. Ten toys of each class, five for
    training (instances 4, 6, 7, 8 and 9) and five for the test, at 9 elevations and 18 azimuths, in 6 lightings.

    Each of the six files is taken from `<root>/smallnorb`, there as `<name>.mat` if possible, which is memory-mapped,
    else as `<name>.mat.gz`, which takes 448 MB of memory, while being loaded twice that; where neither is there, the
    latter from pooch's cache, into which it is downloaded and checked against its published md5. A local file that is
    well-formed but has another md5 is used, with a warning; one that is corrupt is an error, never silently replaced.

    Hinton et al. 2018 (Matrix Capsules with EM Routing) reduce images to 48 x 48 and train on crops of 32 x 32:
    size=32, resize=48. Heinsen 2019 trains on whole images: shift=16.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        size: of the images that `augment`, `centre` and `crops` give. Less than 96 are crops of the images that
            loaders give, as these are or as `resize` makes them.
        resize: see `ImageData`; here images may become smaller, too.
        options: see `StereoData` and `ImageData`.

    Raises:
        ValueError: an argument is out of range.
        DataError: a file is corrupt or cannot be had; one line that says which file, what is wrong, the md5
            it should have and what to do.
    """

    address = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
    # Of a name.mat.gz, and of the name.mat in it.
    md5: ClassVar[dict[str, tuple[str, str]]] = {
        "smallnorb-5x46789x9x18x6x2x96x96-training-dat": (
            "66054832f9accfe74a0f4c36a75bc0a2",
            "8138a0902307b32dfa0025a36dfa45ec",
        ),
        "smallnorb-5x46789x9x18x6x2x96x96-training-cat": (
            "23c8b86101fbf0904a000b43d3ed2fd9",
            "fd5120d3f770ad57ebe620eb61a0b633",
        ),
        "smallnorb-5x46789x9x18x6x2x96x96-training-info": (
            "51dee1210a742582ff607dfd94e332e3",
            "19faee774120001fc7e17980d6960451",
        ),
        "smallnorb-5x01235x9x18x6x2x96x96-testing-dat": (
            "e4ad715691ed5a3a5f138751a4ceb071",
            "e9920b7f7b2869a8f1a12e945b2c166c",
        ),
        "smallnorb-5x01235x9x18x6x2x96x96-testing-cat": (
            "5aa791cd7e6016cf957ce9bdb93b8603",
            "fd5120d3f770ad57ebe620eb61a0b633",
        ),
        "smallnorb-5x01235x9x18x6x2x96x96-testing-info": (
            "a9454f3864d7fd4bb3ea7fc3eb84924e",
            "7c5b871cc69dcadec1bf6a18141f5edc",
        ),
    }

    def __init__(self, root: str | None = None, size: int = SIDE, resize: int | None = None, **options: Any) -> None:
        if not 1 <= size <= SIDE:
            raise ValueError(f"size must be from 1 to {SIDE} pixels, got {size}")
        if resize is None and size < SIDE:
            resize = SIDE
        self.shape = (2, size, size)
        super().__init__(resize=resize, **options)
        self.root = root

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine, so that the others do not all download.
        for name in self.md5:
            self._find(name)

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        part = "5x46789x9x18x6x2x96x96-training" if train else "5x01235x9x18x6x2x96x96-testing"
        images, images_path = self._read(f"smallnorb-{part}-dat", torch.uint8, (2, SIDE, SIDE))
        numbers = {
            "category": range(self.classes),
            "instance": TRAINING_INSTANCES if train else TEST_INSTANCES,
            "elevation": ELEVATIONS,
            "azimuth": AZIMUTHS,
            "lighting": LIGHTINGS,
        }
        columns = []
        for kind, names, shape in (("cat", ["category"], ()), ("info", Metadata._fields[1:], (4,))):
            name = f"smallnorb-{part}-{kind}"
            values, path = self._read(name, torch.int32, shape)
            if len(values) != len(images):
                raise self._corrupt(path, name, f"is of {len(values)} pairs, but {images_path} of {len(images)}")
            for column, found in zip(names, values.long().view(len(values), -1).unbind(1), strict=True):
                bad = found[~torch.isin(found, torch.tensor(numbers[column]))]
                if len(bad):
                    problem = f"holds {column} {int(bad[0])}, expected {_spelled(numbers[column])}"
                    raise self._corrupt(path, name, problem)
                columns.append(found)
        return images, Metadata(*columns)

    def _read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Path]:
        """The matrix (n, *shape) of one file, and where the file is."""
        file, path = self._find(name)
        try:
            values = read_norb(path)
        except DataError as error:
            raise file.corrupt(path, str(error).removeprefix(f"{path}: ")) from None
        if values.dtype != dtype or values.shape[1:] != shape:
            expected = f"({', '.join(['n', *map(str, shape)])}{',' if not shape else ''}) of {dtype}"
            raise file.corrupt(path, f"holds shape {tuple(values.shape)} of {values.dtype}, expected {expected}")
        file.warn_of_other_hash(path)
        return values, path

    def _find(self, name: str) -> tuple[CanonicalFile, Path]:
        zipped_md5, plain_md5 = self.md5[name]
        plain = CanonicalFile("smallnorb", f"{name}.mat", plain_md5)
        place = plain.place(self.root)
        if place is not None and place.exists():
            return plain, place
        zipped = CanonicalFile("smallnorb", f"{name}.mat.gz", zipped_md5, (f"{self.address}{name}.mat.gz",))
        return zipped, zipped.find(self.root)

    def _corrupt(self, path: Path, name: str, problem: str) -> DataError:
        return self._find(name)[0].corrupt(path, problem)
