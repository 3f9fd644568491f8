"""Data sets in tests: loaded, whole, and statistics of what they draw."""

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


def chi_square(counts: list[int]) -> float:
    """Deviations of counts from those of equal probabilities, in standard deviations."""
    expected, freedom = sum(counts) / len(counts), len(counts) - 1
    return (sum((count - expected) ** 2 / expected for count in counts) - freedom) / (2 * freedom) ** 0.5
