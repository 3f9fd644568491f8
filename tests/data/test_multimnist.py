"""MultiMNIST: its random numbers, its images against plain loops, and the independence of its streams."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from loaded import collect, loaded
from recorder import Recorder, small_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from torchcaps.data import DataError, DiverseMultiMNIST, MultiMNIST
from torchcaps.data.images import ImageSet
from torchcaps.data.multimnist import Overlays
from torchcaps.data.streams import splitmix64

CPU = torch.device("cpu")
MASK = 2**64 - 1


def by_hand(seed: int, index: int) -> int:
    """SplitMix64 in Python's integers."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


class Noise:
    """Replace MNIST by digits of noise in unequal classes, 90 for training and 40 for the test, all different."""

    def prepare_data(self) -> None:
        pass

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        count = 90 if train else 40
        generator = torch.Generator().manual_seed(count)
        images = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return images, torch.randint(10, (count,), generator=generator)


class Multi(Noise, MultiMNIST):
    pass


class Diverse(Noise, DiverseMultiMNIST):
    pass


def images_of(data: MultiMNIST, stage: str, indices: range) -> tuple[Tensor, Tensor]:
    return data.part(stage).__getitems__(list(indices))


# The random numbers


def test_splitmix64_is_the_published_one() -> None:
    # The output of splitmix64.c for the seed 1234567.
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [value & MASK for value in splitmix64(1234567, torch.arange(5)).tolist()] == first
    assert [by_hand(1234567, i) for i in range(5)] == first
    assert splitmix64(0, torch.tensor(0)).item() & MASK == 0xE220A8397B1DCDAF


def test_any_output_at_once() -> None:
    index = torch.randperm(1000)
    assert torch.equal(splitmix64(3, index), splitmix64(3, torch.arange(1000))[index])
    far = 2**62 + 12345
    assert splitmix64(7, torch.tensor(far)).item() & MASK == by_hand(7, far)


# The images


def slowly(images: np.ndarray, labels: list[int], seed: int, index: int, single: float) -> tuple[np.ndarray, list[int]]:
    """Image `index` of a stream, computed pixel by pixel."""
    order = sorted(range(len(labels)), key=lambda i: (labels[i], i))
    draws = [by_hand(seed, 8 * index + draw) >> 11 for draw in range(7)]
    first = order[draws[1] % len(order)]
    others = [i for i in order if labels[i] != labels[first]]
    second = others[draws[2] % len(others)]
    chosen = [first] if draws[0] < single * 2**53 else [first, second]
    image = np.zeros((1, 36, 36), np.float32)
    for row in range(36):
        for column in range(36):
            total = 0
            for which, digit in enumerate(chosen):
                down, right = (draws[3 + 2 * which + axis] % 9 for axis in range(2))
                if down <= row < down + 28 and right <= column < right + 28:
                    total += int(images[digit, 0, row - down, column - right])
            image[0, row, column] = np.float32(min(total, 255)) / np.float32(255)
    return image, [int(k in {labels[i] for i in chosen}) for k in range(10)]


@pytest.mark.parametrize(("kind", "single"), [(Multi, 0.0), (Diverse, 1 / 6)])
@pytest.mark.parametrize(("stage", "stream"), [("fit", 0), ("test", 2)])
def test_images_against_plain_loops(kind: type[MultiMNIST], single: float, stage: str, stream: int) -> None:
    data = loaded(kind, seed=5)
    digits, digit_labels = data.load(train=stage == "fit")
    seed = by_hand(5 if stage == "fit" else 0, stream)
    indices = [*range(12), 60_000, 10**12]
    images, labels = data.part(stage).__getitems__(indices)
    assert images.shape == (14, 1, 36, 36)
    assert images.dtype == labels.dtype == torch.float32
    sizes = set()
    for i, index in enumerate(indices):
        image, label = slowly(digits.numpy(), digit_labels.tolist(), seed, index, single)
        assert np.array_equal(images[i].numpy(), image)
        assert labels[i].tolist() == label
        sizes.add(sum(label))
    assert sizes == ({1, 2} if single else {2})


def test_one_class_only() -> None:
    digits = ImageSet(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.tensor([6, 6, 6]))
    with pytest.raises(DataError, match="all 3 digits are of one class: two different ones cannot be drawn"):
        Overlays(digits, 0, 1, 0.0, CPU)


# The streams


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_batches_and_workers_do_not_matter() -> None:
    sizes = {"epoch_size": 50, "test_size": 30}
    expected = {
        "train": [images_of(loaded(Diverse), "fit", range(50 * e, 50 * e + 50)) for e in range(2)],
        "test": [images_of(loaded(Diverse), "test", range(30))] * 2,
    }
    for arguments in ({"batch_size": 7}, {"batch_size": 64}, {"batch_size": 16, "num_workers": 2}):
        torch.manual_seed(random.randrange(1000))
        data = loaded(Diverse, **sizes, **arguments)
        for epoch in range(2):
            for part, loader in (("train", data.train_dataloader()), ("test", data.test_dataloader())):
                images, labels = collect(loader)
                assert torch.equal(images, expected[part][epoch][0])
                assert torch.equal(labels, expected[part][epoch][1])


