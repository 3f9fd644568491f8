"""Small networks for tests, each in a line."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Network(nn.Module):
    """Named layers, and a function of the network and its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)
