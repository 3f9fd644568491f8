"""SVHN's pixels, its label 10, and its real files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from torchcaps.data import SVHN, DataError

FILES = ["train_32x32.mat", "test_32x32.mat"]


def pixels(count: int, first: int = 0) -> np.ndarray:
    """Images as in the files: row, column, color, image. Nearby pixels are all different."""
    return ((np.arange(count * 3072) + first) % 251).astype(np.uint8).reshape(32, 32, 3, count)


def column(*labels: int) -> np.ndarray:
    return np.array(labels, np.uint8)[:, None]


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "svhn").mkdir()
    savemat(tmp_path / "svhn" / FILES[0], {"X": pixels(4), "y": column(1, 10, 5, 9)}, do_compression=True)
    savemat(tmp_path / "svhn" / FILES[1], {"X": pixels(3, first=50), "y": column(10, 2, 1)})
    return str(tmp_path)


def test_pixel_by_pixel(root: str) -> None:
    for train, source, labels in ((True, pixels(4), [1, 0, 5, 9]), (False, pixels(3, first=50), [0, 2, 1])):
        images, found = SVHN(root, check_hashes=False).load(train)
        assert images.shape == (len(labels), 3, 32, 32)
        assert images.dtype == torch.uint8
        assert images.is_contiguous()
        assert found.tolist() == labels
        assert found.dtype == torch.int64
        for image in range(len(labels)):
            for row, col, color in ((0, 0, 0), (0, 31, 0), (31, 0, 0), (5, 7, 1), (7, 5, 2), (30, 31, 2)):
                assert images[image, color, row, col] == source[row, col, color, image]
        assert np.array_equal(images.numpy(), np.moveaxis(np.moveaxis(source, 3, 0), 3, 1))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"y": column(1, 2)}, "KeyError: 'X'"),
        ({"X": pixels(2).astype("f4"), "y": column(1, 2)}, "of torch.float32, expected one or more images"),
        ({"X": pixels(2)[:28, :28], "y": column(1, 2)}, "expected one or more images"),
        ({"X": pixels(2), "y": column(1, 2, 3)}, r"holds labels \(3,\), expected 2 from 0 to 9"),
        ({"X": pixels(2), "y": column(1, 11)}, "expected 2 from 0 to 9"),
    ],
)
def test_other_files(root: str, variables: dict[str, np.ndarray], problem: str) -> None:
    path = Path(root, "svhn", FILES[0])
    savemat(path, variables)
    with pytest.raises(DataError, match=f"^{path}: cannot be read .*{problem}.*{SVHN.train_file.digest}"):
        SVHN(root, check_hashes=False).load(train=True)


@pytest.mark.parametrize("real", ["svhn"], indirect=True)
def test_real_svhn(real: str) -> None:
    data = SVHN(real)
    (train, train_labels), (test, test_labels) = data.load(train=True), data.load(train=False)
    assert train.shape == (73257, 3, 32, 32)
    assert test.shape == (26032, 3, 32, 32)
    # The label counts in descriptions of SVHN, of the digits 0 to 9.
    assert train_labels.bincount().tolist() == [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    assert test_labels.bincount().tolist() == [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]