def test_epochs_never_repeat_and_can_be_set() -> None:
    data = loaded(Multi, epoch_size=40, batch_size=40)
    epochs = [collect(data.train_dataloader())[0] for _ in range(3)]
    loader = data.train_dataloader()
    epochs += [collect(loader)[0] for _ in range(3)]
    assert torch.equal(torch.cat(epochs), images_of(data, "fit", range(240))[0])
    assert len({image.numpy().tobytes() for image in torch.cat(epochs)}) == 240
    loader.sampler.set_epoch(1)
    assert torch.equal(collect(loader)[0], epochs[1])
    assert torch.equal(collect(loader)[0], epochs[2])


def test_the_seed_is_that_of_the_training_alone() -> None:
    one, other = loaded(Multi, seed=1, val_size=20), loaded(Multi, seed=2, val_size=20)
    for stage, same in (("fit", False), ("validate", True), ("test", True)):
        images, others = (images_of(data, stage, range(20))[0] for data in (one, other))
        assert torch.equal(images, others) == same


def test_digits_of_the_parts_are_disjoint() -> None:
    data = loaded(Multi, val_size=30, test_size=25)
    digits = {stage: {d.numpy().tobytes() for d in data.part(stage).images} for stage in ("fit", "validate", "test")}
    assert [len(values) for values in digits.values()] == [60, 30, 40]
    assert len(set.union(*digits.values())) == 130
    assert digits["test"] == {digit.numpy().tobytes() for digit in data.load(train=False)[0]}
    val = data.val_dataloader()
    assert isinstance(val, DataLoader)
    assert len(collect(val)[1]) == 25
    assert loaded(Multi).val_dataloader() == []


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.*use of fork:DeprecationWarning",
)
def test_the_trainer_reads_the_same_images_resumed_or_not(tmp_path: Path) -> None:
    arguments = {"epoch_size": 30, "test_size": 20, "batch_size": 8, "val_size": 20}
    module, data, first = Recorder(), Multi(**arguments), small_trainer(2)
    first.fit(module, data)
    first.test(module, data, verbose=False)
    first.save_checkpoint(tmp_path / "two.ckpt")
    resumed = Recorder()
    small_trainer(4).fit(resumed, Multi(**arguments), ckpt_path=tmp_path / "two.ckpt", weights_only=True)

    train = torch.cat(module.seen["train"] + resumed.seen["train"])
    plain = loaded(Multi, **arguments)
    assert torch.equal(train, images_of(plain, "fit", range(120))[0])
    assert torch.equal(torch.cat(module.seen["test"]), images_of(plain, "test", range(20))[0])
    assert torch.equal(torch.cat(module.seen["val"][-3:]), images_of(plain, "validate", range(20))[0])


# Files and arguments


@pytest.mark.parametrize("real", ["mnist"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "classes", "ink"),
    [
        (MultiMNIST, [[0, 3], [4, 7], [5, 8], [4, 7], [0, 1]], 465442341),
        (DiverseMultiMNIST, [[0, 3], [4, 7], [5], [4], [0, 1]], 431701485),
    ],
)
def test_real_mnist(real: str, kind: type[MultiMNIST], classes: list[list[int]], ink: int) -> None:
    """Published accuracies refer to this stream: its first labels, and the sum of all gray levels."""
    data = kind(real)
    data.setup("test")
    images, labels = images_of(data, "test", range(10_000))
    assert [row.nonzero().flatten().tolist() for row in labels[:5]] == classes
    assert (images * 255).round().long().sum() == ink


@pytest.mark.parametrize("kind", [Multi, Diverse])
def test_parts_are_the_digits_of_the_same_images(kind):
    plain, data = kind(test_size=30), kind(test_size=30, parts=True)
    for either in (plain, data):
        either.setup("test")
    (images, labels), (same, also, parts) = (next(iter(either.test_dataloader())) for either in (plain, data))
    assert torch.equal(images, same)
    assert torch.equal(labels, also)
    assert parts.shape == (30, 10, 1, 36, 36)
    assert torch.equal(parts.flatten(2).any(2), labels > 0)
    torch.testing.assert_close(parts.sum(1).clamp(max=1), images)
    image, _, one = data.part("test")[7]
    assert torch.equal(image, images[7])
    assert torch.equal(one, parts[7])


def test_digits_on_their_own_fit_no_other_images() -> None:
    for options in ({"resize": 38}, {"flip": True}, {"distort": True}):
        with pytest.raises(
            ValueError, match="^parts are not mirrored, resized or distorted with the images: leave out flip, resize"
        ):
            Multi(parts=True, **options)
    data = Multi(resize=38, flip=True, ten_crop=True, test_size=3)
    data.setup("test")
    images, labels = next(iter(data.test_dataloader()))
    assert data.crops(images).shape == (3, 10, 1, 36, 36)
    assert labels.shape == (3, 10)


def test_only_diverse_images_have_any_number_of_labels():
    assert (MultiMNIST.target, DiverseMultiMNIST.target) == ("class", "labels")  # of the others, two are asked for
