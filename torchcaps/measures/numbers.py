"""How well numbers are predicted."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.utils.arguments import FloatTensor, checked


class OfNumber(NamedTuple):
    r"""How well one number is predicted.

    Fields:
        rmse: root mean squared error, in the units of the number.
        mae: mean absolute error, in the units of the number.
        r2: coefficient of determination, :math:`1 - \sum (y - \hat y)^2 / \sum (y - \bar y)^2`: 1 where all is right, 0
            for a constant, the mean; NaN if all values are equal.
    """

    rmse: float
    mae: float
    r2: float


@checked
def of_each_number(predicted: FloatTensor, numbers: FloatTensor) -> list[OfNumber]:
    """Return how well each number is predicted.

    Args:
        predicted, numbers: `(n, numbers)`.
    """
    errors, numbers = predicted.double() - numbers.double(), numbers.double()
    variances: Tensor = (numbers - numbers.mean(0)).square().mean(0)
    squared = errors.square().mean(0)
    r2 = torch.where(variances > 0, 1 - squared / variances, torch.nan)
    columns = zip(squared.sqrt().tolist(), errors.abs().mean(0).tolist(), r2.tolist(), strict=True)
    return [OfNumber(*values) for values in columns]
