"""Base of all labeled data sets: training, validation and test sets, and loaders of their batches."""

import copy
import os
from typing import Any, Literal, Self

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchcaps.capsules import IGNORED as IGNORED
from torchcaps.data.order import AsStored, Order
from torchcaps.data.streams import stream
from torchcaps.utils.arguments import Count, CountOrZero, checked, shown
from torchcaps.utils.checks import check_choice

STAGES = ("fit", "validate", "test", "predict", None)  # what Lightning passes to `setup`

# Not the run's seed: networks are comparable only if all learn the same labels.
LABEL_SEEDS = {"fit": 0, "validate": 1}

TargetKind = Literal["class", "labels", "numbers", "masks"]
TERMS: dict[TargetKind, tuple[str, str]] = {  # for one of what is predicted, and for several
    "class": ("class", "classes"),
    "labels": ("label", "labels"),
    "numbers": ("number", "numbers"),
    "masks": ("class", "classes"),
}

Batch = tuple[Any, ...]  # inputs (a tensor or a tuple of tensors), labels, and other tensors of some data sets


class LabeledSet(Dataset[Batch]):
    """Samples in memory or on disk, with labels, see `LabeledData`. A DataLoader reads a whole batch at once."""

    labels: Tensor
    device: torch.device | None = None  # on which batches are made; None for samples that are read from files

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        inputs, *rest = self.__getitems__([index])
        alone = tuple(batch[0] for batch in inputs) if isinstance(inputs, tuple) else inputs[0]
        return alone, *(batch[0] for batch in rest)

    def __getitems__(self, indices: list[int] | Tensor) -> Batch:
        """Return the samples at the indices as one batch. A tensor of indices is on the device of the samples."""
        raise NotImplementedError

    def on(self, device: torch.device) -> "LabeledSet":
        """Return the same samples, on a device if they can lie there."""
        return self

    def subset(self, indices: np.ndarray) -> Self:
        """Return the set of the samples at the indices."""
        raise NotImplementedError

    def with_shuffled_labels(self, seed: int) -> Self:
        """Return the same samples with each other's labels, by a permutation that the seed and their number determine.

        The number of samples of each class stays. A sample may get its own label by chance.
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        shuffled = copy.copy(self)
        shuffled.__dict__["labels"] = self.labels[order]  # not by setattr: some sets are frozen
        return shuffled


def _as_is(batch: Any) -> Any:
    # __getitems__ already returns a batch. This is a named function because workers must pickle it.
    return batch


def _leave_group(worker: int) -> None:
    # Ctrl-C goes to the whole process group. The main process handles it and ends its workers itself.
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


class LabeledData(LightningDataModule):
    """Base of the labeled data sets, of images and of texts: loaders of a training, a validation and a test set.

    A subclass sets `classes` and defines `_set`, or a `setup` of its own.

    `target` is what is predicted, which determines the labels of the sets:

    - "class": a class of each sample, (n,) int64;
    - "labels": any number of labels, (n, classes) float32 of 0 and 1;
    - "numbers": real numbers, (n, classes) float32; `classes` is how many, and `names` are what they are called;
    - "masks": a class of each pixel. Batches have masks (batch, height, width) int64, -100 where a pixel does not
      count. The labels of a set are how many pixels of each class a sample has, (n, classes) int64.

    Order of the calls, with a Trainer and for MNIST:

    1. `prepare_data` (mnist.py) downloads missing files.
    2. `setup` (images.py) makes the sets from what `load` (mnist.py) returns.
    3. `train_dataloader` (here) makes a loader of the set that `part` returns, in the order that `order` returns.
    4. For each batch the `Order` (order.py) gives the indices, and `__getitems__` of the set (images.py) the samples.
       `on_before_batch_transfer` (here) then seeds torch, and `on_after_batch_transfer` (images.py) augments.

    Training batches are shuffled. With a Trainer, the run's seed and the epoch determine the order of the samples. For
    every training batch torch's generators get a new seed, made of the run's seed, the epoch, the batch and the
    process. A resumed run therefore has the same augmentation, mixup and dropout as one that was never interrupted. A
    checkpoint contains the seed, and the batch size of all processes together. The seed of a new run is that of torch's
    default generator when the run begins.

    With several processes, each process has batches of `batch_size` samples. The processes' k-th batches together form
    the k-th global batch; see `Order`.

    A subclass that overrides `on_before_batch_transfer`, `state_dict` or `load_state_dict` must call those of this
    class.

    Args:
        batch_size: samples in a batch. The last batch of an epoch may be smaller.
        num_workers: worker processes of each loader.
        shuffle_labels: whether to shuffle the training labels among themselves, and the validation labels too; the test
            has its true labels. A network can only learn such labels by heart: what it shows has nothing to do with the
            classes (Adebayo et al., Sanity Checks for Saliency Maps, 2018: the data randomization test). The labels are
            the same in every run. Samples are held out as without this option, and metadata stay those of the samples.

    Raises:
        ValueError: an argument is out of range.
    """

    classes: int
    target: TargetKind = "class"
    # Whether an epoch has equally many samples of each class; None where there is no such option.
    balance: bool | None = None

    @checked
    def __init__(self, batch_size: Count = 128, num_workers: CountOrZero = 0, shuffle_labels: bool = False) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.shuffle_labels = batch_size, num_workers, shuffle_labels
        self.train_set: LabeledSet | None = None
        self.val_set: LabeledSet | None = None
        self.test_set: LabeledSet | None = None
        self._resident: dict[str, tuple[LabeledSet, LabeledSet]] = {}  # by stage: a set, and itself on a device
        self._seed: int | None = None  # of the run
        self._seeded: Any = None  # the Trainer whose run it is
        self._order: Order | None = None

    @property
    def names(self) -> list[str]:
        """Names of the classes; by default their indices."""
        return [str(label) for label in range(self.classes)]

    @property
    def title(self) -> str:
        """What pages call the data: the name of the class, or what own data is read from."""
        return type(self).__name__

    def keys(self, stage: str) -> list[str]:
        """Return the identifier of each sample of a stage that was set up: index, or file or text of own data."""
        return [str(index) for index in range(len(self._loaded(stage)))]

    def network_arguments(self) -> dict[str, Any]:
        """Return the arguments of model builders that the user's own data determines.

        For example `{"classes": 3, "in_channels": 1, "image_size": 28}`. `Training` gives the network and the model
        these values. Published data sets return none: their recipes name all values.
        """
        return {}

    def resolved_arguments(self) -> dict[str, Any]:
        """Return the arguments of this class that were left open, with the values that the files gave them.

        `Training` writes them into the values of the run. Data that is built of these needs no file to know its
        classes and the shape of its samples.
        """
        return {}

    def split_hashes(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of the split of the user's own data, see `torchcaps.data.splits.packed`.

        The split of a published data set never changes: there is none to keep.
        """
        return {}

    @property
    def batch_size_together(self) -> int:
        """Samples in a batch of all processes of the Trainer together."""
        return self.batch_size * (self.trainer.world_size if self.trainer else 1)

    def setup(self, stage: str | None = None) -> None:
        """Read the sets of a stage: the training and the validation set for "fit", the validation set for "validate",
        the test set for "test", all for None."""
        check_choice("stage", stage, STAGES)
        if stage in ("fit", None) and self.train_set is None:
            self.train_set = self._with_labels(self._set("fit"), "fit")
        if stage in ("fit", "validate", None) and self.val_set is None and self._validates:
            self.val_set = self._with_labels(self._set("validate"), "validate")
        if stage in ("test", None) and self.test_set is None:
            self.test_set = self._set("test")

    def _set(self, stage: str) -> LabeledSet:
        """Return the samples for "fit", "validate" or "test"."""
        raise NotImplementedError

    @property
    def _validates(self) -> bool:
        """Return whether there is a validation set."""
        return True

    def train_dataloader(self) -> DataLoader[Batch]:
        order = self.order()
        if self._order is not None:
            order.set_epoch(self._order.epoch)  # Lightning may make a new loader for every epoch
        self._order = order
        return self._loader(self.part("fit"), order)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self._in_order("validate") if self._validates else []

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._in_order("test")

    def part(self, stage: str) -> Dataset[Batch]:
        """Return the samples that the loader of a stage reads: "fit", "validate" or "test"."""
        samples = self._loaded(stage)
        if not self._is_resident or stage == "test":  # which is read once
            return samples
        assert self.trainer is not None
        if self._resident.get(stage, (None, None))[0] is not samples:
            self._resident[stage] = samples, samples.on(self.trainer.strategy.root_device)
        return self._resident[stage][1]

    @property
    def _is_resident(self) -> bool:
        """Return whether samples are to lie on the device, see `torchcaps.training.Trainer`."""
        trainer: Any = self.trainer
        return trainer is not None and getattr(trainer, "resident", False) and trainer.world_size == 1

    def order(self) -> Order:
        """Return the order of the training samples."""
        return Order(len(self._loaded("fit")), **self.order_options())

    def order_options(self) -> dict[str, Any]:
        """Return the arguments of `Order` other than the number of samples."""
        trainer, seed = self.trainer, torch.initial_seed()
        if trainer is not None and self._seeded is not trainer:
            self._seed, self._seeded = trainer.strategy.broadcast(seed), trainer
        return {
            "batch_size": self.batch_size,
            "seed": seed if trainer is None else self._seed,
            "processes": trainer.world_size if trainer else 1,
            "rank": trainer.global_rank if trainer else 0,
            "position": self._position,
            "labels": self._loaded("fit").labels if self.balance else None,
        }

    def _position(self) -> tuple[int, int] | None:
        """Return the epoch and the batch in it that the Trainer runs next; None without a Trainer."""
        if self.trainer is None:
            return None
        epochs: Any = self.trainer.fit_loop.epoch_progress.current
        within = epochs.ready > epochs.processed
        return epochs.processed, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if within else 0

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        position = self._position()
        if self.trainer is not None and self.trainer.training and position is not None:
            self.seed_batch(*position)
        return batch

    def seed_batch(self, epoch: int, batch: int) -> None:
        """Give torch's generators the seed of a training batch, both counted from 0. The Trainer must have begun."""
        if self.trainer is None or self._seed is None:
            return
        seed = stream(self._seed, epoch, batch, self.trainer.global_rank)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond without a GPU
        device = self.trainer.strategy.root_device
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._seed is None else {"seed": self._seed, "batch_size": self.batch_size_together}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "seed" in state_dict:
            for name, least in (("seed", 0), ("batch_size", 1)):
                value = state_dict.get(name, least)
                if type(value) is not int or not least <= value < 2**63:
                    raise TypeError(f"{name} of the data must be an int of at least {least}, got {shown(value)}")
            self._seed, self._seeded = state_dict["seed"], self.trainer

    def _loaded(self, stage: str) -> LabeledSet:
        sets = {"fit": self.train_set, "validate": self.val_set, "test": self.test_set}
        check_choice("stage", stage, sets)
        samples = sets[stage]
        if samples is None:
            raise RuntimeError(f'the data is not loaded yet: call data.setup("{stage}") first')
        return samples

    def _with_labels(self, samples: LabeledSet, stage: str) -> LabeledSet:
        """Return the samples for "fit" or "validate" with the labels that `shuffle_labels` asks for."""
        return samples.with_shuffled_labels(LABEL_SEEDS[stage]) if self.shuffle_labels else samples

    def _in_order(self, stage: str) -> DataLoader[Batch]:
        """Return the loader of a validation or test set. Several processes take its samples in turn."""
        samples: Any = self.part(stage)
        if self.trainer is None or self.trainer.world_size == 1:
            return self._loader(samples)
        share = AsStored(len(samples), self.batch_size, 0, self.trainer.world_size, self.trainer.global_rank)
        return self._loader(samples, share)

    def _loader(self, samples: Dataset[Batch], order: Order | None = None) -> DataLoader[Batch]:
        trainer: Any = self.trainer
        lies_there = self._is_resident and getattr(samples, "device", None) == trainer.strategy.root_device
        workers = 0 if lies_there else self.num_workers  # passing a batch would take longer than making it
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            sampler=order,
            collate_fn=_as_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=_leave_group,
        )
