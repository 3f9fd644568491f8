"""Small networks for tests, each in a line."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchcaps import CapsNet


class Network(nn.Module):
    """Named layers, and a function of the network and its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def small_capsnet(decoder: tuple[int, ...] | None) -> CapsNet:
    """Return a CapsNet of gray images, 8x8, and three classes, always with the same weights."""
    torch.manual_seed(0)
    sizes = {"channels": 4, "kernel_size": 3, "primary_types": 2, "primary_kernel_size": 3, "class_pose": 3}
    return CapsNet(1, 8, 3, **sizes, decoder=decoder).eval()
