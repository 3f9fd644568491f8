"""Networks of the real torchvision, timm and transformers: forward, backward, a step by the command line, an export.

Torchvision and timm need a version of PyTorch of their own. `make test-newest` makes an environment with them.
"""

import importlib
from pathlib import Path

import pytest
import torch
from commands import call
from pictures import draw_digits
from torch import nn
from vision import SIZE, WIDTHS, make_vision_model

from torchcaps import add_capsules
from torchcaps.runs import Run

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, and of Lightning and the exporter under these

TORCHVISION = """alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_small regnet_x_400mf resnet18 shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11 vit_b_16"""
TIMM = """beit_base_patch16_224 cait_xxs24_224 convnext_atto deit_tiny_distilled_patch16_224 deit_tiny_patch16_224
    densenet121 edgenext_xx_small efficientformer_l1 efficientnet_lite0 fastvit_t8 ghostnet_100 hiera_tiny_224
    levit_128 maxvit_pico_rw_256 mixer_s32_224 mobilenetv3_small_100 mobilevit_xxs nf_regnet_b0 poolformer_s12 pvt_v2_b0
    regnetx_002 repvgg_a0 resnet18 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tiny_vit_5m_224
    twins_svt_small vgg11 vit_tiny_patch16_224 volo_d1_224 xcit_nano_12_p16_224"""
NO_ONNX = ("timm/hiera_tiny_224", "timm/twins_svt_small")  # attention of five dimensions, which the exporter refuses
VIT = {"image_size": 32, "patch_size": 8, **SIZE}
TRANSFORMERS: dict[str, dict[str, object]] = {
    "Beit": VIT,
    "CLIP": {"vision_config": VIT},
    "ConvNext": WIDTHS,
    "ConvNextV2": WIDTHS,
    "Data2VecVision": VIT,
    "DeiT": VIT,
    "Dinov2": VIT,
    "Dinov2WithRegisters": VIT,
    "EfficientNet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "FocalNet": {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "MobileNetV1": {"depth_multiplier": 0.25},
    "MobileNetV2": {"depth_multiplier": 0.35},
    "MobileViT": {"image_size": 32},
    "PoolFormer": WIDTHS,
    "PvtV2": {"image_size": 32, "num_attention_heads": [1, 2, 4, 4], **WIDTHS},
    "RegNet": {"embedding_size": 8, "groups_width": 8, **WIDTHS},
    "ResNet": {"embedding_size": 8, **WIDTHS},
    "Segformer": WIDTHS,
    "SiglipVision": VIT,
    "Swin": {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "Swinv2": {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "ViT": VIT,
}
TRAINED_ALWAYS = ("ViT",)
NETWORKS = [
    f"{library}/{name}" for library, names in (("torchvision", TORCHVISION), ("timm", TIMM)) for name in names.split()
]
NETWORKS += [f"transformers/{kind}" for kind in TRANSFORMERS]


# A training and an export take some seconds: `make test` has one of transformers, `make test-slow` the others.
TRAINED = [
    pytest.param(name, marks=pytest.mark.slow) if "transformers" in name and name[13:] not in TRAINED_ALWAYS else name
    for name in NETWORKS
]


@pytest.fixture(params=NETWORKS)
def name(request, tmp_path) -> str:
    """The name of a network whose library is installed."""
    library, _, kind = request.param.partition("/")
    try:
        importlib.import_module(library)
    except ModuleNotFoundError:
        pytest.skip(f"{library} is not installed: make test-newest has it")
    if library == "transformers":
        return f"transformers/{make_vision_model(tmp_path / 'model', kind, **TRANSFORMERS[kind])}"
    return request.param


def test_forward_and_backward(name):
    model = add_capsules(name, 3, pretrained=False)
    images = torch.rand(2, *model.image_shape)
    prediction = model(images)
    assert prediction.scores.shape == (2, 3)
    nn.functional.cross_entropy(prediction.scores, torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert model.features[1].channels > 1
    features = model.features(images)
    assert features.dim() == 4  # a map, of tokens too
    assert features.shape[2] == features.shape[3] > 1 or "transformers" in name or "levit" in name
    frozen = add_capsules(name, 3, pretrained=False, trainable="head").train()
    before = {key: x.clone() for key, x in frozen.features.state_dict().items()}
    frozen(images).scores.sum().backward()
    assert all(p.grad is None for p in frozen.features.parameters())
    assert all(torch.equal(x, before[key]) for key, x in frozen.features.state_dict().items())


@pytest.mark.parametrize("name", TRAINED, indirect=True)
def test_a_step_by_the_command_line_and_an_export(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_digits(Path("pictures"), 0, 20)
    arguments = ["--model", name, "--model.network.pretrained", "false", "--data.folder", "pictures"]
    assert call("train", "own/images", "--smoke", *arguments, "--data.num_workers", "0") == 0
    best = "runs/own/images/smoke_0/checkpoints/best.ckpt"
    trained = Run.find(best)
    assert trained.scores(torch.rand(1, *trained.data().shape)).isfinite().all()
    kind, end = ("torch", "pt2") if name in NO_ONNX else ("onnx", "onnx")
    assert call("export", "own/images", "--ckpt_path", best, "--to", kind, "--out", f"network.{end}") == 0
    assert Path(f"network.{end}").exists()
