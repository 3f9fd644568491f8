"""Overlapping handwritten digits, made of MNIST while training."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from torchcaps.data.files import DataError
from torchcaps.data.images import ImageSet
from torchcaps.data.labelled import Batch
from torchcaps.data.mnist import MNIST
from torchcaps.data.order import Order
from torchcaps.data.streams import draws, splitmix64

SHIFT = 4  # pixels, in each direction
SIZE = 28 + 2 * SHIFT

# The streams of images. Validation and test do not depend on the run's seed.
STREAMS = {"fit": 0, "validate": 1, "test": 2}


class Overlays(Dataset[Batch]):
    """Images 0, 1, 2, ... without end, each of two digits on one another, or of one. Image k depends on the seed,
    on k and on the digits, and on nothing else.

    Args:
        digits: what the images are made of, at least two classes.
        seed: of the stream.
        length: how many images are one pass through a stream that is read from its beginning.
        single: probability of an image with one digit only.
        device: where images are made and returned.
        parts: whether each digit on its own is returned, too.
    """

    def __init__(
        self, digits: ImageSet, seed: int, length: int, single: float, device: torch.device, parts: bool = False
    ) -> None:
        self.seed, self.length, self.single, self.parts = seed, length, single, parts
        order = digits.labels.argsort(stable=True)
        self.images = digits.images[order].squeeze(1).to(device)
        self.labels = digits.labels[order].to(device)
        self.sizes = self.labels.bincount(minlength=MNIST.classes)
        self.starts = self.sizes.cumsum(0) - self.sizes
        if (self.sizes == len(self.labels)).any():
            raise DataError(f"all {len(self.labels)} digits are of one class: two different ones cannot be drawn")
        # Divided on the CPU: a GPU multiplies by 1/255, which can differ in the last bit.
        self.levels = (torch.arange(256) / 255).to(device)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return tuple(of_batch[0] for of_batch in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> Batch:
        index = torch.tensor(indices, device=self.labels.device)
        # Whether it has one digit; the two digits; how far each is down and right.
        drawn = draws(self.seed, index)
        single = drawn[:, 0] < int(self.single * 2**53)
        first = drawn[:, 1] % len(self.labels)
        # Digits are sorted by class: a draw among those before and after the first one's class.
        start, size = (values[self.labels[first]] for values in (self.starts, self.sizes))
        second = drawn[:, 2] % (len(self.labels) - size)
        second = torch.where(second < start, second, second + size)

        shifts = drawn[:, 3:7] % (2 * SHIFT + 1)
        lower = self._shifted(first, shifts[:, 0], shifts[:, 1])
        upper = self._shifted(second, shifts[:, 2], shifts[:, 3]) * ~single[:, None, None]
        # The sum of two bytes, clipped, without a wider type.
        images = lower + torch.minimum(upper, 255 - lower)
        labels = torch.zeros(len(index), MNIST.classes, device=index.device)
        labels.scatter_(1, self.labels[second, None], (~single[:, None]).float())
        labels.scatter_(1, self.labels[first, None], 1.0)
        batch = self.levels[images.int()].unsqueeze(1), labels
        if not self.parts:
            return batch
        parts = torch.zeros(len(index), MNIST.classes, SIZE, SIZE, dtype=torch.uint8, device=index.device)
        each = torch.arange(len(index), device=index.device)
        parts[each, self.labels[second]] = upper
        parts[each, self.labels[first]] = lower
        return *batch, self.levels[parts.int()].unsqueeze(2)

    def _shifted(self, digit: Tensor, down: Tensor, right: Tensor) -> Tensor:
        """The digits (n,) as (n, SIZE, SIZE), their corners moved down and right by 0 to 2 * SHIFT."""
        padded = pad(self.images[digit], (2 * SHIFT,) * 4)
        window = torch.arange(SIZE, device=digit.device)
        rows, columns = (2 * SHIFT - moved[:, None] + window for moved in (down, right))
        return padded[torch.arange(len(digit), device=digit.device)[:, None, None], rows[:, :, None], columns[:, None]]


class NewImages(Order):
    """Epoch e reads the images e * size to (e + 1) * size - 1."""

    def of_epoch(self, epoch: int) -> Tensor:
        return torch.arange(epoch * self.samples, (epoch + 1) * self.samples)


class MultiMNIST(MNIST):
    """MultiMNIST: two overlapping digits of different classes, 36 x 36, to be told both.

    Source: S. Sabour, N. Frosst and G. E. Hinton, Dynamic Routing Between Capsules, NeurIPS 2017, section 6.
    A digit of MNIST is drawn, and another of a different class, uniformly; each is moved by its own whole
    numbers of pixels, uniform over -4..4, down and again across; grey levels are added and clipped. The paper
    makes 60 million training and 10 million test images; here they are made while training, and the test takes
    10,000.

    Batches are images float32 in [0, 1] of shape (batch, 1, 36, 36) and labels float32 of shape (batch, 10),
    1 for the classes in the image and else 0. Training images are made of MNIST's training digits, validation
    images of those held out, test images of MNIST's test digits: `train_set`, `val_set` and `test_set` are the
    digits. No training image comes twice: an epoch continues where the one before ended. Image k of the training
    depends on `seed` and k alone, not on batches, workers or device; validation and test images are always the
    same. They are made on the Trainer's device; on the CPU without a Trainer or with workers.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        epoch_size: training images in an epoch.
        test_size: images of the test; and of the validation, if digits are held out for it.
        seed: of the training images.
        parts: batches have a third tensor, the digit of each class on its own, and zeros for those not in the image:
            float32 (batch, 10, 1, 36, 36). A decoder learns from them. They are not mirrored or resized: neither can
            their images be.
        options: see `ImageData`; all but `shift`. `val_size` counts digits.

    Raises:
        ValueError: an argument is out of range.
        DataError: as of `MNIST`, or the digits are all of one class.
    """

    shape = (1, SIZE, SIZE)
    single = 0.0  # the probability of an image with one digit only

    def __init__(
        self,
        root: str | None = None,
        epoch_size: int = 60_000,
        test_size: int = 10_000,
        seed: int = 0,
        parts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(root, shift=0, **options)  # each digit has its own
        for name, size in (("epoch_size", epoch_size), ("test_size", test_size)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if parts and (self.flip or self.resize):
            raise ValueError("parts do not fit mirrored or resized images: leave out flip and resize, or parts")
        self.epoch_size, self.test_size, self.seed, self.parts = epoch_size, test_size, seed, parts

    def part(self, stage: str) -> Overlays:
        digits = self._loaded(stage)
        assert isinstance(digits, ImageSet)
        seed, length = (self.seed, self.epoch_size) if stage == "fit" else (0, self.test_size)
        stream = int(splitmix64(seed, torch.tensor(STREAMS[stage])))
        device = torch.device("cpu")
        if self.trainer is not None and not self.num_workers:
            device = self.trainer.strategy.root_device
        return Overlays(digits, stream, length, self.single, device, self.parts)

    def order(self) -> Order:
        return NewImages(self.epoch_size, **self.order_options())


class DiverseMultiMNIST(MultiMNIST):
    """DiverseMultiMNIST: a single digit with probability 1/6, else two of different classes as in `MultiMNIST`.

    Source: Y.-H. H. Tsai, N. Srivastava, H. Goh and R. Salakhutdinov, Capsules with Inverted Dot-Product
    Attention Routing, ICLR 2020, appendix B.2. Arguments are those of `MultiMNIST`.
    """

    single = 1 / 6
