"""Models of the papers, one file per paper, and their registry."""

from torchcaps.models.registry import create_model, list_models, register_model
from torchcaps.models.sabour2017 import CapsNet, ConvNet, capsnet_affnist, capsnet_digits, capsnet_mnist, convnet_mnist
from torchcaps.models.tsai2020 import (
    CapsuleClassifier,
    cnn_cifar,
    cnn_multimnist,
    dynamic_cifar,
    dynamic_multimnist,
    em_cifar,
    inverted_attention_cifar10,
    inverted_attention_cifar100,
    inverted_attention_multimnist,
    narrow_cifar10,
    resnet18_cifar,
)
from torchcaps.models.zhao2019 import ResNetCapsNet, pooling_cnn, pooling_resnet, resnet_capsnet

__all__ = [
    "CapsNet",
    "CapsuleClassifier",
    "ConvNet",
    "ResNetCapsNet",
    "capsnet_affnist",
    "capsnet_digits",
    "capsnet_mnist",
    "cnn_cifar",
    "cnn_multimnist",
    "convnet_mnist",
    "create_model",
    "dynamic_cifar",
    "dynamic_multimnist",
    "em_cifar",
    "inverted_attention_cifar10",
    "inverted_attention_cifar100",
    "inverted_attention_multimnist",
    "list_models",
    "narrow_cifar10",
    "pooling_cnn",
    "pooling_resnet",
    "register_model",
    "resnet18_cifar",
    "resnet_capsnet",
]
