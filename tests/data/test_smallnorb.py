"""The reader of NORB's matrices, smallNORB's files, errors for damaged ones, and sets with some of the poses."""

import gzip
import hashlib
import os
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from norb import INFO, TEST, TRAIN, matrix, small_norb, write
from torch.nn.functional import avg_pool2d, pad

from torchcaps.data import DataError, Metadata, SmallNORB, read_norb

PUBLISHED = dict(SmallNORB.md5)
REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture
def md5s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tiny set's md5s count as the published ones, zipped or not."""
    for name, values in small_norb().items():
        raw = matrix(values)
        md5s = (hashlib.md5(data).hexdigest() for data in (gzip.compress(raw, 1, mtime=0), raw))
        monkeypatch.setitem(SmallNORB.md5, name, tuple(md5s))


@pytest.fixture
def tiny(tmp_path: Path, md5s: None, no_network: list[str]) -> Path:
    """A data root with the tiny set, not zipped."""
    write(tmp_path / "root" / "smallnorb", False, small_norb())
    return tmp_path / "root"


def error_of(root: Path, train: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        SmallNORB(root=str(root)).read(train)
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    assert torch.equal(found, read_norb(str(path)))


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
        assert hashlib.md5(matrix(values)).hexdigest() == PUBLISHED[name][1]


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


GOOD = matrix(np.arange(6, dtype=np.uint8).reshape(2, 3))
ZIPPED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("bad.mat", GOOD[:-1], "the header says shape (2, 3), 6 bytes, but 5 follow"),
        ("bad.mat", GOOD + b"\0", "the header says shape (2, 3), 6 bytes, but 7 follow"),
        ("bad.mat", matrix(np.arange(6))[:-4], "the header says shape (6,), 24 bytes, but 20 follow"),
        ("bad.mat.gz", gzip.compress(GOOD[:-1], mtime=0), "the header says shape (2, 3), 6 bytes, but 5 follow"),
        ("bad.mat", matrix(np.arange(6), 0x1E3D4C51), "wrong magic 0x1e3d4c51"),
        ("bad.mat", GOOD[3::-1] + GOOD[4:], "wrong magic 0x554c3d1e"),
        ("bad.mat", ZIPPED, "wrong magic 0x"),
        ("bad.mat", b"", "the header needs 20 bytes, the file has 0"),
        ("bad.mat", GOOD[:18], "the header needs 20 bytes, the file has 18"),
        ("bad.mat", GOOD[:4] + b"\5\0\0\0" + GOOD[8:], "the header needs 28 bytes, the file has 26"),
        ("bad.mat", GOOD[:4] + b"\0\0\0\0" + GOOD[8:], "the header says 0 dimensions"),
        ("bad.mat", GOOD[:4] + b"\xff\0\0\0" + GOOD[8:], "the header says 255 dimensions"),
        ("bad.mat", GOOD[:8] + b"\0\0\0\0" + GOOD[12:], "the header says shape (0, 3)"),
        ("bad.mat", GOOD[:8] + b"\xff" * 8 + GOOD[16:], "the header says shape (-1, -1)"),
        ("bad.mat.gz", ZIPPED[:-9], "truncated gzip, the file ends too early"),
        ("bad.mat.gz", GOOD, "cannot be read: Not a gzipped file"),
        ("bad.mat.gz", ZIPPED[:-8] + bytes(8), "cannot be read: CRC check failed"),
        ("bad.mat.gz", ZIPPED[:10] + b"\xff" * 6 + ZIPPED[16:], "cannot be read: Error -3 while decompressing"),
    ],
    ids=[
        "short_data",
        "long_data",
        "short_integers",
        "zipped_short_data",
        "magic",
        "byte_order",
        "zipped_without_suffix",
        "empty",
        "short_header",
        "short_sizes",
        "no_dimensions",
        "many_dimensions",
        "empty_dimension",
        "negative_sizes",
        "truncated",
        "no_gzip",
        "checksum",
        "deflate",
    ],
)
def test_read_norb_refuses(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_norb(path)
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["none.mat", "none.mat.gz"])
def test_read_norb_of_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"none\.mat.*: cannot be read: .*No such file"):
        read_norb(tmp_path / name)


# smallNORB


