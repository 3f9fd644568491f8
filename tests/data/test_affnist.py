"""Expanded MNIST and Affine MNIST against plain loops: places and transformations of the digits; affNIST's file."""

import io
import math
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded import loaded
from scipy.io import savemat
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.data import MNIST, AffineMNIST, AffNIST, DataError, ExpandedMNIST, affine_mnist
from torchcaps.data.streams import splitmix64

pytestmark = pytest.mark.usefixtures("no_network")

real_mnist = pytest.mark.parametrize("real", ["mnist"], indirect=True)


class Noise(MNIST):
    """Replace MNIST's digits by noise without a black pixel, 200 for training and 150 for the test."""

    def prepare_data(self) -> None:
        pass

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        count = 200 if train else 150
        generator = torch.Generator().manual_seed(count)
        images = torch.randint(1, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return images, torch.arange(count) % 10


class Expanded(ExpandedMNIST, Noise):
    pass


class Affine(AffineMNIST, Noise):
    pass


def drawn(stream: int, image: int, draw: int) -> int:
    """Random number of an image as documented: 53 bits of the output number 8 * image + draw of the stream."""
    seed = int(splitmix64(0, torch.tensor(stream)))
    return int(splitmix64(seed, torch.tensor(8 * image + draw))) >> 11 & 2**53 - 1


def places(images: Tensor) -> list[tuple[int, int]]:
    """Top left corner of the 28 x 28 pixels that are not black. Fails unless they are a full square."""
    inked = images.squeeze(1) > 0
    found = []
    for image in inked:
        rows, columns = image.any(1).nonzero().flatten().tolist(), image.any(0).nonzero().flatten().tolist()
        assert len(rows) == len(columns) == 28
        assert image.sum() == 28 * 28
        found.append((rows[0], columns[0]))
    return found


# Expanded MNIST


def test_test_images_are_the_digits_at_their_places() -> None:
    digits, labels = Noise().load(train=False)
    images, found = Expanded().load(train=False)
    assert images.shape == (150, *ExpandedMNIST.shape) == (150, 1, 40, 40)
    assert images.dtype == torch.uint8
    assert torch.equal(found, labels)
    for k, (down, right) in enumerate(places(images)):
        assert (down, right) == (drawn(4, k, 0) % 13, drawn(4, k, 1) % 13)
        assert torch.equal(images[k, 0, down : down + 28, right : right + 28], digits[k, 0])


def test_validation_images_are_the_digits_held_out_at_their_places() -> None:
    plain, data = Noise(val_size=100), Expanded(val_size=100)
    plain.setup("fit")
    data.setup("fit")
    assert torch.equal(data.val_set.labels, plain.val_set.labels)
    for k, (down, right) in enumerate(places(data.val_set.images)):
        assert (down, right) == (drawn(3, k, 0) % 13, drawn(3, k, 1) % 13)
        assert torch.equal(data.val_set.images[k, 0, down : down + 28, right : right + 28], plain.val_set.images[k, 0])
    assert torch.equal(data.train_set.images, pad(plain.train_set.images, (6, 6, 6, 6)))
    assert torch.equal(data.train_set.labels, plain.train_set.labels)


def chi_square(counts: list[int]) -> float:
    """Deviations of counts from those of equal probabilities, in standard deviations."""
    expected, freedom = sum(counts) / len(counts), len(counts) - 1
    return (sum((count - expected) ** 2 / expected for count in counts) - freedom) / (2 * freedom) ** 0.5


def test_training_images_are_anywhere() -> None:
    data = loaded(Expanded)
    digits = Noise().load(train=True)[0].float() / 255
    images = torch.cat([data.augment(data.part("fit").__getitems__(list(range(200)))[0]) for _ in range(20)])
    found = places(images)
    assert all(
        torch.equal(images[k, 0, down : down + 28, right : right + 28], digits[k % 200, 0])
        for k, (down, right) in enumerate(found)
    )
    counts = Counter(found)
    assert set(counts) == {(down, right) for down in range(13) for right in range(13)}
    assert abs(chi_square(list(counts.values()))) < 4
    assert found[:200] != found[200:400]  # a new place every time


# The transformed images


def by_hand(image: int) -> tuple[float, float, float, float]:
    """Angle in radians, shear, vertical and horizontal scale of an image, computed as documented."""
    rotation, shear, vertical, horizontal = (drawn(5, image, draw) / 2**52 - 1 for draw in range(4))
    return math.radians(20 * rotation), 0.2 * shear, 1 + 0.2 * vertical, 1 + 0.2 * horizontal


def slowly(digit: np.ndarray, image: int, size: int) -> np.ndarray:
    """A digit transformed by an image's map onto a canvas, computed pixel by pixel."""
    angle, shear, vertical, horizontal = by_hand(image)
    canvas = np.zeros((size, size), np.uint8)
    for row in range(size):
        for column in range(size):
            # The inverse: rotate, shear and scale back, in the opposite order.
            x, y = column + 0.5 - size / 2, row + 0.5 - size / 2
            x, y = math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x
            x, y = (x - shear * y) / horizontal, y / vertical
            across, down = x + 13.5, y + 13.5
            left, top = math.floor(across), math.floor(down)
            value = 0.0
            for i in (top, top + 1):
                for j in (left, left + 1):
                    if 0 <= i < 28 and 0 <= j < 28:
                        value += (1 - abs(down - i)) * (1 - abs(across - j)) * int(digit[i, j])
            canvas[row, column] = round(value)
    return canvas


def box(image: Tensor) -> tuple[int, int, int, int]:
    """First row and column with ink, and the numbers of rows and columns from there to the last ones."""
    rows, columns = image.any(1).nonzero().flatten(), image.any(0).nonzero().flatten()
    top, left = int(rows[0]), int(columns[0])
    return top, left, int(rows[-1]) + 1 - top, int(columns[-1]) + 1 - left


def blots(count: int) -> Tensor:
    """Digits of noise in the central 20 x 20 pixels, as in MNIST, with ragged borders."""
    generator = torch.Generator().manual_seed(count)
    digits = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
    digits[..., 4:24, 4:24] = torch.randint(256, (count, 1, 20, 20), dtype=torch.uint8, generator=generator)
    return digits * (torch.rand(count, 1, 28, 28, generator=generator) < 0.3)


def test_images_against_plain_loops() -> None:
    digits = blots(8)
    canvases = affine_mnist.transform(digits, affine_mnist.affine_maps(8))
    images = Affine()._for_test(digits)
    assert canvases.shape == (8, 1, 56, 56)
    assert images.shape == (8, *AffineMNIST.shape)
    assert images.dtype == canvases.dtype == torch.uint8
    for k in range(8):
        expected = torch.from_numpy(slowly(digits[k, 0].numpy(), k, 56))
        assert torch.equal(canvases[k, 0], expected)
        top, left, height, width = box(expected)
        place = drawn(5, k, 4) % (41 - height), drawn(5, k, 5) % (41 - width)
        assert box(images[k, 0]) == (*place, height, width)
        cut = images[k, 0, place[0] : place[0] + height, place[1] : place[1] + width]
        assert torch.equal(cut, expected[top : top + height, left : left + width])


def extremes() -> Tensor:
    """The sixteen maps with each number at an end of its range."""
    maps = []
    for angle in (math.radians(-20), math.radians(20)):
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        for shear in (-0.2, 0.2):
            for horizontal in (0.8, 1.2):
                for vertical in (0.8, 1.2):
                    maps.append(turn @ torch.tensor([[1, shear], [0, 1]]) @ torch.tensor([horizontal, vertical]).diag())
    return torch.stack(maps).double()


def test_the_canvas_is_large_enough_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    white = torch.full((16, 1, 28, 28), 255, dtype=torch.uint8)
    canvases = affine_mnist.transform(white, extremes())
    assert not canvases[..., [0, -1], :].any()
    assert not canvases[..., :, [0, -1]].any()
    monkeypatch.setattr(affine_mnist, "CANVAS", 100)
    assert torch.equal(affine_mnist.transform(white, extremes()), pad(canvases, (22,) * 4))


def test_what_is_too_large_is_centered_and_cut() -> None:
    white = torch.full((300, 1, 28, 28), 255, dtype=torch.uint8)
    canvases = affine_mnist.transform(white, affine_mnist.affine_maps(300))
    images = Affine()._for_test(white)
    seen = set()
    for k, (canvas, image) in enumerate(zip(canvases[:, 0], images[:, 0], strict=True)):
        top, left, height, width = box(canvas)
        starts = []
        for draw, first, size in ((4, top, height), (5, left, width)):
            # Cut equally at both ends, up to one pixel.
            starts.append(first + math.ceil((size - 40) / 2) if size > 40 else first - drawn(5, k, draw) % (41 - size))
        down, right = starts
        assert torch.equal(image, pad(canvas, (40,) * 4)[down + 40 : down + 80, right + 40 : right + 80])
        seen.add((height > 40, width > 40))
    assert seen == {(False, False), (True, False), (False, True), (True, True)}


def test_black_and_no_images() -> None:
    digits = blots(5)
    expected = Affine()._for_test(digits)
    digits[2] = 0
    images = Affine()._for_test(digits)
    assert not images[2].any()
    for k in (0, 1, 3, 4):
        assert torch.equal(images[k], expected[k])
    assert Affine()._for_test(digits[:0]).shape == (0, 1, 40, 40)


def test_an_image_depends_on_its_digit_and_number_alone() -> None:
    digits = blots(1300)  # two parts, the second incomplete
    images = Affine()._for_test(digits)
    assert torch.equal(Affine()._for_test(digits[:1001]), images[:1001])
    alone = affine_mnist.transform(digits[999:1001], affine_mnist.affine_maps(1001)[999:])
    assert [box(image)[2:] for image in images[999:1001, 0]] == [box(canvas)[2:] for canvas in alone[:, 0]]
    assert torch.equal(images[999:1001].sum((1, 2, 3)), alone.sum((1, 2, 3)))
    other = digits.flip(0)
    other[1100] = digits[1100]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.manual_seed(5)
        assert torch.equal(Affine()._for_test(other)[1100], images[1100])
    finally:
        torch.set_num_threads(threads)


def test_affine_mnist_trains_and_validates_as_expanded_mnist() -> None:
    affine, expanded = loaded(Affine, val_size=50), loaded(Expanded, val_size=50)
    for stage, same in (("fit", True), ("validate", True), ("test", False)):
        (images, labels), (others, other_labels) = (
            data.part(stage).__getitems__(list(range(50))) for data in (affine, expanded)
        )
        assert torch.equal(images, others) == same
        assert torch.equal(labels, other_labels)
    assert affine.shift == expanded.shift == 6


@pytest.mark.slow
@real_mnist
def test_real_digits_are_whole(real: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digits, labels = MNIST(root=real).load(train=False)
    images, found = AffineMNIST(root=real).load(train=False)
    assert images.shape == (10_000, 1, 40, 40)
    assert torch.equal(found, labels)
    monkeypatch.setattr(affine_mnist, "CANVAS", 72)
    some = images[::4]
    canvases = affine_mnist.transform(digits[::4], affine_mnist.affine_maps(10_000)[::4])
    assert torch.equal(some.sum((1, 2, 3)), canvases.sum((1, 2, 3)))
    for axis in (2, 3):  # the numbers of rows and columns with ink agree
        assert torch.equal(some.any(axis).sum(2), canvases.any(axis).sum(2))


@real_mnist
@pytest.mark.parametrize(
    ("kind", "stage", "boxes", "ink"),
    [
        (ExpandedMNIST, "test", [(10, 10, 20, 16), (15, 7, 20, 20), (12, 15, 20, 9)], 217154241132),
        # Only a few images, because each takes seconds. Transformations and places are checked above on others.
        pytest.param(
            *(ExpandedMNIST, "validate", [(6, 16, 20, 6), (7, 4, 20, 20), (6, 10, 20, 18)], 107395721040),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(AffineMNIST, "test", [(0, 11, 19, 16), (3, 5, 22, 19), (11, 3, 18, 17)], 212203924958),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_real_images_never_change(
    real: str, kind: type[ExpandedMNIST], stage: str, boxes: list[tuple[int, ...]], ink: int
) -> None:
    """Published accuracies refer to these images: places of the first ones, and a checksum of all gray levels."""
    data = kind(root=real, val_size=5000)
    data.setup(stage)
    images = data.part(stage).images
    assert [box(image) for image in images[:3, 0]] == boxes
    assert (images.sum((0, 1)) * torch.arange(1, 1601).view(40, 40)).sum() == ink


# affNIST's file


def pixels(count: int) -> np.ndarray:
    """Images (count, 40, 40) without any symmetry."""
    return (np.arange(count * 1600) % 251).astype(np.uint8).reshape(count, 40, 40)


def write(root: Path, inside: str = "test.mat", compressed: bool = True, **fields: Any) -> Path:
    """Write three images like the published file, a column for each, among other fields."""
    good = {
        "affine": "a struct in truth",
        "image": pixels(3).reshape(3, 1600).T,
        "label_one_of_n": np.zeros((10, 3), np.uint8),
        "label_int": np.array([[7, 0, 9]], np.uint8),
    }
    content = io.BytesIO()
    savemat(content, {"affNISTdata": good | fields}, do_compression=compressed)
    path = root / "affnist" / "test.mat.zip"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/._test.mat", b"not this")
        archive.writestr(inside, content.getvalue())
    return path


@pytest.mark.parametrize(("inside", "compressed"), [("test.mat", True), ("somewhere/else/test.mat", False)])
def test_the_file(tmp_path: Path, inside: str, compressed: bool) -> None:
    write(tmp_path, inside, compressed)
    images, labels = AffNIST(str(tmp_path)).load(train=False)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert np.array_equal(images[:, 0].numpy(), pixels(3))
    assert images[1, 0, 2, 5] == (1600 + 85) % 251  # pixel (2, 5) of the second image: number 85 of its column
    assert labels.tolist() == [7, 0, 9]


def test_a_missing_test_set_is_missed_before_the_training(mnist_of_noise: Path, tmp_path: Path) -> None:
    (tmp_path / "mnist").symlink_to(mnist_of_noise / "mnist")
    data = AffNIST(str(tmp_path), check_hashes=False)
    data.setup("fit")
    line = "no test set of affNIST: put http://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/test.mat.zip at"
    with pytest.raises(DataError, match=f"^{line} {tmp_path}/affnist$"):
        data.prepare_data()
    with pytest.raises(DataError, match=f"^{line} DIR/affnist and set TORCHCAPS_DATA=DIR$"):
        AffNIST().load(train=False)
    # Everything else is as in ExpandedMNIST.
    expanded = ExpandedMNIST(str(tmp_path), check_hashes=False)
    expanded.setup("fit")
    assert torch.equal(data.train_set.images, expanded.train_set.images)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"image": np.ones((1600, 3))}, "expected one or more images"),
        ({"image": np.ones((1599, 3), np.uint8)}, "invalid for input of size"),
        ({"label_int": np.array([[1, 2]])}, r"holds labels \(2,\), expected 3 from 0 to 9"),
        ({"label_int": np.array([[1, 10, 2]])}, "expected 3 from 0 to 9"),
    ],
)
def test_other_files(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    path = write(tmp_path, **fields)
    with pytest.raises(DataError, match=f"^{path}: cannot be read .*{problem}.*; replace the file with the one from"):
        AffNIST(str(tmp_path)).load(train=False)
    path.write_bytes(write(tmp_path).read_bytes().replace(b"test.mat", b"test.max"))
    with pytest.raises(DataError, match=f"^{path}: cannot be read"):
        AffNIST(str(tmp_path)).load(train=False)
