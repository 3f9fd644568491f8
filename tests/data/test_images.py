"""Laws of every image set: fixed splits, float batches, exact shifts, crops and mirror images, each in its stage."""

import colorsys
import pickle
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from recorder import Recorder, small_trainer
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.data import SST, DataError, ImageData, LabeledData
from torchcaps.data.images import ImageSet


class Toy(ImageData):
    """90 training and 30 test images of 2 x 6 x 7, 3 classes. No pixel is zero, so every shift is visible."""

    classes = 3
    shape = (2, 6, 7)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        count = 90 if train else 30
        generator = torch.Generator().manual_seed(count)
        images = torch.randint(1, 256, (count, 2, 6, 7), dtype=torch.uint8, generator=generator)
        return images, torch.arange(count) % 3


def test_a_batch_is_indexed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Toy(batch_size=16)
    data.setup("test")
    image, label = data.test_dataloader().dataset[3]
    images, labels = next(iter(data.test_dataloader()))
    assert torch.equal(image, images[3])
    assert label == labels[3]
    monkeypatch.setattr(ImageSet, "__getitem__", None)
    assert len(next(iter(data.test_dataloader()))[1]) == 16


def test_loader_parts_pickle_for_worker_processes() -> None:
    data = Toy()
    data.setup("test")
    loader = data.test_dataloader()
    dataset, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
    images, labels = collate(dataset.__getitems__([0, 5]))
    assert images.shape == (2, 2, 6, 7)
    assert labels.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("stage", "parts"), [("fit", [True]), ("validate", [True]), ("test", [False]), (None, [True, False])]
)
def test_setup_loads_what_the_stage_needs_once(stage: str | None, parts: list[bool]) -> None:
    loaded = []

    class Counting(Toy):
        def load(self, train: bool) -> tuple[Tensor, Tensor]:
            loaded.append(train)
            return super().load(train)

    data = Counting(val_size=30)
    data.setup(stage)
    data.setup(stage)
    assert loaded == parts


@pytest.mark.parametrize("data", [Toy(), SST()])
@pytest.mark.parametrize("stage", ["fitt", ["fit"]])
def test_stages_that_there_are_not(data: LabeledData, stage: Any) -> None:
    with pytest.raises(ValueError, match="stage must be one of 'fit', 'validate', 'test', 'predict', None, got"):
        data.setup(stage)


