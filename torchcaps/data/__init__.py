"""Labelled image sets as Lightning data modules: canonical files in, batches of float images out."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.data.affnist import AffineMNIST, AffNIST, ExpandedMNIST
    from torchcaps.data.cifar import CIFAR10, CIFAR100
    from torchcaps.data.digits import Digits
    from torchcaps.data.files import DataError
    from torchcaps.data.hardest import hardest_classes
    from torchcaps.data.imagenet import ImageNet
    from torchcaps.data.images import ImageData
    from torchcaps.data.mnist import MNIST, FashionMNIST, read_idx
    from torchcaps.data.multimnist import DiverseMultiMNIST, MultiMNIST
    from torchcaps.data.smallnorb import Metadata, SmallNORB, StereoData, read_norb
    from torchcaps.data.svhn import SVHN
    from torchcaps.data.toys import StereoToys

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "SVHN",
    "AffNIST",
    "AffineMNIST",
    "DataError",
    "Digits",
    "DiverseMultiMNIST",
    "ExpandedMNIST",
    "FashionMNIST",
    "ImageData",
    "ImageNet",
    "Metadata",
    "MultiMNIST",
    "SmallNORB",
    "StereoData",
    "StereoToys",
    "hardest_classes",
    "read_idx",
    "read_norb",
]
