"""MNIST on a larger canvas: digits that move, and digits that are stretched, slanted and turned as well."""

import io
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from torchcaps.data.files import DataError, own_folder
from torchcaps.data.images import ImageSet
from torchcaps.data.labelled import LabelledSet
from torchcaps.data.matfile import check_images, check_labels, read_mat
from torchcaps.data.mnist import MNIST
from torchcaps.data.streams import draws, splitmix64

SIZE = 40
MARGIN = (SIZE - 28) // 2
CANVAS = 56  # no affine transformation below brings anything of 28 x 28 pixels further than 25.6 from the centre

# Streams of random numbers that no seed changes. MultiMNIST has 0 to 2.
VALIDATE, TEST, AFFINE = 3, 4, 5

# affNIST's test set, as one file or in batches; each can be in a zip of the same name and ".zip".
ADDRESS = "http://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/"
TEST_FILES = {"test.mat": ["test.mat"], "test_batches": [f"{k}.mat" for k in range(1, 33)]}


def _draws(stream: int, count: int) -> Tensor:
    """The random numbers of the images 0 to count - 1."""
    return draws(int(splitmix64(0, torch.tensor(stream))), torch.arange(count))


def _windows(images: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Of each image (n, 1, h, w) the SIZE x SIZE pixels from its own row `top` and column `left` on.

    Beyond an edge the image begins anew at the other one.
    """
    window = torch.arange(SIZE)
    rows, columns = (top[:, None] + window) % images.shape[2], (left[:, None] + window) % images.shape[3]
    return images[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None]].unsqueeze(1)


def _moved(images: Tensor, stream: int) -> Tensor:
    """Digits at the centre of (n, 1, SIZE, SIZE), each at a place of its own."""
    down, right = (_draws(stream, len(images))[:, :2] % (2 * MARGIN + 1) - MARGIN).unbind(1)
    return _windows(images, -down, -right)


def affine_maps(count: int) -> Tensor:
    """For the images 0 to count - 1, where a point of the digit goes: (count, 2, 2) float64, see `AffineMNIST`."""
    rotation, shear, vertical, horizontal = (_draws(AFFINE, count)[:, :4].double() / 2**52 - 1).unbind(1)  # -1 to 1
    rotation, shear = torch.deg2rad(20 * rotation), 0.2 * shear
    vertical, horizontal = 1 + 0.2 * vertical, 1 + 0.2 * horizontal
    cos, sin, zero, one = rotation.cos(), rotation.sin(), torch.zeros(count), torch.ones(count)
    turn = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    slant = torch.stack([one, shear, zero, one], 1).view(-1, 2, 2)
    return turn @ slant @ torch.diag_embed(torch.stack([horizontal, vertical], 1))


def transform(digits: Tensor, maps: Tensor) -> Tensor:
    """Digits (n, 1, 28, 28) uint8 on a canvas where nothing of them is lost: (n, 1, CANVAS, CANVAS) uint8.

    Bilinear, about the centre. In float64, so that no grey level hangs on how a machine rounds.
    """
    # A pixel's value comes from the point that goes there. Both images reach from -1 to 1.
    back = pad(torch.linalg.inv(maps) * (CANVAS / digits.shape[2]), (0, 1))
    grid = affine_grid(back, [len(digits), 1, CANVAS, CANVAS], align_corners=False)
    return grid_sample(digits.double(), grid, align_corners=False).round().byte()


def _scattered(canvases: Tensor) -> Tensor:
    """Of each image (n, 1, CANVAS, CANVAS) a window in which its ink is somewhere, but all of it."""
    starts = []
    for axis, draw in zip((3, 2), _draws(AFFINE, len(canvases))[:, 4:6].unbind(1), strict=True):
        inked = canvases.any(axis).squeeze(1).byte()
        first, last = inked.argmax(1), CANVAS - 1 - inked.flip(1).argmax(1)
        free = SIZE - (last - first + 1)
        starts.append(first - torch.where(free < 0, free // 2, draw % (free.clamp(min=0) + 1)))
    return _windows(canvases, *starts)


class ExpandedMNIST(MNIST):
    """Expanded MNIST: each digit of MNIST at a random place on a black background of 40 x 40.

    Source: S. Sabour, N. Frosst and G. E. Hinton, Dynamic Routing Between Capsules, NeurIPS 2017, section 5.2,
    where it is what networks train on that are tested on affNIST.

    The 28 x 28 image lies anywhere on the background, uniformly. A training image is at another place every
    time: it is kept at the centre, and `augment` shifts it by up to 6 pixels each way. Validation and test
    images each have a place that never changes.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA. The files are MNIST's.
        options: see `ImageData`; all but `shift`.

    Raises:
        DataError: as of `MNIST`.
    """

    shape = (1, SIZE, SIZE)

    def __init__(self, root: str | None = None, **options: Any) -> None:
        super().__init__(root, shift=MARGIN, **options)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        digits, labels = super().load(train)
        return self._centred(digits) if train else self._for_test(digits), labels

    def _for_validation(self, images: LabelledSet) -> ImageSet:
        assert isinstance(images, ImageSet)
        return ImageSet(_moved(images.images, VALIDATE), images.labels)

    def _for_test(self, digits: Tensor) -> Tensor:
        """The test images made of the test digits (n, 1, 28, 28) uint8."""
        return _moved(self._centred(digits), TEST)

    def _centred(self, digits: Tensor) -> Tensor:
        return pad(digits, (MARGIN,) * 4)


class AffineMNIST(ExpandedMNIST):
    """Trained and validated as `ExpandedMNIST`; tested on MNIST's test digits under random affine transformations.

    This is not affNIST: it has that set's ranges, but its own draws, its own interpolation, and one image of each
    test digit where affNIST has 32. An accuracy on one is not to be taken for one on the other.
    Source of the ranges: T. Tieleman, affNIST, http://www.cs.toronto.edu/~tijmen/affNIST/.

    A point of the digit x to the right of the image's centre and y below it goes to

        rotation @ [[1, shear], [0, 1]] @ [[horizontal, 0], [0, vertical]] @ (x, y)

    which is to say that the digit is scaled, then sheared, then rotated, with

        horizontal, vertical: uniform over 0.8..1.2, each on its own
        shear: uniform over -0.2..0.2; above 0 the foot of the digit moves right and its head left
        rotation: [[cos, -sin], [sin, cos]] of an angle uniform over -20..20 degrees; clockwise above 0

    The result is moved by whole pixels, uniformly over all places at which everything that is not black lies
    within 40 x 40. What is higher or wider than that, as no digit of MNIST is, is centred and cut.
    Test image k depends on the digit and on k alone.

    Arguments are those of `ExpandedMNIST`.
    """

    def _for_test(self, digits: Tensor) -> Tensor:
        maps = affine_maps(len(digits))
        canvases = digits.new_empty(len(digits), 1, CANVAS, CANVAS)
        for start in range(0, len(digits), 1000):  # not all at once: in between, an image takes 100 KB
            part = slice(start, start + 1000)
            canvases[part] = transform(digits[part], maps[part])
        return _scattered(canvases)


class AffNIST(ExpandedMNIST):
    """Trained and validated as `ExpandedMNIST`; tested on affNIST, 320,000 images, 32 of each of MNIST's test digits.

    Source: T. Tieleman, affNIST, http://www.cs.toronto.edu/~tijmen/affNIST/; the transformed test set.

    It is read from `<root>/affnist`, from what is there first of `test.mat`, `test.mat.zip`, the folder
    `test_batches` with `1.mat` to `32.mat`, and `test_batches.zip`. It has no published hash, so that it is not
    downloaded.

    Arguments are those of `ExpandedMNIST`.

    Raises:
        DataError: as of `MNIST`; or the test set is not there, or corrupt.
    """

    def prepare_data(self) -> None:
        super().prepare_data()
        self._find()  # better now than after the training

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        if train:
            return super().load(train)
        place, names = self._find()
        images, labels = zip(*(_read(place, name) for name in names), strict=True)
        return torch.cat(images), torch.cat(labels)

    def _find(self) -> tuple[Path, list[str]]:
        folder = own_folder(self.root, "affnist")
        if folder:
            for name, names in TEST_FILES.items():
                for place in (folder / name, folder / f"{name}.zip"):
                    if place.exists():
                        return place, names
        here = f"{folder}" if folder else "DIR/affnist and set TORCHCAPS_DATA=DIR"
        raise DataError(f"no test set of affNIST: put {ADDRESS}test.mat.zip or {ADDRESS}test_batches.zip at {here}")


def _read(place: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images (n, 1, SIZE, SIZE) uint8 and labels (n,) of one file of the test set."""
    try:
        with _open(place, name) as file:
            images, labels = read_mat(file, "affNISTdata.image", "affNISTdata.label_int")
        check_images(images, "image", (SIZE * SIZE,))  # a column each, row by row
        classes = check_labels(labels, "label_int", images.shape[1], range(10))
    except (OSError, DataError) as error:
        problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        where = place if place.suffix == ".mat" else place / name
        raise DataError(f"{where}: {problem}: replace the file by that from {ADDRESS}") from None
    return torch.from_numpy(images.T.reshape(-1, 1, SIZE, SIZE)), classes


def _open(place: Path, name: str) -> IO[bytes]:
    if place.suffix != ".zip":
        return open(place / name if place.is_dir() else place, "rb")
    try:
        with zipfile.ZipFile(place) as archive:
            for member in archive.namelist():
                if member.rpartition("/")[2] == name:
                    return io.BytesIO(archive.read(member))
    except Exception as error:  # zipfile raises whatever the bad bytes lead to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"truncated, or not a zip file ({reason})") from None
    raise DataError("is not in the archive")
