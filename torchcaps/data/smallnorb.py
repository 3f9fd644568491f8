"""smallNORB, read from its six original files."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile
from torchcaps.data.published import Published, checked_images, checked_labels
from torchcaps.data.stereo import Metadata, StereoData
from torchcaps.utils.arguments import Count, Range, checked

SIDE = 96  # pixels
TRAIN, TEST = "smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing"
# Of the elements, by the magic number of the file format.
TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}


def read_norb(path: Path) -> Tensor:
    """Read a matrix in the format of NORB. A file whose name ends in .gz is unzipped.

    The header consists of little-endian 32-bit integers: a magic number, 0x1E3D4C55 for unsigned bytes or 0x1E3D4C54
    for 32-bit integers; the number of dimensions; and their sizes. There are always at least three sizes; those beyond
    the number of dimensions have no meaning. The elements follow, last dimension fastest.

    Returns:
        A uint8 or int32 tensor of the shape in the header. Bytes from a file without gzip are memory-mapped: writing to
        the tensor does not change the file.
    """
    zipped = path.suffix == ".gz"
    with gzip.open(path) if zipped else path.open("rb") as file:
        magic, dimensions = np.frombuffer(file.read(8), "<u4").tolist()
        sizes = tuple(np.frombuffer(file.read(4 * max(3, dimensions)), "<u4").tolist()[:dimensions])
        dtype = TYPES[magic]
        if dtype == np.uint8 and not zipped:
            return torch.from_numpy(np.memmap(path, dtype, "c", offset=file.tell()).reshape(sizes))
        values = np.frombuffer(bytearray(file.read()), dtype).reshape(sizes)
    return torch.from_numpy(values.astype(dtype.newbyteorder("="), copy=False))


class SmallNORB(Published, StereoData):
    """smallNORB: 24,300 training and 24,300 test stereo pairs of toys, 96 x 96, gray, 5 classes.

    Source: Y. LeCun, F. J. Huang and L. Bottou, Learning Methods for Generic Object Recognition with Invariance to
    Pose and Lighting, CVPR 2004; https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/. Ten toys of each class, five for
    training (instances 4, 6, 7, 8 and 9) and five for the test, at 9 elevations and 18 azimuths, in 6 lightings.

    Each of the six files is read from `<root>/smallnorb`: `<name>.mat` if it exists, which is memory-mapped, or else
    `<name>.mat.gz`, which is what is downloaded; the large ones take 448 MB of memory, and twice that while loading.

    Hinton et al. 2018 (Matrix Capsules with EM Routing) reduce images to 48 x 48 and train on crops of 32 x 32:
    size=32, resize=48. Heinsen 2019 trains on whole images: shift=16.

    Args:
        root: see `Published`.
        size: side in pixels of the images that `augment`, `center` and `crops` return. Below 96 they are crops of the
            loaders' images, after `resize` if it is given.
        resize: see `ImageData`. Here it may also reduce images.
        options: see `Published`, `StereoData` and `ImageData`.

    Raises:
        ValueError: an argument is out of range.
        DataError: see `Published`.
    """

    stored_shape = (2, SIDE, SIDE)
    address = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
    # md5 of name.mat.gz, and of the name.mat in it.
    md5: ClassVar[dict[str, tuple[str, str]]] = {
        f"{TRAIN}-dat": ("66054832f9accfe74a0f4c36a75bc0a2", "8138a0902307b32dfa0025a36dfa45ec"),
        f"{TRAIN}-cat": ("23c8b86101fbf0904a000b43d3ed2fd9", "fd5120d3f770ad57ebe620eb61a0b633"),
        f"{TRAIN}-info": ("51dee1210a742582ff607dfd94e332e3", "19faee774120001fc7e17980d6960451"),
        f"{TEST}-dat": ("e4ad715691ed5a3a5f138751a4ceb071", "e9920b7f7b2869a8f1a12e945b2c166c"),
        f"{TEST}-cat": ("5aa791cd7e6016cf957ce9bdb93b8603", "fd5120d3f770ad57ebe620eb61a0b633"),
        f"{TEST}-info": ("a9454f3864d7fd4bb3ea7fc3eb84924e", "7c5b871cc69dcadec1bf6a18141f5edc"),
    }

    @checked
    def __init__(
        self,
        root: str | None = None,
        size: Annotated[int, Range(1, SIDE)] = SIDE,
        resize: Count | None = None,
        **options: Any,
    ) -> None:
        if resize is None and size < SIDE:
            resize = SIDE
        self.shape = (2, size, size)
        super().__init__(root, resize=resize, **options)

    def files(self) -> Iterable[CanonicalFile]:
        return map(self._file, self.md5)

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        images, categories, info = (self._file(f"{TRAIN if train else TEST}-{kind}") for kind in ("dat", "cat", "info"))
        pairs = self.read_file(images, lambda path: checked_images(read_norb(path), self.stored_shape))
        labels = self.read_file(categories, lambda path: checked_labels(read_norb(path), len(pairs), self.classes))
        poses = self.read_file(info, lambda path: read_norb(path).long().view(len(pairs), 4))
        return pairs, Metadata(labels, *poses.unbind(1))

    def _file(self, name: str) -> CanonicalFile:
        """Return the file that is not zipped if the user has it, or else the zipped one."""
        zipped_md5, plain_md5 = self.md5[name]
        plain = CanonicalFile("smallnorb", f"{name}.mat", plain_md5)
        place = plain.place(self.root)
        if place is not None and place.exists():
            return plain
        return CanonicalFile("smallnorb", f"{name}.mat.gz", zipped_md5, (f"{self.address}{name}.mat.gz",))
