"""Expanded MNIST and Affine MNIST against plain loops: places and transformations of the digits; affNIST's files."""

import math
import os
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from torchcaps.data import MNIST, AffineMNIST, AffNIST, DataError, ExpandedMNIST, affine_mnist, expanded_mnist, streams
from torchcaps.data.streams import splitmix64

pytestmark = pytest.mark.usefixtures("no_network")

REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")

needs_mnist = pytest.mark.skipif(
    not (REAL / "mnist" / "t10k-images-idx3-ubyte.gz").is_file(),
    reason=f"no MNIST at {REAL}/mnist (set TORCHCAPS_DATA to a folder that has mnist/)",
)


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


def loaded(kind: type[ExpandedMNIST], **arguments: Any) -> ExpandedMNIST:
    data = kind(**arguments)
    data.setup()
    return data


def collect(loader: DataLoader) -> tuple[Tensor, Tensor]:
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def keys(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def drawn(stream: int, image: int, draw: int) -> int:
    """Random number of an image as documented: 53 bits of the output number 8 * image + draw of the stream."""
    seed = int(splitmix64(0, torch.tensor(stream)))
    return int(splitmix64(seed, torch.tensor(8 * image + draw))) >> 11 & 2**53 - 1


def chi_square(counts: list[int]) -> float:
    """Deviations of counts from those of equal probabilities, in standard deviations."""
    expected, freedom = sum(counts) / len(counts), len(counts) - 1
    return (sum((count - expected) ** 2 / expected for count in counts) - freedom) / (2 * freedom) ** 0.5


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
    assert plain.val_set is not None
    assert data.val_set is not None
    assert torch.equal(data.val_set.labels, plain.val_set.labels)
    for k, (down, right) in enumerate(places(data.val_set.images)):
        assert (down, right) == (drawn(3, k, 0) % 13, drawn(3, k, 1) % 13)
        assert torch.equal(data.val_set.images[k, 0, down : down + 28, right : right + 28], plain.val_set.images[k, 0])
    assert data.train_set is not None
    assert plain.train_set is not None
    assert torch.equal(data.train_set.images, pad(plain.train_set.images, (6, 6, 6, 6)))
    assert torch.equal(data.train_set.labels, plain.train_set.labels)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("kind", [Expanded, Affine])
def test_runs_batches_and_workers_do_not_matter(kind: type[ExpandedMNIST]) -> None:
    torch.manual_seed(0)
    first = loaded(kind, val_size=50)
    for arguments in ({"batch_size": 7}, {"batch_size": 64, "num_workers": 2}):
        torch.manual_seed(1)
        data = loaded(kind, val_size=50, **arguments)
        for _ in range(2):  # every validation may make a new loader
            for stage, loader in (("validate", data.val_dataloader()), ("test", data.test_dataloader())):
                images, labels = collect(loader)
                every, labels_of_every = first.part(stage).__getitems__(list(range(len(labels))))
                assert torch.equal(images, every)
                assert torch.equal(labels, labels_of_every)


def test_places_are_uniform_and_independent() -> None:
    dots = torch.zeros(5_000, 1, 40, 40, dtype=torch.uint8)
    dots[:, :, 6, 6] = 1
    for stream in (streams.EXPANDED_VALIDATE, streams.EXPANDED_TEST):
        places = expanded_mnist.moved(dots, stream).nonzero()[:, 2:]
        counts = Counter(tuple(place) for place in places.tolist())
        assert set(counts) == {(down, right) for down in range(13) for right in range(13)}
        assert abs(chi_square(list(counts.values()))) < 4
    assert not torch.equal(places, expanded_mnist.moved(dots, streams.EXPANDED_VALIDATE).nonzero()[:, 2:])


def test_training_images_are_anywhere() -> None:
    torch.manual_seed(0)
    data = loaded(Expanded)
    digits = Noise().load(train=True)[0].float() / 255
    images = torch.cat([data.augment(data.part("fit").__getitems__(list(range(200)))[0]) for _ in range(40)])
    found = places(images)
    assert all(
        torch.equal(images[k, 0, down : down + 28, right : right + 28], digits[k % 200, 0])
        for k, (down, right) in enumerate(found)
    )
    counts = Counter(found)
    assert set(counts) == {(down, right) for down in range(13) for right in range(13)}
    assert abs(chi_square(list(counts.values()))) < 4
    assert found[:200] != found[200:400]  # a new place every time


def test_a_failed_setup_leaves_no_validation_image_at_the_center() -> None:
    class Broken(Expanded):
        broken = True

        def _for_test(self, digits: Tensor) -> Tensor:
            if self.broken:
                raise DataError("no test set")
            return super()._for_test(digits)

    data = Broken(val_size=50)
    with pytest.raises(DataError):
        data.setup()
    data.broken = False
    data.setup()
    assert data.val_set is not None
    expected = loaded(Expanded, val_size=50).val_set
    assert expected is not None
    assert torch.equal(data.val_set.images, expected.images)


# The affine maps


def by_hand(image: int) -> tuple[float, float, float, float]:
    """Angle in radians, shear, vertical and horizontal scale of an image, computed as documented."""
    rotation, shear, vertical, horizontal = (drawn(5, image, draw) / 2**52 - 1 for draw in range(4))
    return math.radians(20 * rotation), 0.2 * shear, 1 + 0.2 * vertical, 1 + 0.2 * horizontal


def test_maps_are_scale_then_shear_then_rotation() -> None:
    maps = affine_mnist.affine_maps(200)
    assert maps.shape == (200, 2, 2)
    assert maps.dtype == torch.float64
    for k in range(200):
        angle, shear, vertical, horizontal = by_hand(k)
        for x, y in ((1.0, 0.0), (0.0, 1.0), (2.0, -3.0)):
            wide, high = horizontal * x, vertical * y
            wide += shear * high
            turned = (math.cos(angle) * wide - math.sin(angle) * high, math.sin(angle) * wide + math.cos(angle) * high)
            assert (maps[k] @ torch.tensor([x, y], dtype=torch.float64)).tolist() == pytest.approx(turned, abs=1e-12)
    assert torch.equal(affine_mnist.affine_maps(50), maps[:50])


def test_ranges_are_filled_uniformly_and_independently() -> None:
    count = 20_000
    maps = affine_mnist.affine_maps(count)
    # M = R @ [[h, s v], [0, v]]: the first column gives the angle and h; the second, turned back, gives s and v.
    angle = torch.atan2(maps[:, 1, 0], maps[:, 0, 0])
    horizontal = maps[:, :, 0].norm(dim=1)
    vertical = angle.cos() * maps[:, 1, 1] - angle.sin() * maps[:, 0, 1]
    shear = (angle.cos() * maps[:, 0, 1] + angle.sin() * maps[:, 1, 1]) / vertical
    found = torch.stack([torch.rad2deg(angle) / 20, shear / 0.2, (vertical - 1) / 0.2, (horizontal - 1) / 0.2])
    assert found.abs().max() <= 1 + 1e-12
    assert (found.min(1).values < -0.999).all()
    assert (found.max(1).values > 0.999).all()
    for values in found:
        counts = ((values + 1) * 10).clamp(0, 19.9).long().bincount(minlength=20)
        assert abs(chi_square(counts.tolist())) < 4
    places = affine_mnist._drawn(count)[:, 4:6].double().T / 2**53
    correlation = torch.corrcoef(torch.cat([found, places])) - torch.eye(6)
    assert correlation.abs().max() < 4 / count**0.5


# The transformed images


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


def test_places_of_transformed_digits_are_uniform() -> None:
    digits = blots(100).repeat(25, 1, 1, 1)
    images = Affine()._for_test(digits)
    chance = torch.Generator().manual_seed(0)
    shares = []
    for image in images[:, 0]:
        top, left, height, width = box(image)
        # The index of the place, plus a random part, over the number of places: uniform over 0..1.
        at = torch.tensor([top, left]) + torch.rand(2, generator=chance)
        shares.append(at / (41 - torch.tensor([height, width])))
    found = torch.stack(shares, 1)
    assert found.max() < 1
    for values in found:
        assert abs(chi_square((values * 20).long().bincount(minlength=20).tolist())) < 4
    assert abs(torch.corrcoef(found)[0, 1]) < 4 / 50
    inked = images.squeeze(1) > 0
    assert inked.any(2)[:, [0, -1]].any(0).all()  # some images reach each edge
    assert inked.any(1)[:, [0, -1]].any(0).all()


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
    threads = torch.get_num_threads()
    images = Affine()._for_test(digits)
    try:
        torch.set_num_threads(3)
        torch.manual_seed(5)
        assert torch.equal(Affine()._for_test(digits), images)
    finally:
        torch.set_num_threads(threads)
    for count in (1, 1001):
        assert torch.equal(Affine()._for_test(digits[:count]), images[:count])
    alone = affine_mnist.transform(digits[999:1001], affine_mnist.affine_maps(1001)[999:])
    assert [box(image)[2:] for image in images[999:1001, 0]] == [box(canvas)[2:] for canvas in alone[:, 0]]
    assert torch.equal(images[999:1001].sum((1, 2, 3)), alone.sum((1, 2, 3)))
    other = digits.flip(0)
    other[1100] = digits[1100]
    assert torch.equal(Affine()._for_test(other)[1100], images[1100])


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
@needs_mnist
def test_real_digits_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, labels = MNIST(root=str(REAL)).load(train=False)
    images, found = AffineMNIST(root=str(REAL)).load(train=False)
    assert images.shape == (10_000, 1, 40, 40)
    assert torch.equal(found, labels)
    monkeypatch.setattr(affine_mnist, "CANVAS", 72)
    some = images[::4]
    canvases = affine_mnist.transform(digits[::4], affine_mnist.affine_maps(10_000)[::4])
    assert torch.equal(some.sum((1, 2, 3)), canvases.sum((1, 2, 3)))
    for axis in (2, 3):  # the numbers of rows and columns with ink agree
        assert torch.equal(some.any(axis).sum(2), canvases.any(axis).sum(2))


@needs_mnist
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
    kind: type[ExpandedMNIST], stage: str, boxes: list[tuple[int, ...]], ink: int
) -> None:
    """Published accuracies refer to these images: places of the first ones, and a checksum of all gray levels."""
    data = kind(root=str(REAL), val_size=5000)
    data.setup(stage)
    images = data.part(stage).images
    assert [box(image) for image in images[:3, 0]] == boxes
    assert (images.sum((0, 1)) * torch.arange(1, 1601).view(40, 40)).sum() == ink


