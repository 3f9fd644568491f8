"""Data sets in tests: loaded, and whole."""

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchcaps.data import ImageData

Data = TypeVar("Data", bound=ImageData)


def loaded(kind: type[Data], **arguments: Any) -> Data:
    data = kind(**arguments)
    data.setup()
    return data


def collect(loader: DataLoader) -> tuple[Tensor, Tensor]:
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)
