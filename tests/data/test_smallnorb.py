"""The reader of NORB's matrices, smallNORB's files, and sets with some of the poses and toys."""

import gzip
import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from norb import INFO, TEST, TRAIN, matrix, small_norb, write
from torch.nn.functional import avg_pool2d, pad

from torchcaps.data import DataError, Metadata, SmallNORB
from torchcaps.data.smallnorb import read_norb


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A data root with twenty training and twenty test pairs, not zipped."""
    write(tmp_path / "root" / "smallnorb", False, small_norb())
    return tmp_path / "root"


def loose(root: Path, **options: Any) -> SmallNORB:
    return SmallNORB(str(root), check_hashes=False, **options)


# The reader


@pytest.mark.parametrize("suffix", [".mat", ".mat.gz"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (3, 2, 1, 2), (1, 2, 1, 3, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_round_trip(tmp_path: Path, suffix: str, shape: tuple[int, ...], dtype: type) -> None:
    values = (np.arange(np.prod(shape)).reshape(shape) * (7 if dtype is np.uint8 else -70000)).astype(dtype)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(matrix(values), mtime=0) if suffix == ".mat.gz" else matrix(values))
    found = read_norb(path)
    assert found.dtype == (torch.uint8 if dtype is np.uint8 else torch.int32)
    assert np.array_equal(found.numpy(), values)


def test_by_hand(tmp_path: Path) -> None:
    (tmp_path / "a.mat").write_bytes(
        b"\x54\x4c\x3d\x1e" + b"\1\0\0\0" + b"\2\0\0\0\1\0\0\0\1\0\0\0" + b"\0\1\0\0\xff\xff\xff\xff"
    )
    assert read_norb(tmp_path / "a.mat").tolist() == [256, -1]


def test_these_are_the_published_files() -> None:
    """Three of the six files follow a rule. The helper of these tests writes them with the published hash."""
    categories = np.arange(24300) % 5
    grid = product((0, 1, 2, 3, 5), range(9), range(0, 36, 2), range(6), range(5))
    info = np.array([row[:4] for row in grid])
    for name, values in ((f"{TRAIN}-cat", categories), (f"{TEST}-cat", categories), (f"{TEST}-info", info)):
        assert hashlib.md5(matrix(values)).hexdigest() == SmallNORB.md5[name][1]


def test_bytes_are_memory_mapped_and_cannot_be_spoilt(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    path.write_bytes(matrix(np.zeros((2, 3, 4), np.uint8)))
    found = read_norb(path)
    with path.open("r+b") as file:
        file.seek(20 + 1)
        file.write(b"\x07")
    assert found.flatten().tolist() == [0, 7] + [0] * 22  # the file was read when it was needed
    found += 1
    assert read_norb(path).sum() == 7


# smallNORB


def test_the_set(tiny: Path) -> None:
    data = loose(tiny, batch_size=8)
    data.setup()
    assert data.names == ["animal", "human", "airplane", "truck", "car"]
    for part, stage in ((TRAIN, "fit"), (TEST, "test")):
        known = data.metadata(stage)
        assert isinstance(known, Metadata)
        assert known.category.tolist() == [0, 1, 2, 3, 4] * 4
        rows = torch.stack(known[1:], 1)
        assert rows.dtype == torch.int64
        assert rows.tolist() == [list(row) for row in INFO[part] for _ in range(5)]
    images, labels = (torch.cat(of) for of in zip(*data.test_dataloader(), strict=True))
    assert images.dtype == torch.float32
    assert torch.equal((images * 255).byte(), torch.from_numpy(small_norb()[f"{TEST}-dat"]))
    assert torch.equal(labels, data.metadata("test").category)
    images, labels = data.load(train=True)
    assert np.array_equal(images.numpy(), small_norb()[f"{TRAIN}-dat"])
    assert labels.tolist() == [0, 1, 2, 3, 4] * 4
    assert labels.dtype == torch.int64


@pytest.mark.parametrize(("elevations", "chosen"), [(None, range(20)), ([3, 8], range(5, 15))])
def test_validation_keeps_images_labels_and_metadata_together(
    tiny: Path, elevations: list[int] | None, chosen: range
) -> None:
    data = loose(tiny, val_size=5, train_elevations=elevations)
    data.setup("fit")
    raw = torch.from_numpy(small_norb()[f"{TRAIN}-dat"])
    seen = []
    for stage, count in (("fit", len(chosen) - 5), ("validate", 5)):
        known, part = data.metadata(stage), data.part(stage)
        assert len(known.category) == count
        for k in range(count):
            image, label = part[k]
            (index,) = (raw == (image * 255).round().byte()).flatten(1).all(1).nonzero().flatten().tolist()
            assert label == known.category[k] == index % 5
            assert tuple(int(column[k]) for column in known[1:]) == INFO[TRAIN][index // 5]
            seen.append(index)
    assert sorted(seen) == list(chosen)


def test_validation_on_toys_that_are_not_trained_on(tiny: Path) -> None:
    data = loose(tiny, val_instances=[9, 7])  # the tiny set has no 7
    data.setup("fit")
    trained, held_out = data.metadata("fit"), data.metadata("validate")
    assert set(trained.instance.tolist()) == {4}
    assert set(held_out.instance.tolist()) == {9}
    assert len(trained.category) == len(held_out.category) == 10
    images, labels = (torch.cat(of) for of in zip(*data.val_dataloader(), strict=True))
    assert torch.equal(labels, held_out.category)
    raw = torch.from_numpy(small_norb()[f"{TRAIN}-dat"])
    those = [k for k in range(20) if INFO[TRAIN][k // 5][0] == 9]
    assert torch.equal((images * 255).round().byte(), raw[those])


def test_chosen_poses(tiny: Path) -> None:
    data = loose(tiny, train_elevations=[0, 3], train_azimuths=[0, 2], test_lightings=[2], test_azimuths=[6])
    data.setup()
    train, test = data.metadata("fit"), data.metadata("test")
    assert set(zip(train.elevation.tolist(), train.azimuth.tolist(), strict=True)) == {(0, 0), (3, 2)}
    assert set(zip(test.azimuth.tolist(), test.lighting.tolist(), strict=True)) == {(6, 2)}
    assert len(train.category) == len(test.category) == 10
    images, _ = data.part("test").__getitems__(list(range(10)))  # type: ignore[attr-defined]
    assert torch.equal((images * 255).byte(), torch.from_numpy(small_norb()[f"{TEST}-dat"])[10:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"train_elevations": []},
            r"train_elevations .*\[\]",
        ),
        ({"train_lightings": [-1]}, r"train_lightings .*\[-1\]"),
        ({"val_instances": [4, 0]}, r"val_instances .*\[4, 0\]"),
        ({"val_instances": [4], "val_size": 20}, "val_instances takes the place of val_size"),
        ({"size": 97}, r"size .* 97\b"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmallNORB(**arguments)


def test_crops_are_of_images_padded_at_the_edges() -> None:
    images = torch.rand(40, 2, 96, 96)
    moved = SmallNORB(shift=16).augment(images)
    padded = pad(images, (16,) * 4, mode="replicate")
    places = padded.unfold(2, 96, 1).unfold(3, 96, 1)  # (n, 2, 33, 33, 96, 96)
    found = []
    for k in range(40):
        same = (places[k, :, :, :, ::19, ::19] == moved[k, :, None, None, ::19, ::19]).flatten(3).all(3).all(0)
        for top, left in same.nonzero().tolist():  # both images of a pair move together
            if torch.equal(places[k, :, top, left], moved[k]):
                found.append((k, top, left))
    assert [k for k, _, _ in found] == list(range(40))
    for offsets in zip(*[(top, left) for _, top, left in found], strict=True):
        assert min(offsets) < 6
        assert max(offsets) > 26


def test_smaller_images_are_crops() -> None:
    images = torch.rand(3, 2, 96, 96)
    data = SmallNORB(size=40)
    assert data.shape == (2, 40, 40)
    torch.testing.assert_close(data.center(images), images[..., 28:68, 28:68], rtol=0, atol=0)
    assert data.augment(images).shape == (3, 2, 40, 40)
    # As in Hinton et al. 2018.
    torch.testing.assert_close(SmallNORB(size=32, resize=48).center(images), avg_pool2d(images, 2)[..., 8:40, 8:40])
    with pytest.raises(ValueError, match=r"shape \(n, 2, 96, 96\) or \(n, 2, 48, 48\), got \(3, 2, 32, 32\)"):
        SmallNORB(size=32, resize=48).augment(images[..., :32, :32])


# Files


def test_a_file_that_is_not_zipped_comes_first(tiny: Path) -> None:
    name = f"{TRAIN}-dat"
    values = small_norb()[name].copy()
    values[0, 0, 0, 0] ^= 1
    write(tiny / "smallnorb", True, {name: values})
    assert loose(tiny).read(train=True)[0][0, 0, 0, 0] == values[0, 0, 0, 0] ^ 1
    (tiny / "smallnorb" / f"{name}.mat").unlink()
    assert loose(tiny).read(train=True)[0][0, 0, 0, 0] == values[0, 0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("dat", np.zeros((20, 96, 96), np.uint8), "expected one or more images"),
        ("cat", np.zeros(19), r"holds labels \(19,\), expected 20 from 0 to 4"),
        ("cat", np.full(20, 5), "expected 20 from 0 to 4"),
        ("info", np.ones((20, 3)), r"shape '\[20, 4\]' is invalid for input of size 60"),
    ],
)
def test_well_formed_but_not_smallnorb(tiny: Path, kind: str, values: np.ndarray, problem: str) -> None:
    name = f"{TRAIN}-{kind}"
    write(tiny / "smallnorb", False, {name: values})
    path = tiny / "smallnorb" / f"{name}.mat"
    with pytest.raises(DataError, match=f"^{path}: cannot be read .*{problem}.*{SmallNORB.md5[name][1]}: replace the"):
        loose(tiny).read(train=True)


@pytest.mark.parametrize("real", ["smallnorb"], indirect=True)
def test_real_smallnorb(real: str) -> None:
    data = SmallNORB(real)
    data.setup()
    for stage in ("fit", "test"):
        known = data.metadata(stage)
        assert len(torch.stack(known, 1).unique(dim=0)) == 24300
        assert known.category.bincount().tolist() == [4860] * 5


def test_a_mirrored_pair_keeps_its_depth(tiny: Path) -> None:
    """In a mirror the cameras change places: what is left of the left one is right of the right one."""
    pairs = torch.zeros(40, 2, 96, 96)
    pairs[:, 0, 5, 30] = pairs[:, 1, 5, 20] = 1  # near: further left in the right picture
    data = loose(tiny, flip=True, resize=96, ten_crop=True)
    for pair in (*data.augment(pairs), *data.crops(pairs)[0]):
        left, right = (picture[5].argmax().item() for picture in pair)
        assert (left, right) in ((30, 20), (95 - 20, 95 - 30))
        assert pair.sum() == 2
