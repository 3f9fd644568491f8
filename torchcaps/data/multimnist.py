"""MultiMNIST: overlapping digits of MNIST, made during training."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from torchcaps.data.files import DataError
from torchcaps.data.images import ImageSet
from torchcaps.data.labeled import Batch
from torchcaps.data.mnist import MNIST
from torchcaps.data.order import NewImages, Order
from torchcaps.data.streams import MULTI_TEST, MULTI_TRAIN, MULTI_VALIDATE, draws, stream
from torchcaps.utils.arguments import Count, checked

SHIFT = 4  # largest shift in each direction, in pixels
SIZE = 28 + 2 * SHIFT
STREAMS = {"fit": MULTI_TRAIN, "validate": MULTI_VALIDATE, "test": MULTI_TEST}


class Overlays(Dataset[Batch]):
    """An endless stream of images 0, 1, 2, ... of two overlapping digits, or of a single one.

    Image k depends on nothing but the seed, k and the digits.

    Args:
        digits: digits to make images of, from at least two classes.
        seed: seed of the stream.
        length: number of images for a loader that reads the stream once from its beginning.
        single: probability of an image with a single digit.
        device: device on which images are made and returned.
        parts: whether to return also each digit alone.
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
        # Divide on the CPU: a GPU multiplies by 1/255, which can differ in the last bit.
        self.levels = (torch.arange(256) / 255).to(device)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return tuple(batch[0] for batch in self.__getitems__([index]))

    @property
    def device(self) -> torch.device:
        return self.labels.device

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        index = torch.as_tensor(indices, device=self.device)
        # Draw 0: is there a single digit? Draws 1 and 2: the digits. Draws 3 to 6: their shifts down and right.
        drawn = draws(self.seed, index)
        single = drawn[:, 0] < int(self.single * 2**53)
        first = drawn[:, 1] % len(self.labels)
        # Digits are sorted by class: draw among those before and after the first digit's class.
        start, size = (values[self.labels[first]] for values in (self.starts, self.sizes))
        second = drawn[:, 2] % (len(self.labels) - size)
        second = torch.where(second < start, second, second + size)

        shifts = drawn[:, 3:7] % (2 * SHIFT + 1)
        lower = self._shifted(first, shifts[:, 0], shifts[:, 1])
        upper = self._shifted(second, shifts[:, 2], shifts[:, 3]) * ~single[:, None, None]
        # Add and clip two bytes without a wider type.
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
        """Return images (n, SIZE, SIZE) of the digits at indices (n,), moved down and right by 0 to 2 * SHIFT
        pixels."""
        padded = pad(self.images[digit], (2 * SHIFT,) * 4)
        window = torch.arange(SIZE, device=digit.device)
        rows, columns = (2 * SHIFT - moved[:, None] + window for moved in (down, right))
        return padded[torch.arange(len(digit), device=digit.device)[:, None, None], rows[:, :, None], columns[:, None]]


class MultiMNIST(MNIST):
    """MultiMNIST: images of two overlapping digits of different classes, 36 x 36. A network must name both.

    Source: S. Sabour, N. Frosst and G. E. Hinton, Dynamic Routing Between Capsules, NeurIPS 2017, section 6. A digit of
    MNIST is drawn uniformly, and a second one uniformly among those of other classes. Each moves by whole numbers of
    pixels, uniform over -4..4, down and across. Gray levels are added and clipped. The paper makes 60 million training
    and 10 million test images in advance. Here images are made during training, and the test has 10,000.

    Batches are images float32 in [0, 1] of shape (batch, 1, 36, 36) and labels float32 of shape (batch, 10), 1 for the
    classes in the image and 0 for the others. `train_set`, `val_set` and `test_set` are the digits that images are made
    of: MNIST's training digits, those held out from them, and MNIST's test digits. No training image comes twice: an
    epoch continues where the previous one ended. Training image k depends on `seed`, k and the digits alone, not on
    batches, workers or device. Validation and test images are always the same. Images are made on the Trainer's device,
    or on the CPU without a Trainer or with workers.

    Args:
        root: see `Published`.
        epoch_size: number of training images in an epoch.
        test_size: number of test images, and of validation images if digits are held out.
        seed: seed of the training images.
        parts: whether batches have a third tensor, from which a decoder learns: the digit of each class alone, 0 for
            classes that are not in the image, float32 (batch, 10, 1, 36, 36). Not with `flip` or `resize`, which would
            not change this tensor.
        options: options of `Published` and `ImageData` but `shift`. `val_size` is a number of digits.

    Raises:
        ValueError: an argument is out of range.
        DataError: see `MNIST`; or all digits have the same class.
    """

    shape = (1, SIZE, SIZE)
    single = 0.0  # probability of an image with a single digit

    @checked
    def __init__(
        self,
        root: str | None = None,
        epoch_size: Count = 60_000,
        test_size: Count = 10_000,
        seed: int = 0,
        parts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(root, shift=0, **options)  # each digit has its own shift already
        if parts and (self.flip or self.resize or self.distort):
            raise ValueError(
                "parts are not mirrored, resized or distorted with the images: leave out flip, resize and distort, or "
                "parts"
            )
        self.epoch_size, self.test_size, self.seed, self.parts = epoch_size, test_size, seed, parts

    def part(self, stage: str) -> Overlays:
        digits = self._loaded(stage)
        assert isinstance(digits, ImageSet)
        seed, length = (self.seed, self.epoch_size) if stage == "fit" else (0, self.test_size)
        device = torch.device("cpu")
        if self.trainer is not None and (self._is_resident or not self.num_workers):
            device = self.trainer.strategy.root_device
        return Overlays(digits, stream(seed, STREAMS[stage]), length, self.single, device, self.parts)

    def order(self) -> Order:
        return NewImages(self.epoch_size, **self.order_options())


class DiverseMultiMNIST(MultiMNIST):
    """DiverseMultiMNIST: images of a single digit with probability 1/6, otherwise of two as in `MultiMNIST`.

    Source: Y.-H. H. Tsai, N. Srivastava, H. Goh and R. Salakhutdinov, Capsules with Inverted Dot-Product Attention
    Routing, ICLR 2020, appendix B.2. The arguments are those of `MultiMNIST`.
    """

    single = 1 / 6
    target = "labels"
