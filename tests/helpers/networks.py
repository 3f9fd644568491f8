"""Small networks for tests, each in a line, and what a network that trains gives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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


def assert_it_trains(model: torch.nn.Module, images: torch.Tensor, classes: int) -> None:
    """Scores are finite logits that tell images and classes apart, and every parameter has a gradient."""
    scores = model(images).scores
    assert scores.shape == (len(images), classes)
    assert scores.isfinite().all()
    assert scores.std(0).min() > 0
    assert scores.std(1).min() > 0
    assert getattr(model, "gives_logits", True)
    F.cross_entropy(scores, torch.arange(len(images)) % classes).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
