"""The number of parameters of every published network, exactly."""

import pytest
import torch

from torchcaps import CapsNet, DynamicRouting, EMRouting, InvertedAttentionRouting, SelfRouting, create_model

COUNTS = [
    ("capsule_cnn", {}, 68_337),
    ("capsule_cnn", {"numbers": 1}, 28_518),
    ("capsule_cnn", {"in_channels": 12, "classes": 2, "dims": 1}, 38_737),
    ("capsule_cnn", {"classes": 2, "dims": 3}, 73_009),
    # Sabour et al. 2017
    ("capsnet_mnist", {}, 8_215_568),
    ("capsnet_mnist", {"decoder": False}, 6_804_224),
    ("convnet_mnist", {}, 35_445_522),
    ("capsnet_multimnist", {}, 11_361_808),  # published 11.36M
    ("convnet_multimnist", {}, 24_563_978),  # published 24.56M, which zero padding gives
    ("convnet_multimnist", {"image_size": 40, "hidden": 397}, 13_486_617),  # about as many as capsnet_affnist
    # Tsai et al. 2020, Table 1
    ("inverted_attention_cifar10", {}, 561_297),
    ("inverted_attention_cifar10", {"backbone": "resnet"}, 1_828_817),
    ("inverted_attention_cifar100", {}, 1_462_989),
    ("inverted_attention_cifar100", {"backbone": "resnet"}, 2_799_629),
    ("dynamic_cifar", {}, 7_992_576),
    ("dynamic_cifar", {"classes": 100}, 31_585_536),
    # The paper has 12.45M and 36.04M, which do not follow from its text; their difference does.
    ("dynamic_cifar", {"backbone": "resnet"}, 6_616_128),
    ("dynamic_cifar", {"backbone": "resnet", "classes": 100}, 6_616_128 + 23_592_960),
    ("em_cifar", {}, 453_044),
    ("em_cifar", {"classes": 100}, 499_304),
    ("em_cifar", {"backbone": "resnet"}, 1_710_580),
    ("em_cifar", {"backbone": "resnet", "classes": 100}, 1_756_840),
    ("cnn_cifar", {}, 18_919_434),
    ("cnn_cifar", {"classes": 100}, 19_011_684),
    ("resnet18_cifar", {}, 11_173_962),
    ("resnet18_cifar", {"classes": 100}, 11_220_132),
    # Tsai et al. 2020, Figure 5
    ("inverted_attention_multimnist", {}, 9_963_969),
    ("inverted_attention_multimnist", {"pose": (64,)}, 42_478_017),
    ("dynamic_multimnist", {}, 42_477_633),
    ("cnn_multimnist", {}, 19_553_162),
    ("cnn_multimnist", {"pooling": "linear"}, 42_490_762),
    # Options of Figure 4 that learn something: two betas for 2 * 32 parents, a score for each of 32 primary types;
    # first poses of 16 for 2 * 32 + 10 parents.
    ("inverted_attention_cifar10", {"layer_norm": False}, 561_297 - 3 * 32),
    ("inverted_attention_cifar10", {"activations": True}, 561_297 + 2 * 64 + 256 * 32),
    ("inverted_attention_cifar10", {"start": "learned"}, 561_297 + 16 * 74),
    # Zhao & Huang 2019
    ("pooling_cnn", {}, 312_906),
    ("pooling_cnn", {"in_channels": 1, "pooling": "max"}, 309_706),
    ("pooling_resnet", {"depth": 20}, 269_722),
    ("pooling_resnet", {"depth": 32, "pooling": "average"}, 464_154),
    ("pooling_resnet", {"depth": 44}, 658_586),
    ("pooling_resnet", {"depth": 56}, 853_018),
    ("resnet_capsnet", {}, 2_526_768),
    ("resnet_capsnet", {"image_size": 36, "sharpness": 5.0}, 2_215_168),
    ("capsnet_affnist", {}, 13_475_648),  # about 13.4M
    # LaLonde & Bagci 2018 (published 1.4M), and its control
    ("segcaps", {}, 1_416_112 + 9_537),
    ("segcaps", {"variant": "R1", "decoder": False}, 1_416_112),
    ("unet", {}, 1_475_293),
    # Li et al. 2018
    ("encapnet_v1", {}, 34_466_400),
    ("encapnet_v1", {"coefficients": None}, 1_738_848),
    ("encapnet_v2", {}, 174_722_784),
    ("encapnet_v2", {"classes": 200, "image_size": 128}, 176_279_264),
    ("encapnet_v2", {"classes": 200, "image_size": 224}, 179_658_464),
    ("capnet_dynamic", {}, 9_913_120),
    ("capnet_dynamic", {"grid": 4}, 2_835_232),
    ("capnet_em", {}, 9_991_028),
    ("capnet_em", {"grid": 4}, 2_910_068),
    ("shallow_cnn", {}, 1_574_698),
    ("shallow_cnn", {"channels": (32, 256, 512, 512, 1300)}, 9_622_170),
    ("shallow_encapnet", {}, 8_131_424),
    ("shallow_encapnet", {"coefficients": None}, 1_688_352),
    # Heinsen 2019
    ("heinsen_smallnorb", {}, 271_688),
    ("heinsen_sst", {}, 140_480),
    ("heinsen_sst", {"classes": 2}, 138_944),
    # With MiniLM's embeddings the depth parameter and the first linear layer are smaller.
    ("heinsen_sst", {"layers": 7, "width": 384}, 140_480 - 37 * 1280 + 7 * 384 - 64 * (1280 - 384)),
    # Heinsen 2022; with BEiT-large, about 304.4 million, its heads of images are the 312.8, 309.5 and 309.8 million of
    # paperswithcode.com.
    ("heinsen_texts", {}, 5_068_422),
    ("heinsen_texts", {"classes": 2}, 5_058_435),
    ("heinsen_images", {}, 8_380_777),
    ("heinsen_images", {"classes": 10}, 5_085_067),
    ("heinsen_images", {"classes": 100}, 5_384_677),
    # The network on which only the routing changes
    ("compare", {}, 89_225),
    ("compare", {"in_channels": 1}, 88_073),
    # A score for each of 8 primary types, and two betas for each of 8 + 10 parents.
    ("compare", {"routing": EMRouting(), "in_channels": 1}, 88_073 + 8 * 65 + 2 * 18),
    # A scale and a shift in each of 2 LayerNorms, and no weight of the activation.
    ("compare", {"routing": InvertedAttentionRouting(), "in_channels": 1}, 88_073 + 2 * 2 * 8 - 1),
    # Scores, and 8 weights and a bias for each of 8 + 10 parents and 8 groups.
    ("compare", {"routing": SelfRouting(), "in_channels": 1}, 88_073 + 8 * 65 + 9 * 8 * 18),
    ("compare_average", {}, 80_650),
    ("compare_average", {"in_channels": 1}, 79_498),
    ("compare_cnn", {}, 91_665),
    ("compare_cnn", {"in_channels": 1}, 87_939),
    # Mazzia et al. 2021; its decoder is that of Sabour et al.
    ("efficient_capsnet", {"decoder": False}, 161_824),
    ("efficient_capsnet", {}, 161_824 + 1_411_344),
]


@pytest.mark.parametrize(("name", "arguments", "parameters"), COUNTS)
def test_parameter_counts(name, arguments, parameters):
    with torch.device("meta"):
        network = create_model(name, **arguments)
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_the_authors_bias_adds_160_parameters():
    with torch.device("meta"):
        network = CapsNet(routing=DynamicRouting(learn_bias=True))
    assert sum(p.numel() for p in network.parameters()) == 8_215_568 + 160
