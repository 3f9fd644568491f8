"""scikit-learn's digits: real images, scaled to 0..255, in a fixed split."""

import torch
from sklearn.datasets import load_digits

from torchcaps.data import ClutteredDigits, Digits, digits
from torchcaps.data.cluttered import FRAGMENT, with_fragments


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


def test_digits_are_read_where_scikit_learn_stores_them_elsewhere(monkeypatch) -> None:
    images, labels = Digits().load(train=True)
    monkeypatch.setattr(digits, "STORED", "nowhere.csv.gz")
    again, labels_again = Digits().load(train=True)
    assert torch.equal(again, images)
    assert torch.equal(labels_again, labels)


def contains(image: torch.Tensor, digit: torch.Tensor) -> list[torch.Tensor]:
    """What an image (1, 16, 16) has beside a digit (1, 8, 8), for each place where it has at least the digit."""
    places = [(row, column) for row in range(9) for column in range(9)]
    rests = []
    for row, column in places:
        moved = torch.zeros_like(image)
        moved[:, row : row + 8, column : column + 8] = digit
        if (image >= moved).all():
            rests.append(torch.where(image > moved, image, 0))
    return rests


def test_cluttered_digits_lie_among_fragments() -> None:
    data = ClutteredDigits(batch_size=64, val_size=100)
    data.setup()
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [1337, 100, 360]
    digits, labels = Digits().load(train=False)
    images = data.test_set.images
    assert images.shape == (360, 1, 16, 16)
    assert torch.equal(data.test_set.labels, labels)
    rests = [contains(image, digit) for image, digit in zip(images, digits, strict=True)]
    assert all(rests)
    assert sum(all(rest.any() for rest in each) for each in rests) > 180  # most have something beside the digit
    again = ClutteredDigits()
    torch.manual_seed(5)
    again.setup("test")
    assert torch.equal(again.test_set.images, images)  # always the same


def test_without_fragments_a_digit_is_alone_at_a_random_place() -> None:
    digits, _ = Digits().load(train=False)
    images, _ = ClutteredDigits(fragments=0).load(train=False)
    rests = [contains(image, digit) for image, digit in zip(images, digits, strict=True)]
    assert all(any(not rest.any() for rest in each) for each in rests)
    inked = images.flatten(1).bool().int().argmax(1) // 16  # first row with ink
    assert inked.unique().tolist() == list(range(9))
    data = ClutteredDigits(fragments=0)
    centered = data.load(train=True)[0][:64]
    moved = data.augment(centered)
    torch.testing.assert_close(moved.sum((1, 2, 3)), (centered.float() / 255).sum((1, 2, 3)))
    assert not torch.equal(moved, data.augment(centered))


def test_a_fragment_is_a_window_of_another_image_at_its_place() -> None:
    images = torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
    images[0], images[1] = 3, 200
    for seed in range(20):
        dark = with_fragments(images, 1, torch.Generator().manual_seed(seed))[0, 0]
        light = (dark == 200).nonzero()
        if len(light):  # not a window of its own
            assert len(light) == FRAGMENT**2
            assert (light.max(0).values - light.min(0).values).tolist() == [FRAGMENT - 1] * 2
            assert sorted(dark.unique().tolist()) == [3, 200]
            return
    raise AssertionError("no window of the other image in twenty draws")
