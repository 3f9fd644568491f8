"""The order of the training samples: it follows from the seed of the run and the epoch, so that a run can go on."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from torchcaps.data.streams import stream


class Order(DistributedSampler[int]):
    """Every sample once in an epoch, shuffled. It is a DistributedSampler so that Lightning does not replace it.

    An iteration begins where `position` says, in a resumed run perhaps within an epoch. If it says nothing, an
    iteration is a whole epoch: the one that `set_epoch` gave, or the next. Several processes take the samples in turn;
    where there are too few for the last turn, the first samples come again.

    Args:
        samples: how many there are in an epoch.
        batch_size: of each process.
        seed: all processes must have the same.
        processes, rank: how many processes take part, and which of them this is.
        position: gives the epoch and the batch in it that is to come next, or None.
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
        super().__init__(range(samples), processes, rank, seed=seed)  # type: ignore[arg-type]  # it takes its length
        self.samples, self.batch_size, self.position = samples, batch_size, position

    def __len__(self) -> int:
        return math.ceil(self.samples / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        epoch, batch = self.position() or (self.epoch, 0)
        self.epoch = epoch + 1
        return iter(self.of_process(epoch)[batch * self.batch_size :].tolist())

    def of_epoch(self, epoch: int) -> Tensor:
        """The samples of an epoch, `(samples,)`."""
        return torch.randperm(self.samples, generator=self.generator(epoch))

    def of_process(self, epoch: int) -> Tensor:
        """The samples of an epoch that this process takes, `(len(self),)`."""
        places = torch.arange(self.rank, len(self) * self.num_replicas, self.num_replicas)
        return self.of_epoch(epoch)[places % self.samples]

    def generator(self, epoch: int) -> torch.Generator:
        """What an epoch's order is drawn by."""
        return torch.Generator().manual_seed(stream(self.seed, epoch))
