"""Models of the papers, one file per paper, and their registry."""

from torchcaps.models.registry import create_model, list_models, register_model
from torchcaps.models.sabour2017 import CapsNet, ConvNet, capsnet_digits, capsnet_mnist, convnet_mnist

__all__ = [
    "CapsNet",
    "ConvNet",
    "capsnet_digits",
    "capsnet_mnist",
    "convnet_mnist",
    "create_model",
    "list_models",
    "register_model",
]
