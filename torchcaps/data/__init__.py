"""Labelled image sets as Lightning data modules: canonical files in, batches of float images out."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.data.cifar import CIFAR10, CIFAR100
    from torchcaps.data.digits import Digits
    from torchcaps.data.files import DataError
    from torchcaps.data.images import ImageData
    from torchcaps.data.mnist import MNIST, read_idx
    from torchcaps.data.multimnist import DiverseMultiMNIST, MultiMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "DataError",
    "Digits",
    "DiverseMultiMNIST",
    "ImageData",
    "MultiMNIST",
    "read_idx",
]