# affNIST's files


def pixels(count: int, first: int = 0) -> np.ndarray:
    """Images (count, 40, 40) without any symmetry."""
    return ((np.arange(count * 1600) + first) % 251).astype(np.uint8).reshape(count, 40, 40)


def write(path: Path, images: np.ndarray, labels: Any, compressed: bool = True) -> None:
    """Write a file like the published ones: a column for each image, among other fields."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {
        "affine": "a struct in truth",
        "human_readable_transform": np.ones((6, len(images))),
        "image": images.reshape(len(images), 1600).T,
        "label_one_of_n": np.zeros((10, len(images)), np.uint8),
        "label_int": np.array([labels], np.uint8),
        "id": np.arange(len(images), dtype="f8")[None],
    }
    savemat(path, {"affNISTdata": fields}, do_compression=compressed)


def write_batches(folder: Path) -> tuple[np.ndarray, list[int]]:
    for k in range(1, 33):
        write(folder / f"{k}.mat", pixels(2, first=k), [k % 10, 9 - k % 10])
    images = np.concatenate([pixels(2, first=k) for k in range(1, 33)])
    return images, [label for k in range(1, 33) for label in (k % 10, 9 - k % 10)]


def check(root: Path, images: np.ndarray, labels: list[int]) -> None:
    data = AffNIST(root=str(root))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, found_labels = data.load(train=False)
    assert found.dtype == torch.uint8
    assert found_labels.dtype == torch.int64
    assert found.shape == (len(labels), 1, 40, 40)
    assert np.array_equal(found[:, 0].numpy(), images)
    assert found_labels.tolist() == labels


def error_of(root: Path | None) -> str:
    with pytest.raises(DataError) as caught:
        AffNIST(root=str(root) if root else None).load(train=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("compressed", [False, True])
def test_one_file(tmp_path: Path, compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "affnist" / "test.mat", pixels(3), [7, 0, 9], compressed)
    check(tmp_path, pixels(3), [7, 0, 9])
    # Pixel (2, 5) of the second image: number 85 of its column.
    assert AffNIST(root=str(tmp_path)).load(train=False)[0][1, 0, 2, 5] == (1600 + 85) % 251
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    assert len(AffNIST().load(train=False)[1]) == 3


def test_batches_in_their_order(tmp_path: Path) -> None:
    check(tmp_path, *write_batches(tmp_path / "affnist" / "test_batches"))


@pytest.mark.parametrize("inside", ["", "test_batches/", "somewhere/else/"])
def test_zips_are_not_unpacked(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / "affnist"
    images, labels = write_batches(tmp_path / "made")
    folder.mkdir()
    with zipfile.ZipFile(folder / "test_batches.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"__MACOSX/{inside}._1.mat", b"not this")
        for k in range(32, 0, -1):
            archive.write(tmp_path / "made" / f"{k}.mat", f"{inside}{k}.mat")
    check(tmp_path, images, labels)
    write(tmp_path / "made" / "test.mat", pixels(2), [4, 2])
    with zipfile.ZipFile(folder / "test.mat.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "made" / "test.mat", f"{inside}test.mat")
    check(tmp_path, pixels(2), [4, 2])
    assert sorted(path.name for path in folder.iterdir()) == ["test.mat.zip", "test_batches.zip"]


def test_what_is_there_first_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "affnist"
    everything = write_batches(folder / "test_batches")
    (folder / "test_batches.zip").write_bytes(b"no zip")
    check(tmp_path, *everything)
    write(folder / "test.mat", pixels(1), [8])
    (folder / "test.mat.zip").write_bytes(b"no zip")
    check(tmp_path, pixels(1), [8])
    (folder / "test.mat").unlink()
    assert error_of(tmp_path).startswith(f"{folder}/test.mat.zip/test.mat: truncated, or not a zip file (BadZipFile")


ADDRESS = "http://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/"


def test_no_files(tmp_path: Path) -> None:
    line = f"no test set of affNIST: put {ADDRESS}test.mat.zip or {ADDRESS}test_batches.zip at "
    assert error_of(None) == f"{line}DIR/affnist and set TORCHCAPS_DATA=DIR"
    assert error_of(tmp_path) == f"{line}{tmp_path}/affnist"


@pytest.mark.filterwarnings("ignore:.*has md5")
def test_a_missing_test_set_is_missed_before_the_training(mnist_of_noise: Path, tmp_path: Path) -> None:
    (tmp_path / "mnist").symlink_to(mnist_of_noise / "mnist")
    data = AffNIST(root=str(tmp_path))
    data.setup("fit")
    with pytest.raises(DataError, match="no test set of affNIST"):
        data.prepare_data()
    write(tmp_path / "affnist" / "test.mat", pixels(3), [7, 0, 9])
    data.prepare_data()
    data.setup("test")
    assert data.test_set is not None
    assert len(data.test_set) == 3
    # Everything else is as in ExpandedMNIST.
    expanded = ExpandedMNIST(root=str(tmp_path))
    expanded.setup("fit")
    assert data.train_set is not None
    assert expanded.train_set is not None
    assert torch.equal(data.train_set.images, expanded.train_set.images)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"affNIST": {"image": 1}}, 'has no array of numbers "affNISTdata.image"'),
        ({"affNISTdata": np.ones((1600, 2))}, 'has no array of numbers "affNISTdata.image"'),
        ({"affNISTdata": {"image": np.ones((1600, 2), np.uint8)}}, 'has no array of numbers "affNISTdata.label_int"'),
        ({"image": "text"}, '"affNISTdata.image" is not an array of real numbers'),
        ({"image": np.ones((1600, 2))}, '"image" is of type float64'),
        ({"image": np.ones((2, 1600), np.uint8)}, '"image" has shape (2, 1600)'),
        ({"image": np.ones((784, 2), np.uint8)}, '"image" has shape (784, 2)'),
        ({"image": np.ones((40, 40, 2), np.uint8)}, '"image" has shape (40, 40, 2)'),
        (
            {"image": np.ones((1600, 3), np.uint8)},
            '"label_int" has shape (1, 2)',
        ),
        ({"label_int": np.zeros((10, 2))}, '"label_int" has shape (10, 2)'),
        ({"label_int": np.array([[1, 10]])}, "holds label 10"),
        ({"label_int": np.array([[1, -1]])}, "holds label -1"),
    ],
)
def test_malformed_files(tmp_path: Path, variables: dict[str, Any], problem: str) -> None:
    path = tmp_path / "affnist" / "test.mat"
    path.parent.mkdir()
    good = {"image": np.ones((1600, 2), np.uint8), "label_int": np.array([[1, 2]])}
    is_file = any(name.startswith("aff") for name in variables)
    savemat(path, variables if is_file else {"affNISTdata": good | variables})
    said = error_of(tmp_path)
    assert said.startswith(f"{path}: ")
    assert problem in said
    assert ADDRESS in said


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "affnist" / "test.mat"
    write(path, pixels(1), [3])
    raw = path.read_bytes()
    with zipfile.ZipFile(path.with_name("test.mat.zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "test.mat")
    zipped = path.with_name("test.mat.zip").read_bytes()
    for length in [*range(0, len(raw), len(raw) // 50), len(raw) - 1]:
        path.write_bytes(raw[:length])
        assert error_of(tmp_path).startswith(f"{path}: ")
    path.unlink()
    for length in [*range(0, len(zipped), len(zipped) // 50), len(zipped) - 1]:
        path.with_name("test.mat.zip").write_bytes(zipped[:length])
        assert error_of(tmp_path).startswith(f"{path}.zip/test.mat: truncated, or not a zip file (")


def test_corrupt_zips(tmp_path: Path) -> None:
    path = tmp_path / "affnist" / "test.mat.zip"
    path.parent.mkdir()
    for members, change, problem in (
        ({"other.mat": b""}, None, "is not in the archive"),
        ({"nottest.mat": b""}, None, "is not in the archive"),
        ({"test.mat": b"plainly no MATLAB file"}, None, "is not a MATLAB file of version 5 to 7.2"),
        ({"test.mat": b"plainly no MATLAB file"}, b"mainly", "truncated, or not a zip file (BadZipFile: Bad CRC-32"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name, raw in members.items():
                archive.writestr(name, raw)
        if change:
            path.write_bytes(path.read_bytes().replace(b"plainl", change))
        assert error_of(tmp_path).startswith(f"{path}/test.mat: {problem}")


def test_a_missing_or_unreadable_batch(tmp_path: Path) -> None:
    folder = tmp_path / "affnist" / "test_batches"
    write_batches(folder)
    (folder / "17.mat").unlink()
    assert error_of(tmp_path) == (
        f"{folder}/17.mat: cannot be read: No such file or directory: replace the file with the one from {ADDRESS}"
    )
    (folder / "17.mat").mkdir()
    assert error_of(tmp_path).startswith(f"{folder}/17.mat: cannot be read: Is a directory")


# Arguments


@pytest.mark.parametrize("kind", [ExpandedMNIST, AffineMNIST, AffNIST])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"batch_size .* 0\b"),
        ({"val_size": -1}, r"val_size .* -1\b"),
        ({"num_workers": -1}, r"num_workers .* -1\b"),
    ],
)
def test_bad_arguments(kind: type[ExpandedMNIST], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("kind", [ExpandedMNIST, AffineMNIST, AffNIST])
def test_the_shift_is_no_argument(kind: type[ExpandedMNIST]) -> None:
    assert kind().shift == 6
    with pytest.raises(TypeError):
        kind(shift=2)  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore:.*has md5")
@pytest.mark.parametrize("kind", [ExpandedMNIST, AffineMNIST, AffNIST])
def test_batches_of_files(kind: type[ExpandedMNIST], images_of_noise: Path) -> None:
    data = kind(root=str(images_of_noise), batch_size=5)
    data.prepare_data()
    data.setup()
    for loader in (data.train_dataloader(), data.test_dataloader()):
        assert [tuple(images.shape) for images, _ in loader] == [(count, 1, 40, 40) for count in (5, 5, 5, 1)]
    assert data.val_dataloader() == []
