"""What protocols need of a run of `torchcaps train`: its network, its test images, and its training anew."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchcaps.data import ImageData
from torchcaps.evaluate.subject import DoesNotApply, Subject
from torchcaps.training.build import Training

HELD_OUT = 2000  # images at most


def subject_of(
    training: Training, count: int, seed: int, progress: Callable[[str], None], trained: Callable[[int], nn.Module]
) -> Subject:
    """Return the network of a run with random test images, and with images that it has held out.

    Args:
        training: the training, whose model has the weights.
        count: number of test images; all if there are fewer.
        seed, progress: see :class:`Subject`.
        trained: trains the network anew on a number of images per class.

    Raises:
        ValueError: the data is no set of images.
    """
    data: Any = training.datamodule
    if not isinstance(data, ImageData):
        raise ValueError(f"torchcaps evaluate needs a network of images, and {type(data).__name__} has none")
    if training.model.labels_per_image is None:
        raise ValueError("torchcaps evaluate needs a known number of labels per image, and this recipe has None")
    data.prepare_data()
    data.setup("test")
    images, labels = _some(data, data.part("test"), count, seed)
    data.setup("validate")
    held_out = None if data.val_set is None else _some(data, data.part("validate"), HELD_OUT, seed)
    network, loss = training.model.network.eval(), training.model.loss
    return Subject(network, images, labels, held_out, loss, seed, progress, data, trained)


def _some(data: ImageData, part: Any, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random samples of a part, as in a validation: images `(n, channels, height, width)` and labels."""
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:count].sort().values
    batches = [part.__getitems__(some.tolist()) for some in order.split(256)]
    return torch.cat([data.center(batch[0]) for batch in batches]), torch.cat([batch[1] for batch in batches])


def trained_on_few(training: Training, count: int, seed: int) -> nn.Module:
    """Train a network on `count` images of each class, repeated so that an epoch is as long as before."""
    data: Any = training.datamodule
    setup = data.setup

    def fewer(stage: str | None) -> None:
        setup(stage)
        whole = data.train_set
        if whole is None or whole.labels.dim() != 1:
            raise DoesNotApply("there are no training images of one class each")
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
        labels = whole.labels[order]
        chosen = torch.cat([order[labels == label][:count] for label in labels.unique()]).sort().values
        data.train_set = whole.subset(np.resize(chosen.numpy(), len(whole)))

    data.setup = lambda stage=None: fewer(stage) if stage == "fit" else setup(stage)
    training.trainer.fit(training.model, data)
    return training.model.network.eval()
