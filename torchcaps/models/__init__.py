"""The networks of the papers and those of other libraries, and the registry that builds all by name."""

from torchcaps.models.backbone import add_capsules, capsule_resnet, library_network
from torchcaps.models.capsule_cnn import capsule_cnn
from torchcaps.models.cnn import FeatureClassifier
from torchcaps.models.compare import compare, compare_average, compare_cnn
from torchcaps.models.equicaps2025 import EquiCapsProjector, equicaps_loss
from torchcaps.models.heinsen2019 import (
    EmbeddingCapsNet,
    EmbeddingMean,
    StereoCapsNet,
    average_pooled_smallnorb,
    heinsen_smallnorb,
    heinsen_sst,
    mean_pooled_sst,
)
from torchcaps.models.heinsen2019_weights import load_authors_weights
from torchcaps.models.heinsen2022 import VectorRoutingHead, heinsen_images, heinsen_texts
from torchcaps.models.heinsen2022_weights import load_authors_head
from torchcaps.models.lalonde2018 import SegCaps, segcaps
from torchcaps.models.li2018 import (
    CapNet,
    CapsuleBlock2d,
    CapsuleFC,
    EncapNet,
    EncapsulatedModule2d,
    FeedbackAgreement,
    capnet_dynamic,
    capnet_em,
    encapnet_v1,
    encapnet_v2,
    shallow_cnn,
    shallow_encapnet,
)
from torchcaps.models.mazzia2021 import EfficientCapsNet, efficient_capsnet
from torchcaps.models.registry import create_model, list_models, register_model
from torchcaps.models.sabour2017 import (
    CapsNet,
    capsnet_affnist,
    capsnet_digits,
    capsnet_mnist,
    capsnet_multimnist,
    capsnet_small,
    convnet_mnist,
    convnet_multimnist,
)
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
from torchcaps.models.unet import UNet, unet
from torchcaps.models.zhao2019 import (
    ResNetCapsNet,
    pooling_cnn,
    pooling_resnet,
    pooling_resnet_small,
    resnet_capsnet,
    resnet_capsnet_small,
)

__all__ = [
    "CapNet",
    "CapsNet",
    "CapsuleBlock2d",
    "CapsuleClassifier",
    "CapsuleFC",
    "EfficientCapsNet",
    "EmbeddingCapsNet",
    "EmbeddingMean",
    "EncapNet",
    "EncapsulatedModule2d",
    "EquiCapsProjector",
    "FeatureClassifier",
    "FeedbackAgreement",
    "ResNetCapsNet",
    "SegCaps",
    "StereoCapsNet",
    "UNet",
    "VectorRoutingHead",
    "add_capsules",
    "average_pooled_smallnorb",
    "capnet_dynamic",
    "capnet_em",
    "capsnet_affnist",
    "capsnet_digits",
    "capsnet_mnist",
    "capsnet_multimnist",
    "capsnet_small",
    "capsule_cnn",
    "capsule_resnet",
    "cnn_cifar",
    "cnn_multimnist",
    "compare",
    "compare_average",
    "compare_cnn",
    "convnet_mnist",
    "convnet_multimnist",
    "create_model",
    "dynamic_cifar",
    "dynamic_multimnist",
    "efficient_capsnet",
    "em_cifar",
    "encapnet_v1",
    "encapnet_v2",
    "equicaps_loss",
    "heinsen_images",
    "heinsen_smallnorb",
    "heinsen_sst",
    "heinsen_texts",
    "inverted_attention_cifar10",
    "inverted_attention_cifar100",
    "inverted_attention_multimnist",
    "library_network",
    "list_models",
    "load_authors_head",
    "load_authors_weights",
    "mean_pooled_sst",
    "narrow_cifar10",
    "pooling_cnn",
    "pooling_resnet",
    "pooling_resnet_small",
    "register_model",
    "resnet18_cifar",
    "resnet_capsnet",
    "resnet_capsnet_small",
    "segcaps",
    "shallow_cnn",
    "shallow_encapnet",
    "unet",
]
