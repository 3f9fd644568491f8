"""Images with a class of each pixel: sets in memory, and changes that move images and masks together."""

import numpy as np
import pytest
import torch
from recorder import Recorder, small_trainer
from torch import Tensor

from torchcaps.data import Cells, SegmentedDigits
from torchcaps.data.labeled import IGNORED
from torchcaps.data.masks import MaskSet, as_targets, pixel_counts


def small_set() -> MaskSet:
    """Five images of 2 x 3 pixels with two classes; the masks have one pixel that does not count."""
    images = torch.arange(5 * 6, dtype=torch.uint8).view(5, 1, 2, 3)
    masks = torch.tensor([[0, 1, 1], [0, 0, 255]], dtype=torch.uint8).repeat(5, 1, 1)
    masks[3] = 1
    return MaskSet(images, masks, pixel_counts(masks, 2))


def numbered(shape: tuple[int, ...], classes: int = 3) -> tuple[Tensor, Tensor]:
    """Images whose pixels all differ, so that each tells where it is from, and random masks, some of them -100."""
    images = (torch.arange(1, 1 + shape[-1] * shape[-2]) / 2**14).view(1, 1, *shape[-2:]).repeat(shape[0], 1, 1, 1)
    masks = torch.randint(-1, classes, (shape[0], *shape[-2:]), generator=torch.Generator().manual_seed(0))
    return images, masks.masked_fill(masks < 0, IGNORED)


def test_a_set_in_memory():
    samples = small_set()
    assert samples.labels.tolist() == [[3, 2]] * 3 + [[0, 6]] + [[3, 2]]
    images, masks = samples.__getitems__([3, 0])
    assert images.dtype == torch.float32
    assert torch.equal(images, samples.images[[3, 0]] / 255)
    assert masks.dtype == torch.int64
    assert masks.tolist() == [[[1] * 3] * 2, [[0, 1, 1], [0, 0, IGNORED]]]
    image, mask = samples[0]
    assert (image.shape, mask.shape, len(samples)) == ((1, 2, 3), (2, 3), 5)
    part = samples.subset(np.array([3, 4]))
    assert torch.equal(part.images, samples.images[3:])
    assert part.labels.tolist() == [[0, 6], [3, 2]]
    assert torch.equal(part.__getitems__(torch.tensor([0]))[1], masks[:1])
    assert samples.on(torch.device("cpu")) is samples
    there = samples.on(torch.device("meta"))
    assert {x.device.type for x in (there.images, there.masks, there.labels)} == {"meta"}


def test_shuffled_masks_stay_with_their_numbers_of_pixels():
    samples = small_set()
    shuffled = next(x for x in map(samples.with_shuffled_labels, range(9)) if not torch.equal(x.labels, samples.labels))
    assert torch.equal(shuffled.images, samples.images)
    assert torch.equal(shuffled.labels, pixel_counts(shuffled.masks, 2))
    assert torch.equal(shuffled.labels.sum(0), samples.labels.sum(0))


def test_bytes_become_targets():
    assert as_targets(torch.tensor([0, 254, 255], dtype=torch.uint8)).tolist() == [0, 254, IGNORED]


@pytest.mark.parametrize("padding", ["constant", "replicate"])
def test_shift_and_flip_move_each_mask_with_its_image(padding):
    data = Cells(size=16, shift=3, flip=True)
    data.padding = padding
    images, masks = numbered((64, 1, 16, 16))
    torch.manual_seed(0)
    moved, targets = data.augmented((images, masks))
    assert (moved.shape, targets.shape, targets.dtype) == (images.shape, masks.shape, torch.int64)
    mirrored = set()
    for image, target, mask in zip(moved[:, 0], targets, masks, strict=True):
        # The number of a pixel says where it was; a class belongs to it unless it came in from outside.
        places = (image * 2**14).round().long() - 1
        step = int(places[8, 9] - places[8, 8])
        mirrored.add(step)
        row, column = places[8, 8] // 16, places[8, 8] % 16
        for y in range(16):
            for x in range(16):
                from_row, from_column = int(row) + y - 8, int(column) + step * (x - 8)
                inside = 0 <= from_row < 16 and 0 <= from_column < 16
                assert target[y, x] == (mask[from_row, from_column] if inside else IGNORED)
                if inside:
                    assert places[y, x] == 16 * from_row + from_column
    assert mirrored == {1, -1}
    torch.manual_seed(0)
    assert torch.equal(data.augment(images), moved)  # images move as they do without masks


def test_without_augmentation_nothing_changes():
    images, masks = numbered((2, 1, 16, 16))
    moved, targets = Cells(size=16).augmented((images, masks))
    assert torch.equal(moved, images)
    assert torch.equal(targets, masks)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:.*log_every_n"
)
def test_a_trainer_moves_both_in_training_alone():
    class Recording(Recorder):
        def training_step(self, batch, index):
            self.masks = batch[1]
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            super().validation_step(batch, index)
            self.val_masks = batch[1]

    data = Cells(size=16, train_size=8, val_size=4, test_size=2, shift=5, batch_size=8, num_workers=0)
    module = Recording()
    small_trainer().fit(module, data)
    assert (module.masks == IGNORED).any()
    images, masks = data.val_set.__getitems__([0, 1, 2, 3])
    assert torch.equal(module.seen["val"][-1], images)
    assert torch.equal(module.val_masks, masks)


@pytest.mark.parametrize("options", [{"resize": 70}, {"resize": 70, "ten_crop": True}])
@pytest.mark.parametrize("kind", [Cells, SegmentedDigits])
def test_images_alone_are_not_resized(kind, options):
    with pytest.raises(ValueError, match="^resize and ten_crop change images and not their masks: leave both out$"):
        kind(**options)
