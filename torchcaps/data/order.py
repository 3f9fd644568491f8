"""Orders of samples. They depend on the run's seed and the epoch only, so a resumed run continues them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from torchcaps.data.streams import splitmix64, stream


def evenly_chosen(total: int, count: int) -> list[int]:
    """Return at most `count` of the indices 0 to `total - 1`, evenly spaced: samples may be sorted by class."""
    count = min(count, total)
    return [index * (total - 1) // max(count - 1, 1) for index in range(count)]


class Order(DistributedSampler[int]):
    """A shuffled order with every sample once in an epoch.

    With `labels` an epoch has as many samples, equally many of each class up to one. Those of a class are taken in
    turn, in a random order that is another one in every turn: a small class comes several times in an epoch, and of a
    large one the next epoch takes the samples that this one has left out.

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
        labels: class of each sample, `(samples,)`, for equally many samples of each class; None for every sample once.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int,
        processes: int = 1,
        rank: int = 0,
        position: Callable[[], tuple[int, int] | None] = lambda: None,
        labels: Tensor | None = None,
    ) -> None:
        super().__init__(range(samples), processes, rank, seed=seed)  # type: ignore[arg-type]  # only its length is used
        self.samples, self.batch_size, self.position = samples, batch_size, position
        self.of_class: Sequence[Tensor] | None = None
        if labels is not None:
            self.of_class = labels.argsort(stable=True).split(labels.unique(return_counts=True)[1].tolist())

    def __len__(self) -> int:
        in_full_rounds = len(range(self.rank, self.samples, self.num_replicas))
        return in_full_rounds + (0 < self._in_batch(self._last) <= self.rank)

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
        return self.shuffled(epoch, self.generator(epoch))

    def shuffled(self, epoch: int, generator: torch.Generator) -> Tensor:
        """Return the samples of an epoch in a random order: indices `(samples,)`."""
        order = torch.randperm(self.samples, generator=generator)
        return order if self.of_class is None else self._classes_in_turn(self.of_class, epoch)[order]

    def _classes_in_turn(self, of_class: Sequence[Tensor], epoch: int) -> Tensor:
        """Return a sample of each class in turn, given the samples of each class. Epochs go on where the one before
        ended: place p, counted from the first epoch on, has the next sample of class p mod classes."""
        chosen, first = torch.empty(self.samples, dtype=torch.long), epoch * self.samples
        for k, members in enumerate(of_class):
            start = (k - first) % len(of_class)  # place of the first sample of this class in this epoch
            taken = torch.arange(first + start, first + self.samples, len(of_class)) // len(of_class)
            before = int(taken[0]) // len(members)  # turns that were complete before this epoch
            keys = torch.arange(before * len(members), (int(taken[-1]) // len(members) + 1) * len(members))
            keys = splitmix64(stream(self.seed, -1, k), keys)  # no epoch has the number -1
            turns = members[keys.view(-1, len(members)).argsort(1)].flatten()
            chosen[start :: len(of_class)] = turns[taken - before * len(members)]
        return chosen

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
        ordered: list[Tensor] = []
        for pool in self.shuffled(epoch, generator).split(self.POOL * size):
            batches = pool[self.lengths[pool].argsort()].split(size)
            whole = [batch for batch in batches if len(batch) == size]
            ordered += [whole[i] for i in torch.randperm(len(whole), generator=generator).tolist()]
            ordered += batches[len(whole) :]  # an incomplete batch must be last: it would shift all those after it
        return torch.cat(ordered)
