"""Training and evaluation of networks."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context a network runs as in evaluation; afterwards each of its modules is as it was."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:  # without train(), which a network may have overridden
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
