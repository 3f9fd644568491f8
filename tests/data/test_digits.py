"""scikit-learn's digits: real images, scaled to 0..255, in a fixed split."""

import torch
from sklearn.datasets import load_digits

from torchcaps.data import Digits


def keys(images: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_shapes_counts_and_scale() -> None:
    data = Digits()
    (train, train_labels), (test, test_labels) = data.load(train=True), data.load(train=False)
    assert train.shape == (1437, 1, 8, 8)
    assert test.shape == (360, 1, 8, 8)
    assert train.dtype == test.dtype == torch.uint8
    assert train_labels.dtype == test_labels.dtype == torch.int64
    # 17 gray levels over the full range: 255 / 16 = 15.9375 apart, rounded.
    levels = [round(level * 255 / 16) for level in range(17)]
    assert torch.cat([train, test]).unique().tolist() == levels
    assert levels[0] == 0
    assert levels[1] == 16
    assert levels[-1] == 255


def test_images_keep_their_labels() -> None:
    source = load_digits()
    label_of = {
        (image * 255 / 16).round().astype("uint8").tobytes(): int(label)
        for image, label in zip(source.images, source.target, strict=True)
    }
    assert len(label_of) == 1797  # all images are different, so an image identifies its label
    for train in (True, False):
        images, labels = Digits().load(train)
        assert [label_of[key] for key in keys(images)] == labels.tolist()


def test_split_is_fixed_stratified_and_disjoint() -> None:
    torch.manual_seed(1)
    train, train_labels = Digits().load(train=True)
    test, test_labels = Digits().load(train=False)
    torch.manual_seed(2)
    assert torch.equal(train, Digits().load(train=True)[0])
    assert torch.equal(test, Digits().load(train=False)[0])
    # Published accuracies refer to this split. These are the first labels of scikit-learn's split with seed 0.
    assert test_labels[:10].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3]
    assert not set(keys(train)) & set(keys(test))
    assert len(set(keys(train)) | set(keys(test))) == 1797
    share = test_labels.bincount() / (train_labels.bincount() + test_labels.bincount())
    assert ((share - 0.2).abs() < 0.005).all()
