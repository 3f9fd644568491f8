"""Labelled sets as Lightning data modules: canonical files in; out, batches of images, or of embeddings of texts."""

from torchcaps.extras import needs

with needs("train"):
    # Before scikit-learn and rich: typing keeps one order of int | float for all, theirs would make Lightning read
    # limit_test_batches=1, a batch, as 1.0, all of them.
    import lightning  # noqa: F401  # isort: skip

    from torchcaps.data.affnist import AffineMNIST, AffNIST, ExpandedMNIST
    from torchcaps.data.cifar import CIFAR10, CIFAR100
    from torchcaps.data.digits import Digits
    from torchcaps.data.embeddings import Embeddings, Encoder
    from torchcaps.data.files import DataError
    from torchcaps.data.hardest import hardest_classes
    from torchcaps.data.imagenet import ImageNet
    from torchcaps.data.images import ImageData
    from torchcaps.data.labelled import LabelledData
    from torchcaps.data.mnist import MNIST, FashionMNIST, read_idx
    from torchcaps.data.multimnist import DiverseMultiMNIST, MultiMNIST
    from torchcaps.data.smallnorb import Metadata, SmallNORB, StereoData, read_norb
    from torchcaps.data.sst import SST
    from torchcaps.data.svhn import SVHN
    from torchcaps.data.texts import TextData
    from torchcaps.data.toys import StereoToys

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "SST",
    "SVHN",
    "AffNIST",
    "AffineMNIST",
    "DataError",
    "Digits",
    "DiverseMultiMNIST",
    "Embeddings",
    "Encoder",
    "ExpandedMNIST",
    "FashionMNIST",
    "ImageData",
    "ImageNet",
    "LabelledData",
    "Metadata",
    "MultiMNIST",
    "SmallNORB",
    "StereoData",
    "StereoToys",
    "TextData",
    "hardest_classes",
    "read_idx",
    "read_norb",
]
