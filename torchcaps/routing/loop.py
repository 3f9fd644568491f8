"""The loop that all routing algorithms share."""

import contextlib
from collections.abc import Callable
from typing import Literal

import torch

from torchcaps.capsules import Capsules
from torchcaps.ops import Agreement

Gradient = Literal["unrolled", "last"]

# From an agreement (None: nothing is known yet) and the iteration, counted from 0, to the parents that follow from it
# and the agreement with those parents. The iteration is infinite where a routing runs to its end.
Step = Callable[[Agreement | None, float], tuple[Capsules, Agreement]]


def iterate(
    step: Step, iterations: int, gradient: Gradient = "unrolled", agreement: Agreement | None = None
) -> tuple[Capsules, Agreement | None]:
    """Let children and parents agree, `iterations` times.

    Args:
        step: one iteration.
        gradient: "unrolled" differentiates through all iterations, "last" only through the last one and
            takes the agreement that enters it as given.
        agreement: that the first step starts from.

    Returns:
        The parents of the last step, and the agreement that they were computed from.
    """
    check_iterations(iterations, gradient)
    for t in range(iterations - 1):
        with torch.no_grad() if gradient == "last" else contextlib.nullcontext():
            _, agreement = step(agreement, t)
    result, _ = step(agreement, iterations - 1)
    return result, agreement


def check_iterations(iterations: int, gradient: str = "unrolled", least: int = 1) -> None:
    if iterations < least:
        raise ValueError(f"iterations must be at least {least}, got {iterations}")
    if gradient not in ("unrolled", "last"):
        raise ValueError(f"gradient must be 'unrolled' or 'last', got {gradient!r}")