def test_loader_before_setup_says_what_to_call() -> None:
    data = Toy(val_size=30)
    for loader, stage in ((data.train_dataloader, "fit"), (data.val_dataloader, "validate")):
        with pytest.raises(RuntimeError, match=rf'setup\("{stage}"\)'):
            loader()
    with pytest.raises(ValueError, match="^stage must be one of 'fit', 'validate', 'test', got 'predict'$"):
        data.part("predict")
    with pytest.raises(RuntimeError, match=r'setup\("test"\)'):
        data.test_dataloader()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shift": 6}, r"shift .* 6\b"),
        ({"resize": 5}, r"resize .* 5\b"),
        ({"jitter": 0.6}, r"jitter .* 0\.6\b"),
        ({"jitter": 0.2}, "jitter is for color images of 3 channels, and these have 2: set it to 0"),
        (
            {"ten_crop": True},
            "ten_crop needs resize, .* that is cropped: set resize to more than 6 pixels",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Toy(**arguments)


@pytest.mark.parametrize("val_size", [2, 88, 90, 1000])
def test_val_size_must_leave_every_class_in_both_parts(val_size: int) -> None:
    data = Toy(val_size=val_size)
    for _ in range(2):  # a failed setup leaves nothing that a second one takes for complete
        with pytest.raises(DataError, match=f"0 or from 3 to 87 .*got {val_size}"):
            data.setup("fit")


def test_no_val_size_is_right_for_too_few_images() -> None:
    class Few(Toy):
        def load(self, train: bool) -> tuple[Tensor, Tensor]:
            images, labels = super().load(train)
            return images[:4], labels[:4]

    with pytest.raises(DataError, match="val_size must be 0 for 4 training images of 3 classes, got 3"):
        Few(val_size=3).setup("fit")


def test_shift_and_flip_are_independent() -> None:
    images = torch.rand(5000, 2, 6, 7) + 0.1
    augmented = Toy(shift=1, flip=True).augment(images)
    padded = pad(images, (1, 1, 1, 1))
    counts: Counter[tuple[bool, int, int]] = Counter()
    for mirrored in (False, True):
        source = padded.flip(-1) if mirrored else padded
        for down in range(3):
            for right in range(3):
                moved = source[..., down : down + 6, right : right + 7]
                counts[mirrored, down, right] = int((moved == augmented).flatten(1).all(1).sum())
    assert counts.total() == 5000
    assert min(counts.values()) > 5000 / 18 - 5 * 16  # a deviation is 16
    assert max(counts.values()) < 5000 / 18 + 5 * 16


# Resizing and cropping


class Color(Toy):
    """8 color images of 4 x 4."""

    shape = (3, 4, 4)

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(int(train))
        return torch.randint(1, 256, (9, 3, 4, 4), dtype=torch.uint8, generator=generator), torch.arange(9) % 3


def coordinates(count: int, side: int) -> Tensor:
    """Images (count, 3, side, side) with pixels 100 * row + column + 1, of the size that `resize` gives."""
    rows = torch.arange(side, dtype=torch.float32)
    return (100 * rows[:, None] + rows + 1).expand(count, 3, side, side)


def test_enlarging_is_bilinear() -> None:
    class Pair(Toy):
        shape = (1, 2, 2)

    # At twice the size, new pixels lie at 1/4 and 3/4 between the old ones. Beyond the outer ones nothing changes.
    row = torch.tensor([0.0, 0.25, 0.75, 1.0])
    image = torch.tensor([[0.0, 1.0], [2.0, 3.0]])[None, None]
    whole = row + 2 * row[:, None]
    data = Pair(resize=4, ten_crop=True)
    torch.testing.assert_close(data.center(image)[0, 0], whole[1:3, 1:3])
    torch.testing.assert_close(data.crops(image)[0, 1, 0], whole[:2, 2:])
    assert data.augment(image).shape == (1, 1, 2, 2)


def test_the_shorter_side_is_what_resize_says() -> None:
    assert Toy(resize=12)._enlarged(torch.rand(3, 2, 6, 7)).shape == (3, 2, 12, 14)
    assert Toy(resize=12).center(torch.rand(3, 2, 6, 7)).shape == (3, 2, 6, 7)


def test_ten_crops_by_hand() -> None:
    images = coordinates(2, side=7) * torch.tensor([1.0, -1.0])[:, None, None, None]
    crops = Color(resize=7, ten_crop=True).crops(images)
    assert crops.shape == (2, 10, 3, 4, 4)
    # The image is three pixels larger each way: corners begin at 0 or 3, the center at 1.
    assert crops[0, :, 0, 0, 0].tolist() == [1, 4, 301, 304, 102, 4, 7, 304, 307, 105]
    assert crops[0, :, 0, 3, 3].tolist() == [304, 307, 604, 607, 405, 301, 304, 601, 604, 402]
    assert crops[0, 3, 2].tolist() == [[100 * row + column + 1 for column in range(3, 7)] for row in range(3, 7)]
    assert crops[0, 8, 1].tolist() == [[100 * row + column + 1 for column in range(6, 2, -1)] for row in range(3, 7)]
    assert torch.equal(crops[1], -crops[0])


def test_the_center() -> None:
    for side, first in ((4, 1), (5, 1), (6, 102), (7, 102), (8, 203)):
        center = Color(resize=side).center(coordinates(2, side))
        assert center.shape == (2, 3, 4, 4)
        assert torch.equal(center[1, 2] - first, coordinates(1, 4)[0, 0] - 1)
        assert torch.equal(center, Color(resize=side).crops(coordinates(2, side)))


def test_random_crops_are_anywhere_and_each_image_has_its_own() -> None:
    cropped = Color(resize=7).augment(coordinates(6400, side=7))
    assert cropped.shape == (6400, 3, 4, 4)
    first = cropped[:, :1, :1, :1]
    assert torch.equal(cropped - first, (coordinates(1, 4) - 1).expand_as(cropped))
    counts = Counter(first.flatten().tolist())
    assert set(counts) == {100 * down + right + 1 for down in range(4) for right in range(4)}
    assert max(abs(count - 400) for count in counts.values()) < 5 * 20  # a deviation is 19.4


def test_random_crops_with_a_shift_also_begin_outside() -> None:
    cropped = Color(resize=5, shift=1).augment(coordinates(1600, side=5))
    windows = pad(coordinates(1, side=5), (1, 1, 1, 1)).unfold(2, 4, 1).unfold(3, 4, 1)[0, 0].flatten(0, 1)
    matches = (windows == cropped[:, :1]).flatten(2).all(2)
    assert matches.sum(1).eq(1).all()
    assert matches.shape == (1600, 16)
    assert (matches.sum(0) - 100).abs().max() < 5 * 10


def test_bytes_become_floats() -> None:
    images = torch.randint(256, (4, 3, 4, 4), dtype=torch.uint8)
    for floats in (Color().augment(images), Color().center(images), Color().crops(images)):
        assert torch.equal(floats, images.float() / 255)


# Jitter


def test_jitter_of_a_gray_image_is_its_brightness() -> None:
    # A uniform gray image has no contrast, no saturation and no hue.
    gray = torch.full((4000, 3, 4, 4), 0.5)
    jittered = Color(jitter=0.2).augment(gray)
    assert torch.allclose(jittered, jittered[:, :1, :1, :1].expand_as(jittered), atol=1e-5)
    factors = jittered[:, 0, 0, 0] / 0.5
    assert factors.min() >= 0.8 - 1e-5
    assert factors.max() <= 1.2 + 1e-5
    counts = torch.histc(factors, 10, 0.8, 1.2)  # one per image, uniform
    assert (counts - 400).abs().max() < 5 * 20


def test_jitter_turns_the_hue() -> None:
    red = torch.tensor([0.6, 0.4, 0.4])[:, None, None].expand(1000, 3, 4, 4)
    hues = [colorsys.rgb_to_hsv(*pixel)[0] for pixel in Color(jitter=0.2).augment(red)[:, :, 0, 0].tolist()]
    hues = [hue - round(hue) for hue in hues]
    assert max(map(abs, hues)) <= 0.2 + 1e-4
    assert min(hues) < -0.19
    assert max(hues) > 0.19


@pytest.mark.parametrize("make", [ImageData.augment, ImageData.center, ImageData.crops])
@pytest.mark.parametrize(
    ("data", "images", "expected"),
    [
        (Color(), torch.rand(2, 3, 28, 28), r"\(n, 3, 4, 4\), got \(2, 3, 28, 28\)"),
        (Color(shift=1), torch.rand(2, 1, 4, 4), r"\(n, 3, 4, 4\), got \(2, 1, 4, 4\)"),
        (Color(jitter=0.1), torch.rand(3, 4, 4), r"\(n, 3, 4, 4\), got \(3, 4, 4\)"),
        (Color(resize=5), torch.rand(2, 3, 6, 6), r"\(n, 3, 4, 4\) or \(n, 3, 5, 5\), got \(2, 3, 6, 6\)"),
        (Color(resize=7, ten_crop=True), torch.rand(2, 3, 7, 4), r"\(n, 3, 7, 7\), got \(2, 3, 7, 4\)"),
    ],
)
def test_images_of_another_shape(make: Any, data: ImageData, images: Tensor, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^Color has images of shape {expected}|or {expected}: give a batch"):
        make(data, images)


def test_images_of_another_type() -> None:
    for images in (torch.ones(2, 3, 4, 4).long(), [[1.0]], None):
        with pytest.raises(TypeError, match="images must be "):
            Color().center(images)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_precision_of_the_run_stays(dtype: torch.dtype) -> None:
    data, images = Color(resize=6, shift=1, jitter=0.5, flip=True, ten_crop=True), torch.rand(8, 3, 4, 4).to(dtype)
    for made in (data.augment(images), data.center(images), data.crops(images)):
        assert made.dtype == dtype
        assert made.min() >= 0
        assert made.max() <= 1


def test_only_training_is_random() -> None:
    data, images = Color(resize=6, shift=1, jitter=0.5, flip=True, ten_crop=True), torch.rand(8, 3, 4, 4)
    plain = Color(resize=6, ten_crop=True)
    for _ in range(3):
        assert torch.equal(data.center(images), plain.center(images))
        assert torch.equal(data.crops(images), plain.crops(images))


# Three warnings of Lightning that do not apply: images in memory need no workers, there is no validation on purpose,
# and the last one is between Lightning and torch 2.13.
quiet = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:Total length of `list` across ranks is zero",
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
)


@quiet
def test_trainer_augments_training_batches_only() -> None:
    data, module, trainer = (
        Toy(batch_size=20, shift=1, val_size=30, flip=True),
        Recorder(),
        small_trainer(num_sanity_val_steps=1),
    )
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)

    # One more validation batch than the set has: the sanity check's.
    val = torch.cat(module.seen["val"][1:])
    assert torch.equal(val, data.val_set.images.float() / 255)
    assert torch.equal(module.seen["val"][0], val[:20])
    assert torch.equal(torch.cat(module.seen["test"]), data.test_set.images.float() / 255)

    train, originals = torch.cat(module.seen["train"]), data.train_set.images.float() / 255
    assert len(train) == 60
    # A shift of one cannot remove this pixel, which identifies the original of an image.
    padded = pad(originals, (1, 1, 1, 1))
    windows = padded.unfold(2, 6, 1).unfold(3, 7, 1)  # (60, 2, 3, 3, 6, 7): every original with all nine shifts
    straight, mirrored = (
        (windows[None] == images[:, None, :, None, None]).flatten(5).all(-1).all(2)
        for images in (train, train.flip(-1))
    )
    assert straight.any()
    assert mirrored.any()
    matches = straight | mirrored
    assert (matches.flatten(1).sum(1) == 1).all(), "a training image is not one shift of one original"
    assert (matches.flatten(2).any(2).sum(0) == 1).all(), "an original is missing or came twice"
    assert matches.flatten(2).any(0).any(0).sum() == 9


