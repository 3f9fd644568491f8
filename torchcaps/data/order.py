"""Orders of samples. They depend on the run's seed and the epoch only, so a resumed run continues them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from torchcaps.data.streams import stream


def evenly_chosen(total: int, count: int) -> list[int]:
    """Return at most `count` of the indices 0 to `total - 1`, evenly spaced: samples may be sorted by class."""
    count = min(count, total)
    return [index * (total - 1) // max(count - 1, 1) for index in range(count)]


class Order(DistributedSampler[int]):
    """A shuffled order with every sample once in an epoch.

    An iteration begins at the epoch and batch that `position` returns; in a resumed run this may be within an epoch. If
    `position` returns None, an iteration is a whole epoch: that of `set_epoch`, or the one after the last iteration's.

    Several processes take the samples in turn. The processes' k-th batches together form the k-th batch of a single
    process, whose batch size is the sum of theirs. All processes have equally many batches: where the last samples are
    fewer than the processes, an idle process repeats a sample, which `share` ignores.

    The class is a DistributedSampler because Lightning replaces other samplers when there are several processes.

    Args:
        samples: number of samples in an epoch.
        batch_size: batch size of each process.
        seed: seed of the run, the same in all processes.
        processes: number of processes.
        rank: index of this process.
        position: function that returns the next epoch and batch, or None.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int,
        processes: int = 1,
        rank: int = 0,
        position: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        super().__init__(range(samples), processes, rank, seed=seed)  # type: ignore[arg-type]  # only its length is used
        self.samples, self.batch_size, self.position = samples, batch_size, position

    def __len__(self) -> int:
        own = len(range(self.rank, self.samples, self.num_replicas))
        return own + (0 < self._in_batch(self._last) <= self.rank)

    def __iter__(self) -> Iterator[int]:
        epoch, batch = self.position() or (self.epoch, 0)
        self.epoch = epoch + 1
        return iter(self.of_process(epoch)[batch * self.batch_size :].tolist())

    def share(self, batch: int) -> tuple[int, int]:
        """Return how many samples of a batch are this process's own, and how many all processes have in it together."""
        together = self._in_batch(batch)
        return len(range(self.rank, together, self.num_replicas)), together

    def of_epoch(self, epoch: int) -> Tensor:
        """Return the order of an epoch over all processes: indices `(samples,)`."""
        return torch.randperm(self.samples, generator=self.generator(epoch))

    def of_process(self, epoch: int) -> Tensor:
        """Return this process's part of an epoch: indices `(len(self),)`."""
        places = torch.arange(self.rank, len(self) * self.num_replicas, self.num_replicas)
        return self.of_epoch(epoch)[places % self.samples]

    def generator(self, epoch: int) -> torch.Generator:
        """Return the random generator of an epoch's order."""
        return torch.Generator().manual_seed(stream(self.seed, epoch))

    @property
    def _together(self) -> int:
        """Batch size of all processes together."""
        return self.batch_size * self.num_replicas

    @property
    def _last(self) -> int:
        """Number of the last batch."""
        return (self.samples - 1) // self._together

    def _in_batch(self, batch: int) -> int:
        """Return the number of samples that all processes have in a batch."""
        return min(self._together, self.samples - batch * self._together)


class AsStored(Order):
    """Every sample once, in the order of the data set, whatever the seed and the epoch: for validation and tests."""

    def of_epoch(self, epoch: int) -> Tensor:
        return torch.arange(self.samples)


class NewImages(Order):
    """New samples in every epoch of an endless stream: epoch e has the indices e * samples to (e + 1) * samples - 1."""

    def of_epoch(self, epoch: int) -> Tensor:
        return torch.arange(epoch * self.samples, (epoch + 1) * self.samples)


class ByLength(Order):
    """A random order with every sample once in an epoch, in which the samples of a batch have about equal lengths.

    Random samples for POOL batches at a time are sorted by length and cut into batches, whose order is then shuffled.
    These are the batches of all processes together.

    Args:
        lengths: length of each sample.
        options: the arguments of `Order` after `samples`.
    """

    POOL = 50  # batches

    def __init__(self, lengths: np.ndarray, *options: Any, **named: Any) -> None:
        super().__init__(len(lengths), *options, **named)
        self.lengths = torch.from_numpy(lengths)

    def of_epoch(self, epoch: int) -> Tensor:
        generator, size = self.generator(epoch), self._together
        found: list[Tensor] = []
        for pool in torch.randperm(self.samples, generator=generator).split(self.POOL * size):
            batches = pool[self.lengths[pool].argsort()].split(size)
            whole = [batch for batch in batches if len(batch) == size]
            found += [whole[i] for i in torch.randperm(len(whole), generator=generator).tolist()]
            found += batches[len(whole) :]  # an incomplete batch must be last: it would shift all those after it
        return torch.cat(found)
