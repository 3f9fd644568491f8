"""Segmented digits: which digit a pixel belongs to, and what parts are made of."""

import numpy as np
import pytest
import torch
from loaded import loaded
from torch import Tensor

from torchcaps.data import SegmentedDigits

SIZES = {"train_size": 20, "val_size": 10, "test_size": 10}


class Blocks(SegmentedDigits):
    """Digits that are full blocks: each has its own side, and one label by the part that it is from."""

    def prepare_data(self) -> None:
        pass

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        images = torch.zeros(60, 1, 28, 28, dtype=torch.uint8)
        images[:, :, 4:24, 6:22] = 255
        labels = torch.cat([torch.full((50,), 3), torch.full((10,), 5)]) if train else torch.full((60,), 7)
        return images, labels


def test_parts_are_made_of_different_digits():
    data = loaded(Blocks, **SIZES)
    assert data.names == ["background", *"0123456789"]
    for part, digit in ((data.train_set, 3), (data.val_set, 5), (data.test_set, 7)):
        assert part.masks.unique().tolist() == [0, digit + 1]
        assert part.labels.shape[1] == data.classes == 11
    again = loaded(Blocks, **SIZES | {"train_size": 5})
    assert torch.equal(again.train_set.images, data.train_set.images[:5])


def test_a_digit_and_its_pixels():
    data = loaded(Blocks, digits=1, fragments=0, **SIZES)
    for image, mask in zip(data.train_set.images[:, 0], data.train_set.masks, strict=True):
        assert torch.equal(image > 0, mask == 4)
        assert len(image.unique()) <= 2  # one brightness
        assert (mask == 4).sum() <= 20 * 16
    assert len(data.train_set.images.amax((1, 2, 3)).unique()) > 5
    assert data.train_set.images.amax((1, 2, 3)).min() >= 127


def test_the_upper_digit_counts():
    class Two(Blocks):
        def load(self, train: bool) -> tuple[Tensor, Tensor]:
            images, _ = super().load(train)
            return images, torch.arange(60) % 2

    data = loaded(Two, size=32, digits=2, fragments=0, **SIZES)
    overlapping = 0
    for image, mask in zip(data.train_set.images[:, 0], data.train_set.masks, strict=True):
        assert torch.equal(mask > 0, image > 0)
        levels = image.unique().tolist()[1:]
        # The pixels of one brightness are those of one digit; the lower one left nothing where the upper one is.
        assert all(len(mask[image == level].unique()) == 1 for level in levels if len(levels) == 2)
        overlapping += int((image > 0).sum() < 560)  # of 2 * 20 * 16, less what an edge cuts off
    assert overlapping > 5


def test_fragments_are_background_and_lie_below():
    data = loaded(Blocks, digits=1, fragments=40, **SIZES)
    alone = data.train_set.masks == 4
    images = data.train_set.images[:, 0]
    assert (images[~alone] > 0).float().mean() > 0.2
    assert all(len(image[mask].unique()) == 1 for image, mask in zip(images, alone, strict=True) if mask.any())


@pytest.mark.parametrize("real", ["mnist"], indirect=True)
def test_real_digits(real):
    data = SegmentedDigits(real, **SIZES)
    data.setup()
    images, masks = next(iter(data.test_dataloader()))
    assert (images.shape, masks.shape) == ((10, 1, 64, 64), (10, 64, 64))
    digits = np.unique(masks.numpy())
    assert digits[0] == 0
    assert len(digits) > 5
    assert images[:, 0][masks > 0].mean() > 3 * images[:, 0][masks == 0].mean()


def test_distorting_images_alone_is_refused():
    with pytest.raises(ValueError, match="^distort changes images and not their masks: leave it out$"):
        SegmentedDigits(distort=True)
