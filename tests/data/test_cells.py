"""Made cells: the same in every run, other ones in every part, and turned."""

import pytest
import torch
from loaded import loaded

from torchcaps.data import Cells

SIZES = {"train_size": 60, "val_size": 30, "test_size": 30}


@pytest.fixture(scope="module")
def cells() -> Cells:
    return loaded(Cells, **SIZES)


def test_shapes_and_classes(cells):
    assert (cells.shape, cells.names, cells.target) == ((1, 64, 64), ["background", "cell", "ring"], "masks")
    assert [len(part) for part in (cells.train_set, cells.val_set, cells.test_set)] == [60, 30, 30]
    images, masks = next(iter(cells.test_dataloader()))
    assert (images.shape, masks.shape) == ((30, 1, 64, 64), (30, 64, 64))
    assert torch.equal(masks.flatten(1).sum(1), cells.test_set.labels @ torch.arange(3))
    images, masks = cells.samples("validate", [3, 1])
    assert (images.shape, masks.shape) == ((2, 1, 64, 64), (2, 64, 64))
    assert Cells(size=32).shape == (1, 32, 32)
    assert list(Cells().val_dataloader()) == []


def test_the_rare_class_has_one_pixel_in_a_hundred():
    background, cell, ring = loaded(Cells, **SIZES | {"train_size": 500}).train_set.labels.double().mean(0) / 64**2
    assert 0.6 < background < 0.8
    assert 0.2 < cell < 0.4
    assert 0.008 < ring < 0.015


def test_each_image_has_a_seed_of_its_own(cells):
    again = loaded(Cells, train_size=20, val_size=0, test_size=30)
    assert torch.equal(again.train_set.images, cells.train_set.images[:20])
    assert torch.equal(again.train_set.masks, cells.train_set.masks[:20])
    assert torch.equal(again.test_set.images, cells.test_set.images)
    everything = torch.cat([x.images for x in (cells.train_set, cells.val_set, cells.test_set)]).flatten(1)
    assert len(everything.unique(dim=0)) == len(everything)


def test_the_test_shows_the_same_scenes_turned(cells):
    turned = loaded(Cells, **SIZES, test_angle=90.0)
    assert torch.equal(turned.val_set.images, cells.val_set.images)
    clockwise = cells.test_set.masks.rot90(-1, (1, 2))
    assert (turned.test_set.masks != clockwise).float().mean() < 1e-4  # pixels on a border may round to both sides
    assert not torch.equal(turned.test_set.masks, cells.test_set.masks)
    difference = turned.test_set.images.float() - cells.test_set.images.rot90(-1, (2, 3)).float()
    noise = 255 * 0.05 * 2**0.5  # both images have their own
    assert 0.95 * noise < difference.std() < 1.05 * noise
    some = loaded(Cells, **SIZES, test_angle=30.0).test_set.masks
    assert 0.5 < (some[:, [0, 0, -1, -1], [0, -1, 0, -1]] == 0).float().mean() < 0.9  # cells come into the corners


def test_cells_are_bright_and_rings_dark_in_the_middle(cells):
    images, masks = cells.train_set.images[:, 0].float(), cells.train_set.masks
    assert images[masks == 1].mean() > 2 * images[masks == 0].mean()
    assert images[masks == 2].std() > images[masks == 1].std()
