"""Modes of the modules of a network, training or evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode within this context, and restore the mode of each module afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:  # not by train(), which a network may have overridden
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