@pytest.mark.parametrize("zipped", [False, True])
def test_the_set(tiny: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if zipped:
        for path in (tiny / "smallnorb").iterdir():
            path.unlink()
        write(tiny / "smallnorb", True, small_norb())
    monkeypatch.setenv("TORCHCAPS_DATA", str(tiny))
    data = SmallNORB(batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another md5 would warn
        data.prepare_data()
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
    data = SmallNORB(root=str(tiny), val_size=5, train_elevations=elevations)
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
    data = SmallNORB(root=str(tiny), val_instances=[9, 7])  # the tiny set has no 7
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


def test_metadata_before_setup_says_what_to_call(tiny: Path) -> None:
    with pytest.raises(RuntimeError, match=r'setup\("test"\)'):
        SmallNORB(root=str(tiny)).metadata("test")


def test_chosen_poses(tiny: Path) -> None:
    data = SmallNORB(
        root=str(tiny), train_elevations=[0, 3], train_azimuths=[0, 2], test_lightings=[2], test_azimuths=[6]
    )
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
        (
            {"test_elevations": [0, 9]},
            r"test_elevations .*\[0, 9\]",
        ),
        ({"train_azimuths": [1]}, r"train_azimuths .*\[1\]"),
        ({"test_azimuths": [36]}, r"test_azimuths .*\[36\]"),
        ({"train_lightings": [-1]}, r"train_lightings .*\[-1\]"),
        ({"test_lightings": [6]}, r"test_lightings .*\[6\]"),
        ({"val_instances": [4, 0]}, r"val_instances .*\[4, 0\]"),
        ({"val_instances": [4, 6, 7, 8, 9]}, r"val_instances .*\[4, 6, 7, 8, 9\]"),
        ({"val_instances": [4], "val_size": 20}, "val_instances takes the place of val_size"),
        ({"size": 97}, r"size .* 97\b"),
        ({"size": 0}, r"size .* 0\b"),
        ({"size": 32, "resize": 31}, r"resize .* 31\b"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmallNORB(**arguments)


def test_every_option() -> None:
    data = SmallNORB(batch_size=3, val_size=20, num_workers=0, flip=True, resize=100, ten_crop=True, shift=16)
    assert (data.batch_size, data.val_size, data.flip, data.resize, data.ten_crop) == (3, 20, True, 100, True)
    assert data.crops(torch.rand(2, 2, 96, 96)).shape == (2, 10, 2, 96, 96)
    assert data.augment(torch.rand(2, 2, 96, 96)).shape == (2, 2, 96, 96)
    with pytest.raises(TypeError, match="resise"):
        SmallNORB(resise=100)


def test_crops_are_of_images_padded_at_the_edges() -> None:
    torch.manual_seed(0)
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


# Paths of the files, and damaged files


def test_published_files(no_network: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        SmallNORB().prepare_data()
    address = f"https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/{TRAIN}-dat.mat.gz"
    assert no_network == [address]
    assert str(caught.value) == (
        f"cannot download {TRAIN}-dat.mat.gz (md5 66054832f9accfe74a0f4c36a75bc0a2): put it at "
        f"DIR/smallnorb/{TRAIN}-dat.mat.gz and set TORCHCAPS_DATA=DIR; tried {address} "
        "(ConnectionError: Name or service not known and a second line)"
    )
    assert sorted(PUBLISHED) == sorted(f"{part}-{kind}" for part in (TRAIN, TEST) for kind in ("dat", "cat", "info"))


def test_a_cached_file_needs_no_network(md5s: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallNORB, "address", "http://127.0.0.1:9/")  # nothing answers there
    write(tmp_path / "cache" / "torchcaps" / "smallnorb", True, small_norb())
    images, _ = SmallNORB().read(train=True)
    assert np.array_equal(images.numpy(), small_norb()[f"{TRAIN}-dat"])
    # A file that is not zipped comes first, but only in a root.
    write(tmp_path / "root" / "smallnorb", False, {f"{TRAIN}-dat": small_norb()[f"{TRAIN}-dat"]})
    data = SmallNORB(root=str(tmp_path / "root"))
    assert [data._find(f"{TRAIN}-{kind}")[1].suffix for kind in ("dat", "cat")] == [".mat", ".gz"]
    assert torch.equal(data.read(train=True)[0], images)


def test_another_md5_is_a_warning(tiny: Path) -> None:
    values = small_norb()[f"{TEST}-dat"].copy()
    values[0, 0, 0, 0] += 1
    write(tiny / "smallnorb", False, {f"{TEST}-dat": values})
    with pytest.warns(UserWarning, match=rf"{TEST}-dat\.mat has md5 .*: it is used anyway"):
        images, _ = SmallNORB(root=str(tiny)).read(train=False)
    assert np.array_equal(images.numpy(), values)


def test_a_corrupt_file_is_an_error_and_never_downloaded(tiny: Path, no_network: list[str]) -> None:
    path = tiny / "smallnorb" / f"{TRAIN}-dat.mat"
    path.write_bytes(path.read_bytes()[:-20])
    assert error_of(tiny) == (
        f"{path}: the header says shape (20, 2, 96, 96), 368640 bytes, but 368620 follow; "
        f"the md5 should be {SmallNORB.md5[f'{TRAIN}-dat'][1]}: replace the file"
    )
    path.unlink()
    write(path.parent, True, {f"{TRAIN}-dat": small_norb()[f"{TRAIN}-dat"]})
    zipped = path.with_name(f"{path.name}.gz")
    zipped.write_bytes(zipped.read_bytes()[:-20])
    assert error_of(tiny) == (
        f"{zipped}: truncated gzip, the file ends too early; the md5 should be "
        f"{SmallNORB.md5[f'{TRAIN}-dat'][0]}: replace the file, or remove it to have it downloaded"
    )
    assert no_network == []


def changed(kind: str, row: int, column: int, value: int) -> np.ndarray:
    values = small_norb()[f"{TRAIN}-{kind}"].copy()
    values.reshape(20, -1)[row, column] = value
    return values


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        (
            "dat",
            np.zeros((20, 2, 96, 95), np.uint8),
            "holds shape (20, 2, 96, 95) of torch.uint8, expected (n, 2, 96, 96)",
        ),
        ("dat", np.zeros((20, 96, 96), np.uint8), "holds shape (20, 96, 96) of torch.uint8"),
        (
            "dat",
            np.zeros((2, 2, 96, 96), np.int32),
            "holds shape (2, 2, 96, 96) of torch.int32, expected (n, 2, 96, 96) of torch.uint8",
        ),
        ("cat", np.zeros(20, np.uint8), "holds shape (20,) of torch.uint8"),
        ("cat", np.zeros((20, 1)), "holds shape (20, 1) of torch.int32"),
        ("cat", np.zeros(19), "has 19 pairs, but {dat} has 20"),
        ("cat", changed("cat", 3, 0, 5), "holds category 5"),
        ("cat", changed("cat", 3, 0, -1), "holds category -1"),
        ("info", np.ones((20, 3)), "holds shape (20, 3) of torch.int32"),
        ("info", np.repeat(INFO[TRAIN], 6, 0), "has 24 pairs, but {dat} has 20"),
        ("info", changed("info", 7, 0, 5), "holds instance 5"),
        ("info", changed("info", 7, 1, 9), "holds elevation 9"),
        ("info", changed("info", 7, 2, 3), "holds azimuth 3"),
        ("info", changed("info", 7, 3, 6), "holds lighting 6"),
    ],
)
def test_well_formed_but_not_smallnorb(tiny: Path, kind: str, values: np.ndarray, problem: str) -> None:
    name = f"{TRAIN}-{kind}"
    write(tiny / "smallnorb", False, {name: values})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of another md5
        message = error_of(tiny)
    expected = problem.format(dat=tiny / "smallnorb" / f"{TRAIN}-dat.mat")
    assert message.startswith(f"{tiny / 'smallnorb' / name}.mat: {expected}")
    assert message.endswith(f"; the md5 should be {SmallNORB.md5[name][1]}: replace the file")


@pytest.mark.skipif(
    not all(any((REAL / "smallnorb" / f"{name}.mat{gz}").is_file() for gz in ("", ".gz")) for name in PUBLISHED),
    reason=f"no smallNORB at {REAL}/smallnorb (set TORCHCAPS_DATA to a folder that has smallnorb/)",
)
def test_real_smallnorb(no_network: list[str]) -> None:
    data = SmallNORB(root=str(REAL))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another md5 would warn
        data.setup()
    for stage in ("fit", "test"):
        known = data.metadata(stage)
        assert len(torch.stack(known, 1).unique(dim=0)) == 24300
        assert known.category.bincount().tolist() == [4860] * 5
