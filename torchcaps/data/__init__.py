"""Labeled data sets as Lightning data modules: published files in, batches of images or of embedded texts out."""

from torchcaps.utils.extras import check_installed
from torchcaps.utils.lazy import accessors

TYPE_CHECKING = False  # the name that type checkers know
if TYPE_CHECKING:
    from torchcaps.data.affine_mnist import AffineMNIST
    from torchcaps.data.affnist import AffNIST
    from torchcaps.data.array_folder import ArrayFolder
    from torchcaps.data.cells import Cells
    from torchcaps.data.cifar import CIFAR10, CIFAR100
    from torchcaps.data.cluttered import ClutteredDigits
    from torchcaps.data.digits import Digits
    from torchcaps.data.embeddings import Embeddings
    from torchcaps.data.encoded_images import EncodedImages
    from torchcaps.data.encoder import Encoder
    from torchcaps.data.expanded_mnist import ExpandedMNIST
    from torchcaps.data.files import DataError
    from torchcaps.data.image_folder import ImageFolder
    from torchcaps.data.imagenet import ImageNet
    from torchcaps.data.images import ImageData
    from torchcaps.data.labeled import LabeledData
    from torchcaps.data.mask_folder import MaskFolder
    from torchcaps.data.masks import MaskData, Scenes
    from torchcaps.data.mnist import MNIST, FashionMNIST
    from torchcaps.data.multimnist import DiverseMultiMNIST, MultiMNIST
    from torchcaps.data.own_files import OwnFiles
    from torchcaps.data.pairs import ViewPairs, stereo_pairs, turned_pairs, viewpoints
    from torchcaps.data.pictures import read_picture
    from torchcaps.data.published import Published
    from torchcaps.data.segmented_digits import SegmentedDigits
    from torchcaps.data.smallnorb import SmallNORB
    from torchcaps.data.sst import SST
    from torchcaps.data.stereo import Metadata, StereoData
    from torchcaps.data.svhn import SVHN
    from torchcaps.data.table import Table, read_table
    from torchcaps.data.text_table import TextTable
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
    "ArrayFolder",
    "Cells",
    "ClutteredDigits",
    "DataError",
    "Digits",
    "DiverseMultiMNIST",
    "Embeddings",
    "EncodedImages",
    "Encoder",
    "ExpandedMNIST",
    "FashionMNIST",
    "ImageData",
    "ImageFolder",
    "ImageNet",
    "LabeledData",
    "MaskData",
    "MaskFolder",
    "Metadata",
    "MultiMNIST",
    "OwnFiles",
    "Published",
    "Scenes",
    "SegmentedDigits",
    "SmallNORB",
    "StereoData",
    "StereoToys",
    "Table",
    "TextData",
    "TextTable",
    "ViewPairs",
    "read_picture",
    "read_table",
    "stereo_pairs",
    "turned_pairs",
    "viewpoints",
]

check_installed("train", "PIL", "filelock", "kornia", "lightning", "pooch", "rich", "scipy", "sklearn", "yaml")

if not TYPE_CHECKING:
    __getattr__, __dir__ = accessors(__name__)
