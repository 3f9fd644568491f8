"""smallNORB, read from its six original files."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile, DataError
from torchcaps.data.stereo import (
    AZIMUTHS,
    ELEVATIONS,
    LIGHTINGS,
    TEST_INSTANCES,
    TRAINING_INSTANCES,
    Metadata,
    StereoData,
    spelled,
)
from torchcaps.utils.arguments import Count, checked

SIDE = 96  # pixels
BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54  # magic numbers of the file format


@checked
def read_norb(path: str | os.PathLike[str]) -> Tensor:
    """Read a matrix in the format of NORB. A file whose name ends in .gz is unzipped.

    The header consists of little-endian 32-bit integers: a magic number, 0x1E3D4C55 for unsigned bytes or 0x1E3D4C54
    for 32-bit integers; the number of dimensions; and their sizes. There are always at least three sizes; those beyond
    the number of dimensions have no meaning. The elements follow, last dimension fastest.

    Returns:
        A uint8 or int32 tensor of the shape in the header. Bytes from a file without gzip are memory-mapped: writing to
        the tensor does not change the file.

    Raises:
        DataError: the file cannot be read or does not have this format.
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
    """Return whether the elements are bytes, the shape, and the offset of the first element."""
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
    """smallNORB: 24,300 training and 24,300 test stereo pairs of toys, 96 x 96, gray, 5 classes.

    Source: Y. LeCun, F. J. Huang and L. Bottou, Learning Methods for Generic Object Recognition with Invariance to
    Pose and Lighting, CVPR 2004; https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/. Ten toys of each class, five for
    training (instances 4, 6, 7, 8 and 9) and five for the test, at 9 elevations and 18 azimuths, in 6 lightings.

    Each of the six files is read from `<root>/smallnorb`: `<name>.mat` if it exists, which is memory-mapped, or else
    `<name>.mat.gz`; the large ones take 448 MB of memory, and twice that while loading. Missing files are downloaded
    once into pooch's cache, as `.mat.gz`, and checked against their published md5. A well-formed local file with
    another md5 is used, with a warning. A corrupt one is an error and is never replaced.

    Hinton et al. 2018 (Matrix Capsules with EM Routing) reduce images to 48 x 48 and train on crops of 32 x 32:
    size=32, resize=48. Heinsen 2019 trains on whole images: shift=16.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        size: side in pixels of the images that `augment`, `center` and `crops` return. Below 96 they are crops of the
            loaders' images, after `resize` if it is given.
        resize: see `ImageData`. Here it may also reduce images.
        options: see `StereoData` and `ImageData`.

    Raises:
        ValueError: an argument is out of range.
        DataError: a file is corrupt or cannot be downloaded. The one line says which file, what is wrong, the md5 it
            should have, and what to do.
    """

    stored_shape = (2, SIDE, SIDE)
    address = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
    # md5 of name.mat.gz, and of the name.mat in it.
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

    @checked
    def __init__(
        self, root: str | None = None, size: Count = SIDE, resize: Count | None = None, **options: Any
    ) -> None:
        if not 1 <= size <= SIDE:
            raise ValueError(f"size must be from 1 to {SIDE} pixels, got {size}")
        if resize is None and size < SIDE:
            resize = SIDE
        self.shape = (2, size, size)
        super().__init__(resize=resize, **options)
        self.root = root

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine: the others wait instead of downloading too.
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
                raise self._corrupt(path, name, f"has {len(values)} pairs, but {images_path} has {len(images)}")
            for column, found in zip(names, values.long().view(len(values), -1).unbind(1), strict=True):
                bad = found[~torch.isin(found, torch.tensor(numbers[column]))]
                if len(bad):
                    problem = f"holds {column} {int(bad[0])}, expected {spelled(numbers[column])}"
                    raise self._corrupt(path, name, problem)
                columns.append(found)
        return images, Metadata(*columns)

    def _read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Path]:
        """Return the matrix (n, *shape) of one file, and the file's path."""
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
