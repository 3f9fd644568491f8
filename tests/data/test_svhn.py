"""SVHN's pixels, its label 10, its extra images, and errors of one line for damaged files."""

import hashlib
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest
import torch
from scipy.io import savemat

from torchcaps.data import SVHN, DataError

pytestmark = pytest.mark.usefixtures("no_network")

REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")
FILES = {"train_file": "train_32x32.mat", "test_file": "test_32x32.mat", "extra_file": "extra_32x32.mat"}


def pixels(count: int, first: int = 0) -> np.ndarray:
    """Images as in the files: row, column, color, image. Nearby pixels are all different."""
    return ((np.arange(count * 3072) + first) % 251).astype(np.uint8).reshape(32, 32, 3, count)


def write(path: Path, images: Any, labels: Any, compressed: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": images, "y": labels}, do_compression=compressed)


def column(*labels: int) -> np.ndarray:
    return np.array(labels, np.uint8)[:, None]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with a tiny SVHN whose md5s count as the published ones."""
    folder = tmp_path / "root" / "svhn"
    write(folder / FILES["train_file"], pixels(4), column(1, 10, 5, 9))
    write(folder / FILES["test_file"], pixels(3, first=50), column(10, 2, 1), compressed=False)
    write(folder / FILES["extra_file"], pixels(2, first=100), column(3, 10))
    for attribute, name in FILES.items():
        md5 = hashlib.md5((folder / name).read_bytes()).hexdigest()
        monkeypatch.setattr(SVHN, attribute, replace(getattr(SVHN, attribute), digest=md5))
    return tmp_path / "root"


def error_of(root: Path, train: bool = True, extra: bool = False) -> str:
    with pytest.raises(DataError) as caught:
        SVHN(root=str(root), extra=extra).load(train)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read


def test_pixel_by_pixel(tiny: Path) -> None:
    for train, source, labels in ((True, pixels(4), [1, 0, 5, 9]), (False, pixels(3, first=50), [0, 2, 1])):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # another md5 would warn
            images, found = SVHN(root=str(tiny)).load(train)
        assert images.shape == (len(labels), 3, 32, 32)
        assert images.dtype == torch.uint8
        assert images.is_contiguous()
        assert found.tolist() == labels
        assert found.dtype == torch.int64
        for image in range(len(labels)):
            for row, col, color in ((0, 0, 0), (0, 31, 0), (31, 0, 0), (5, 7, 1), (7, 5, 2), (30, 31, 2)):
                assert images[image, color, row, col] == source[row, col, color, image]
        assert np.array_equal(images.numpy(), np.moveaxis(np.moveaxis(source, 3, 0), 3, 1))


def test_extra_images_follow_those_of_training(tiny: Path) -> None:
    images, labels = SVHN(root=str(tiny), extra=True).load(train=True)
    assert labels.tolist() == [1, 0, 5, 9, 3, 0]
    assert torch.equal(images[:4], SVHN(root=str(tiny)).load(train=True)[0])
    assert np.array_equal(images[4:].numpy(), pixels(2, first=100).transpose(3, 2, 0, 1))
    assert SVHN(root=str(tiny), extra=True).load(train=False)[1].tolist() == [0, 2, 1]


def test_extra_images_are_asked_for_only_if_wanted(tiny: Path, no_network: list[str]) -> None:
    (tiny / "svhn" / FILES["extra_file"]).unlink()
    SVHN(root=str(tiny)).prepare_data()
    SVHN(root=str(tiny)).load(train=True)
    assert no_network == []
    for act in (SVHN(root=str(tiny), extra=True).prepare_data, SVHN(root=str(tiny), extra=True).setup):
        with pytest.raises(DataError, match=r"cannot download extra_32x32\.mat"):
            act()


def test_other_types_of_labels(tiny: Path) -> None:
    for labels in (column(1, 10, 5, 9).astype("f8"), column(1, 10, 5, 9).T):
        write(tiny / "svhn" / FILES["train_file"], pixels(4), labels)
        with pytest.warns(UserWarning, match="has md5"):
            assert SVHN(root=str(tiny)).load(train=True)[1].tolist() == [1, 0, 5, 9]


def test_another_md5_is_a_warning(tiny: Path) -> None:
    path = tiny / "svhn" / FILES["test_file"]
    write(path, pixels(1), column(7))
    with pytest.warns(UserWarning, match="it is used anyway") as caught:
        assert SVHN(root=str(tiny)).load(train=False)[1].tolist() == [7]
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"{path} has md5 {hashlib.md5(path.read_bytes()).hexdigest()}, the published file has")


# Paths of the files


def test_published_files(tmp_path: Path, no_network: list[str]) -> None:
    md5s = {
        "train_file": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_file": "eb5a983be6a315427106f1b164d9cef3",
        "extra_file": "a93ce644f1a588dc4d68dda5feec44a7",
    }
    for attribute, md5 in md5s.items():
        file = getattr(SVHN, attribute)
        assert (file.folder, file.name, file.digest) == ("svhn", FILES[attribute], md5)
        with pytest.raises(DataError):
            file.find(None)
    assert no_network == [f"http://ufldl.stanford.edu/housenumbers/{FILES[attribute]}" for attribute in md5s]
    assert error_of(tmp_path / "mine") == (
        "cannot download train_32x32.mat (md5 e26dedcc434d2e4c54c9b2d4a06d8373): "
        f"put it at {tmp_path}/mine/svhn/train_32x32.mat; tried http://ufldl.stanford.edu/housenumbers/train_32x32.mat "
        "(ConnectionError: Name or service not known and a second line)"
    )


def test_downloaded_files(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> str:
        fetched.append((url, known_hash, fname, path))
        return str(tiny / "svhn" / fname)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    data = SVHN(root=str(tmp_path / "nowhere"), extra=True)
    data.prepare_data()
    cache = tmp_path / "cache" / "torchcaps" / "svhn"
    assert fetched == [
        (file.urls[0], f"md5:{file.digest}", file.name, cache)
        for file in (SVHN.train_file, SVHN.extra_file, SVHN.test_file)
    ]
    assert len(data.load(train=True)[1]) == 6


def test_the_environment_is_a_root(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCAPS_DATA", str(tiny))
    assert len(SVHN().load(train=True)[1]) == 4


# Damaged files


def test_every_truncation_is_an_error(tiny: Path, no_network: list[str]) -> None:
    for train, attribute in ((True, "train_file"), (False, "test_file")):
        path = tiny / "svhn" / FILES[attribute]
        raw = path.read_bytes()
        for length in [*range(0, len(raw), len(raw) // 50), len(raw) - 1]:
            path.write_bytes(raw[:length])
            message = error_of(tiny, train)
            assert message.startswith(f"{path}: ")
            md5 = getattr(SVHN, attribute).digest
            assert message.endswith(f"; the md5 should be {md5}: replace the file, or remove it to have it downloaded")
    assert no_network == []


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"y": column(1, 2)}, 'has no array of numbers "X"'),
        ({"X": pixels(2)}, 'has no array of numbers "y"'),
        ({"X": pixels(2).astype("f4"), "y": column(1, 2)}, '"X" is of type float32'),
        ({"X": "text", "y": column(1, 2)}, 'has no array of numbers "X"'),
        (
            {"X": pixels(2).transpose(3, 0, 1, 2), "y": column(1, 2)},
            '"X" has shape (2, 32, 32, 3)',
        ),
        ({"X": pixels(2)[..., 0], "y": column(1)}, '"X" has shape (32, 32, 3)'),
        ({"X": pixels(2)[:28, :28], "y": column(1, 2)}, '"X" has shape (28, 28, 3, 2)'),
        ({"X": pixels(2), "y": column(1)}, '"y" has shape (1, 1)'),
        ({"X": pixels(2), "y": column(1, 2, 3)}, '"y" has shape (3, 1)'),
        ({"X": pixels(2), "y": column(1, 0)}, "holds label 0"),
        ({"X": pixels(2), "y": column(1, 11)}, "holds label 11"),
        ({"X": pixels(2), "y": np.array([[1.5], [1]])}, "holds label 1.5"),
    ],
)
def test_well_formed_but_not_svhn(tiny: Path, variables: dict[str, Any], problem: str) -> None:
    path = tiny / "svhn" / FILES["train_file"]
    savemat(path, variables)
    said = error_of(tiny)
    assert said.startswith(f"{path}: {problem}")
    assert SVHN.train_file.digest in said


def test_not_a_file(tiny: Path) -> None:
    path = tiny / "svhn" / FILES["extra_file"]
    path.write_bytes(b"plainly no MATLAB file")
    assert error_of(tiny, extra=True).startswith(f"{path}: is not a MATLAB file of version 5 to 7.2; the md5 should be")
    path.unlink()
    path.mkdir()
    assert error_of(tiny, extra=True).startswith(f"{path}: cannot be read: Is a directory; the md5 should be")


# As a data module


def test_arguments_reach_the_batches(tiny: Path) -> None:
    data = SVHN(root=str(tiny), batch_size=4, shift=2, extra=True)
    data.setup()
    assert [len(labels) for _, labels in data.train_dataloader()] == [4, 2]
    images, labels = next(iter(data.test_dataloader()))
    assert images.shape == (3, *SVHN.shape)
    assert images.dtype == torch.float32
    assert labels.tolist() == [0, 2, 1]
    assert (data.shift, data.flip, data.extra) == (2, False, True)


@pytest.mark.filterwarnings("ignore:.*has md5")
def test_validation_images_are_held_out(tiny: Path) -> None:
    write(tiny / "svhn" / FILES["train_file"], pixels(40), column(*(k % 10 + 1 for k in range(40))))
    data = SVHN(root=str(tiny), val_size=10)
    data.setup("fit")
    assert data.train_set is not None
    assert data.val_set is not None
    assert data.val_set.labels.bincount().tolist() == [1] * 10
    assert len(data.train_set) == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"batch_size .* 0\b"),
        ({"shift": 32}, r"shift .* 32\b"),
        ({"shift": -1}, r"shift .* -1\b"),
        ({"val_size": -1}, r"val_size .* -1\b"),
        ({"num_workers": -1}, r"num_workers .* -1\b"),
    ],
)
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SVHN(**arguments)


@pytest.mark.skipif(
    not all((REAL / "svhn" / FILES[attribute]).is_file() for attribute in ("train_file", "test_file")),
    reason=f"no SVHN at {REAL}/svhn (set TORCHCAPS_DATA to a folder that has svhn/)",
)
def test_real_svhn() -> None:
    data = SVHN(root=str(REAL))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*it is used anyway")  # a copy with another md5 is fine too
        (train, train_labels), (test, test_labels) = data.load(train=True), data.load(train=False)
    assert train.shape == (73257, 3, 32, 32)
    assert test.shape == (26032, 3, 32, 32)
    # The label counts in descriptions of SVHN, of the digits 0 to 9.
    assert train_labels.bincount().tolist() == [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    assert test_labels.bincount().tolist() == [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]