@quiet
def test_trainer_crops_as_the_stage_wants() -> None:
    data, module, trainer = (
        Color(batch_size=9, resize=6, val_size=3, ten_crop=True),
        Recorder(),
        small_trainer(num_sanity_val_steps=1),
    )
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    every = range(9)
    assert module.seen["train"][0].shape == (6, 3, 4, 4)
    originals = data._enlarged(data.train_set.__getitems__([*every][:6])[0]).unfold(2, 4, 1).unfold(3, 4, 1)
    for image in module.seen["train"][0]:
        assert (originals == image[None, :, None, None]).flatten(4).all(4).all(1).sum() == 1
    assert torch.equal(module.seen["val"][1], data.center(data.val_set.__getitems__([0, 1, 2])[0]))
    test = data.test_set.__getitems__([*every])[0]
    assert torch.equal(module.seen["test"][0], data.crops(test))
    assert module.seen["test"][0].shape == (9, 10, 3, 4, 4)


@pytest.mark.parametrize("package", ["lightning", "kornia", "pooch", "sklearn", "PIL"])
def test_missing_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {package, *sys.modules}:  # whether another test has imported it or not
        if name.split(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
        if name.startswith("torchcaps.data"):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as caught:
        import torchcaps.data  # noqa: F401
    assert package in str(caught.value)
    assert 'pip install "torchcaps[train]"' in str(caught.value)
