"""What protocols need of a run of `torchcaps train`: its network, its test images, and its training anew."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn

from torchcaps.data import ImageData, TextData
from torchcaps.evaluate.subject import DoesNotApply, Loss, Subject
from torchcaps.training.build import Training
from torchcaps.utils.checks import counted

HELD_OUT = 2000  # images at most


def subject_of(
    training: Training,
    count: int,
    seed: int,
    progress: Callable[[str], None],
    trained: Callable[[int], nn.Module],
    thresholds: Tensor | None = None,
) -> Subject:
    """Return the network of a run with random test images in random order, because a protocol may take only the first,
    and with images that it has held out.

    If the run held out no images, a quarter of the test images is held out here.

    Args:
        training: the training, whose model has the weights.
        count: number of test images at most.
        seed, progress: see :class:`Subject`.
        trained: trains the network anew on a number of images per class.
        thresholds: see :class:`Subject`.

    Raises:
        ValueError: the data is no set of images.
    """
    data: Any = training.datamodule
    if not isinstance(data, ImageData):
        more = ", torchcaps explain the accuracy with uniform coefficients and the dead capsules"
        raise ValueError(
            f"torchcaps evaluate is for networks of images, and {type(data).__name__} has none: torchcaps test gives "
            f"the accuracy{more if isinstance(data, TextData) else ''}"
        )
    data.prepare_data()
    data.setup("test")
    data.setup("validate")
    order = _shuffled(data, "test", seed)
    if data.val_set is None:
        rest, order = order[: len(order) // 4], order[len(order) // 4 :]
        held_out = data.samples("test", rest[:HELD_OUT]) if rest else None
    else:
        held_out = data.samples("validate", _shuffled(data, "validate", seed)[:HELD_OUT])
    images, labels = data.samples("test", order[:count])
    network: nn.Module = training.model.network.eval()
    loss: Loss = training.model.loss_of_numbers if data.target == "numbers" else training.model.loss
    return Subject(network, images, labels, held_out, loss, seed, progress, data, trained, data.target, thresholds)


def _shuffled(data: Any, stage: str, seed: int) -> list[int]:
    """Return the indices of a stage in random order."""
    return torch.randperm(len(data.part(stage)), generator=torch.Generator().manual_seed(seed)).tolist()


def trained_on_few(training: Training, count: int, seed: int) -> nn.Module:
    """Train a network on `count` images of each class, repeated so that an epoch is as long as before; without early
    stopping, to the last weights."""
    data: Any = training.datamodule
    callbacks: list[Any] = training.trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, EarlyStopping)]
    setup = data.setup

    def fewer(stage: str | None) -> None:
        setup(stage)
        whole = data.train_set
        if whole is None or whole.labels.dim() != 1:
            raise DoesNotApply("there are no training images of one class each")
        if count > (fewest := int(whole.labels.unique(return_counts=True)[1].min())):
            raise DoesNotApply(f"one class has {counted(fewest, 'training image')}")
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
        labels = whole.labels[order]
        chosen = torch.cat([order[labels == label][:count] for label in labels.unique()]).sort().values
        data.train_set = whole.subset(np.resize(chosen.numpy(), len(whole)))

    data.setup = lambda stage=None: fewer(stage) if stage == "fit" else setup(stage)
    training.trainer.fit(training.model, data)
    return training.model.network.eval()
