"""add_capsules: the features of any network, in the layout of a head, frozen or not; errors. `test_libraries.py` has
the networks of torchvision and timm."""

import copy
import json
import shutil
import sys
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close
from vision import MEAN, SIZE, STD, make_vision_model

from torchcaps import CapsuleHead, CapsuleRegressor, EMRouting, RoutingPool2d, add_capsules, create_model
from torchcaps.models import library_network
from torchcaps.models.libraries import NamedNetwork, image_side, standardization

EXAMPLE = torch.rand(2, 1, 12, 12)


class Block(nn.Module):
    """A part that torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.mean() > -1e9 else x


class Net(nn.Module):
    """A network of one's own: two stages, a pool that is a function, a classifier with a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)), Block()
        )
        self.hidden = nn.Linear(6, 8)
        self.spare = nn.Linear(1, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.hidden(self.stages(x).mean((2, 3))))


class Transformer(nn.Module):
    """A network with a method `forward_features`, which returns what it is given."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.values, self.head = nn.Parameter(features), nn.Linear(3, 3)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.values.expand(len(x), *self.values.shape[1:])


def test_the_features_are_those_of_the_layer_and_what_follows_is_dropped():
    net = Net().eval()
    expected = net.stages(EXAMPLE)
    model = add_capsules(net, 3, EMRouting(), layer="stages.1", example=EXAMPLE)
    assert_close(model.features(EXAMPLE), expected)
    assert_close(model(EXAMPLE).scores, model.classifier(expected))
    assert model(EXAMPLE).capsules.poses.shape == (2, 3, 16)
    assert isinstance(model.classifier, CapsuleHead)
    assert any(isinstance(module, EMRouting) for module in model.classifier.modules())
    names = {name.split(".")[2] for name, _ in model.features.named_parameters()}
    assert names == {"0", "1"}
    assert sum(p.numel() for p in model.features.parameters()) == sum(p.numel() for p in net.stages.parameters())
    assert_close(add_capsules(net, 3, layer="stages", example=EXAMPLE).features(EXAMPLE), expected)
    first = add_capsules(net, 3, layer="stages.0", example=EXAMPLE)
    assert first.features(EXAMPLE).shape == (2, 4, 10, 10)


def test_a_head_alone_is_trained():
    model = add_capsules(Net(), 2, layer="stages", example=EXAMPLE, trainable="head")
    before = copy.deepcopy(model.features.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    labels = torch.arange(16) % 2
    images = torch.rand(16, 1, 12, 12) + labels.view(-1, 1, 1, 1)
    model.train()
    assert model.classifier.training
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images).scores, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]  # and no dropout or batch normalization changes what the head sees
    assert_close(model.features.state_dict(), before, rtol=0, atol=0)
    other = add_capsules(Net(), 2, layer="stages", example=EXAMPLE).train()
    other(images)
    assert int(other.features.network.get_buffer("stages.0.1.num_batches_tracked")) == 1


@pytest.mark.parametrize(
    ("shape", "expected", "skip"),
    [
        ((1, 5, 5, 7), (2, 7, 5, 5), None),  # channels last
        ((1, 7, 5, 5), (2, 7, 5, 5), None),
        ((1, 5, 5, 5), (2, 5, 5, 5), None),
        ((1, 17, 6), (2, 6, 4, 4), None),  # a class token before 4x4 patches
        ((1, 21, 6), (2, 6, 4, 4), None),  # and four registers
        ((1, 17, 6), (2, 17, 6), 0),
        ((1, 16, 6), (2, 6, 4, 4), None),
        ((1, 17, 6), (2, 14, 6), 3),
        ((1, 440, 6), (2, 440, 6), None),  # 40 more than a square: no class tokens
        ((1, 8, 6), (2, 8, 6), None),  # not four class tokens before 2x2 patches
        ((1, 3, 6), (2, 3, 6), None),
        ((1, 7), (2, 7), None),
    ],
)
def test_layouts(shape, expected, skip):
    given = torch.randn(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = add_capsules(Transformer(given), 4, example=torch.rand(1, 3, 8, 8), skip_tokens=skip)
    says = "the first 5 of 21 tokens seem to be class and register tokens, and are left out: give skip_tokens=5, or 0"
    assert [str(x.message)[: len(says)] for x in caught] == [says] * (shape == (1, 21, 6))
    assert all(x.filename == __file__ for x in caught)
    features = model.features(torch.rand(2, 3, 8, 8))
    assert features.shape == expected
    assert model(torch.rand(2, 3, 8, 8)).scores.shape == (2, 4)
    assert not any(name.endswith("head.weight") for name, _ in model.features.named_parameters())
    if len(shape) == 3 and len(expected) == 4:  # row by row
        tokens = given[0, -expected[2] * expected[3] :]
        assert_close(features[0, :, 1, 2], tokens[expected[3] + 2])
    elif len(shape) == 3:
        assert_close(features[0], given[0, skip or 0 :])
    elif len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        assert_close(features[0, :, 1, 2], given[0, 1, 2])
    else:
        assert_close(features[0], given[0])


def test_a_module_keeps_its_mode_precision_and_inputs():
    model = add_capsules(Net().eval().to(torch.bfloat16), 3, layer="stages.0", example=EXAMPLE.bfloat16())
    assert not model.training
    assert not model.classifier.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(EXAMPLE.bfloat16()).scores.shape == (2, 3)


class Chosen(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_layers_that_cannot_be_had():
    def fails(net: nn.Module | str, says: str, **options: object) -> None:
        with pytest.raises(ValueError, match=says):
            add_capsules(net, 3, **{"example": EXAMPLE, **options})

    fails(Net(), "Net does not say which of its layers has the features: give layer, .* has stages, hidden, spare, fc")
    fails(Net(), "Net has no layer 'stage'; it has stages, hidden, spare, fc", layer="stage")
    fails(Net(), "Net does not run its layer 'spare'", layer="spare")
    fails(Chosen(), "Chosen cannot be cut after its layer 'stages', because torch.fx cannot trace it", layer="stages")
    fails(Net(), r"does not run on inputs of shape \(2, 3, 12, 12\)", layer="stages", example=torch.rand(2, 3, 12, 12))
    fails(Net(), "give example, a batch of inputs of Net", layer="stages", example=None)
    fails(Net(), "size and pretrained are for a network that is given by its name", layer="stages", size=32)
    fails("resnet18", "example is for a module: give size")
    fails(Transformer(torch.rand(1, 2, 3, 4, 5, 6)), r"must be maps, tokens or vectors, got \(2, 2, 3, 4, 5, 6\)")
    fails(
        Transformer(torch.rand(1, 2, 3, 4, 5)), r"do not say where the channels are: give dims=3 if they are \(batch, c"
    )
    fails(Transformer(torch.rand(1, 4, 5)), r"must be \(batch, channels, height, width\), got \(2, 4, 5\)", dims=2)
    fails(Transformer(torch.rand(1, 4, 5, 5)), r"must be tokens or vectors, got \(2, 4, 5, 5\)", dims=0)
    fails(Net(), "the number of classes, or numbers: one of the two", numbers=2)
    with pytest.raises(ValueError, match="the number of classes, or numbers: one of the two"):
        add_capsules(Net(), layer="stages", example=EXAMPLE)
    fails(Transformer(torch.rand(1, 4, 5)), "skip_tokens must be less than the 4 tokens", skip_tokens=4)


def test_a_part_without_gradients_stays():
    class Both(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 1, 3, padding=1)

        def forward_features(self, x: Tensor) -> Tensor:
            return self.stages(self.stem(x).detach())

    net = Both().eval()
    expected = net.forward_features(EXAMPLE)
    model = add_capsules(net, 3, example=EXAMPLE)
    assert_close(model.features(EXAMPLE), expected)
    assert not model.features.network.stem.weight.requires_grad


@pytest.mark.parametrize("shape", [(1, 2, 4, 7), (1, 7, 2, 4)])
def test_maps_of_oblong_images_have_their_channels_where_the_proportion_is_not(shape):
    given, images = torch.randn(shape), torch.rand(2, 3, 16, 32)
    features = add_capsules(Transformer(given), 4, example=images).features(images)
    assert_close(features[0], given[0].movedim(-1, 0) if shape[3] == 7 else given[0])


def test_tokens_of_other_images_than_the_example():
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 6, 4, 4)

        def forward_features(self, x: Tensor) -> Tensor:
            return self.embed(x).flatten(2).transpose(1, 2)

    model = add_capsules(Patches(), 4, example=torch.rand(1, 3, 16, 16))
    for height, width, shape in ((16, 16, (6, 4, 4)), (24, 24, (6, 6, 6)), (8, 32, (6, 2, 8)), (8, 16, (6, 2, 4))):
        images = torch.rand(2, 3, height, width)
        features = model.features(images)
        assert features.shape == (2, *shape)
        assert_close(features, model.features.network.embed(images))
        assert model(images).scores.shape == (2, 4)
    features, example = model.features, torch.rand(1, 3, 18, 32)  # 4x8 patches, of which 18 rows do not know
    assert features(example).shape == (1, 6, 4, 8)
    assert_close(features(example), features.network.embed(example))
    features.network.forward_features = lambda x: x[:, :, 0, :7].transpose(1, 2).repeat(1, 1, 2)
    assert features(example).shape == (1, 6, 7, 1)  # not the rows and columns of patches, but no tokens are lost


def test_as_many_tokens_as_channels():
    """They may be anything for a head alone. Behind a network it is known that they are tokens, or patches."""
    for example in (torch.rand(1, 3, 8, 8), torch.zeros(1, 7, dtype=torch.int64)):
        for count in (9, 7):
            model = add_capsules(Transformer(torch.randn(1, count, count)), 4, example=example)
            assert model.features(example).shape == (
                (1, 9, 3, 3) if example.dim() == 4 and count == 9 else (1, count, count)
            )
            assert model.classifier.dims == model.features.dims == (2 if example.dim() == 4 and count == 9 else 0)
            assert model(example).scores.shape == (1, 4)


def test_signals_and_volumes():
    """Channels are second where the modules say so, also if there are as many channels as positions."""
    signals = torch.rand(2, 3, 20)
    for end in (nn.BatchNorm1d(5), nn.ReLU(), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(5)):
        net = nn.Sequential(nn.Conv1d(3, 5, 3), end).eval()
        model = add_capsules(net, 4, layer="1", example=signals)
        assert_close(model.features(signals), net(signals))
        assert model.classifier.dims == 1
        assert_close(model(signals).scores, CapsuleHead.forward(model.classifier, net(signals)))
        kept = add_capsules(net, 4, layer="1", example=signals, skip_tokens=0)
        assert kept.classifier.dims == 0
        assert kept.classifier.in_features == net(signals).shape[-1]
    square = nn.Sequential(nn.Conv1d(3, 5, 16), nn.Linear(5, 5))  # tokens, although the convolution has such a shape
    model = add_capsules(square, 4, layer="1", example=signals)
    assert model.classifier.dims == 0
    assert model(signals).scores.shape == (2, 4)
    assert add_capsules(square, 4, layer="1", example=signals, dims=1).classifier.dims == 1
    volumes = torch.rand(2, 1, 6, 7, 8)
    model = add_capsules(nn.Sequential(nn.Conv3d(1, 5, 3), nn.ReLU()), 4, layer="1", example=volumes)
    assert (model.classifier.dims, model(volumes).scores.shape) == (3, (2, 4))
    given = Transformer(torch.randn(1, 5, 2, 3, 4))
    model = add_capsules(given, numbers=2, example=volumes, dims=3)
    assert (model.classifier.dims, model.classifier.in_features) == (3, 5)
    assert model(volumes).scores.shape == (2, 2)


def test_numbers_in_place_of_classes(vit):
    model = add_capsules(Net(), numbers=2, routing=EMRouting(), layer="stages", example=EXAMPLE)
    assert isinstance(model.classifier, CapsuleRegressor)
    assert model(EXAMPLE, return_coefficients=True).capsules.coefficients.shape == (2, 16 * 64, 2)
    with pytest.raises(ValueError, match="parts is for classes: leave it out, or give classes in place of numbers"):
        add_capsules(Net(), numbers=2, layer="stages", example=EXAMPLE, parts=3)
    model = library_network(f"transformers/{vit}", 10, numbers=3)
    assert model(torch.rand(2, 3, 32, 32)).scores.shape == (2, 3)
    with pytest.raises(ValueError, match="numbers is not for head='pool'"):
        library_network(f"transformers/{vit}", head="pool", numbers=3)
    model = create_model("capsule_resnet", depth=8, in_channels=1, numbers=2)
    assert isinstance(model.classifier, CapsuleRegressor)


def test_a_frozen_network_loses_what_an_unfrozen_one_does():
    class Both(Net):
        def forward_features(self, x: Tensor) -> Tensor:
            return self.stages(x)

    net = Both()
    expected = add_capsules(Both(), 3, example=EXAMPLE).features.state_dict().keys()
    frozen = add_capsules(Both().requires_grad_(False), 3, example=EXAMPLE).features
    assert frozen.state_dict().keys() == expected
    assert not any(p.requires_grad for p in frozen.parameters())
    with torch.inference_mode():
        assert add_capsules(net, 3, example=EXAMPLE).features.state_dict().keys() == expected
        add_capsules(Both(), 3, example=EXAMPLE)  # built here, it allows no gradients


def test_modules_keep_their_modes():
    net = Net()
    net.stages[0][1].eval()
    model = add_capsules(net, 3, layer="stages.1", example=EXAMPLE)
    assert [module for module in model.modules() if not module.training] == [net.stages[0][1]]


@pytest.mark.parametrize(
    "wrap", [lambda x: torch.compile(x, backend="eager"), lambda x: torch.compile(nn.DataParallel(x), backend="eager")]
)
def test_networks_are_taken_out_of_their_wrappers(wrap):
    net = Net().eval()
    expected, wrapped = net.stages(EXAMPLE), wrap(net)
    own = next(name for name, module in wrapped.named_modules() if module is net.stages)
    for layer in ("stages", own):
        features = add_capsules(wrapped, 3, layer=layer, example=EXAMPLE).features
        assert_close(features(EXAMPLE), expected)
        assert not any("_orig_mod" in name for name in features.state_dict())


def test_shapes_that_say_nothing_of_patches():
    """Images that are not square, and inputs that are no images: tokens stay as they are, unless the network knows."""
    tokens = torch.randn(1, 17, 6)
    for example in (torch.rand(1, 3, 8, 4), torch.zeros(1, 17, dtype=torch.int64)):
        model = add_capsules(Transformer(tokens), 4, example=example)
        assert model.features(example).shape == (1, 17, 6)
    net = Transformer(torch.randn(1, 9, 6))
    net.num_prefix_tokens = 5
    assert add_capsules(net, 4, example=torch.rand(1, 3, 8, 8)).features(torch.rand(1, 3, 8, 8)).shape == (1, 6, 2, 2)
    net = Transformer(torch.randn(1, 7, 14, 768))
    net.output_fmt = "NHWC"
    assert add_capsules(net, 4, example=torch.rand(1, 3, 8, 16)).features(torch.rand(1, 3, 8, 16)).shape == (
        1,
        768,
        7,
        14,
    )


def test_configurations_that_name_code(vit, tmp_path):
    folder = shutil.copytree(vit, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "somebody/kernel"}))
    for pretrained in (True, False):
        with pytest.raises(ValueError, match="names a kernel of the Hub as attn_implementation, which is code"):
            add_capsules(f"transformers/{folder}", 3, pretrained=pretrained)


def test_weights_in_half_precision_are_read_as_float32(vit, tmp_path):
    folder = shutil.copytree(vit, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    for pretrained in (True, False):
        model = add_capsules(f"transformers/{folder}", 3, pretrained=pretrained)
        assert model(torch.rand(1, 3, 32, 32)).scores.dtype == torch.float32


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vit"), image_size=32, patch_size=8, **SIZE)


def test_a_network_of_transformers_brings_its_size_mean_and_deviation(vit):
    model = add_capsules(f"transformers/{vit}", 3)
    assert model.image_shape == (3, 32, 32)
    images = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    network = model.features[1].network.eval()
    expected = network((images - mean) / std).last_hidden_state[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
    assert_close(model.features(images), expected)
    assert_close(model(images).scores, model.classifier(expected))
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 3, 32, 32\), got \(2, 3, 16, 16\)"):
        model(images[..., :16, :16])


def test_weights_of_a_folder_of_a_file_or_none(vit, tmp_path):
    name = f"transformers/{vit}"
    published, again = (add_capsules(name, 3).features.state_dict() for _ in range(2))
    random = add_capsules(name, 3, pretrained=False).features.state_dict()
    assert_close(published, again)
    assert not torch.equal(*(next(iter(state.values())) for state in (published, random)))
    state = {key.removeprefix("1.network."): value for key, value in published.items()}
    torch.save({"state_dict": {**state, "classifier.weight": torch.zeros(7)}}, tmp_path / "all.pt")
    torch.save(dict(list(state.items())[1:]), tmp_path / "less.pt")
    torch.save({**state, "layers.1.weight": torch.zeros(7)}, tmp_path / "more.pt")
    torch.save({**state, "embeddings.cls_token": torch.zeros(7)}, tmp_path / "other.pt")
    (tmp_path / "none.pt").write_bytes(b"no weights")
    torch.save({f"module._orig_mod.{key}": value for key, value in state.items()}, tmp_path / "wrapped.pt")
    save_file(state, tmp_path / "all.safetensors")
    for file in ("all.pt", "all.safetensors", "wrapped.pt"):
        assert_close(add_capsules(name, 3, pretrained=str(tmp_path / file)).features.state_dict(), published)
    for file, says in (
        (
            "less.pt",
            r"has the weights of another network: embeddings.cls_token has shape none there, expected \(1, 1, 16\)",
        ),
        ("more.pt", r"has the weights of another network: layers.1.weight has shape \(.*\) there, expected none"),
        ("none.pt", "none.pt is neither a safetensors file nor a state dict of torch.save"),
        (
            "other.pt",
            r"has the weights of another network: embeddings.cls_token has shape \(7,\) there, expected \(1, 1, 16\)",
        ),
        ("absent.pt", "there is no file .*absent.pt: give true, false or a file of weights of transformers"),
    ):
        with pytest.raises(ValueError, match=says):
            add_capsules(name, 3, pretrained=str(tmp_path / file))


def test_a_classifier_of_transformers_as_a_module():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_channels=1, num_labels=7, **SIZE)
    network = transformers.ViTForImageClassification(config)
    model = add_capsules(network, 3)
    images = torch.rand(2, 1, 32, 32)
    assert model(images).scores.shape == (2, 3)
    assert model.features(images).shape == (2, 16, 4, 4)
    whole = add_capsules(transformers.ViTForImageClassification(config), 3, skip_tokens=0)
    assert whole.features(images).shape == (2, 17, 16)


def test_networks_by_name_that_cannot_be_had(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="'timm/resnet18' needs timm, which is missing: pip install timm"):
        add_capsules("timm/resnet18", 3)

    def fail(*arguments):
        raise ModuleNotFoundError("No module named 'packaging.x'", name="packaging.x")

    monkeypatch.setattr("torchcaps.models.libraries._of_timm", fail)
    with pytest.raises(ImportError, match=r"needs packaging.x, which is missing: install it$"):
        add_capsules("timm/resnet18", 3)
    for name in ("resnet18", "keras/resnet", "timm/"):
        with pytest.raises(ValueError, match="expected the name of a network, 'torchvision/NAME', 'timm/NAME' or "):
            add_capsules(name, 3)
    with pytest.raises(ValueError, match=r"transformers cannot build .*; pretrained=False builds it with random"):
        add_capsules(f"transformers/{tmp_path}", 3)


NO_STANDARDIZATION = [
    {"image_std": None},
    {"image_std": [0.5, 0.0, 0.5]},
    {"image_std": [-0.5, 0.5, 0.5]},
    {"image_std": [float("nan")] * 3},
    {"image_std": [1e-300] * 3},
    {"image_mean": ["a", "b", "c"]},
    {"image_mean": "abc"},
    {"image_mean": [0.5, 0.5]},
    {"image_mean": [123.7, 116.3, 103.5]},  # of images from 0 to 255
    {"image_mean": [10**400] * 3},
    {"image_mean": [True] * 3},
    {"image_mean": [0.5]},
    {"image_std": [0.5]},
]


@pytest.mark.parametrize("values", NO_STANDARDIZATION, ids=str)
def test_images_that_cannot_be_standardized(values):
    (name,) = values
    with pytest.raises(
        ValueError, match=rf"has {name} = .*: expected 3 numbers from 0(.001)? to 1, one of each color$"
    ):
        standardization({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **values}, 3)


@pytest.mark.parametrize(
    "size", [-5, 0, 10**6, "32", 32.0, True, None, [32, 32], {}, {"height": -5}, {"longest_edge": 32}], ids=str
)
def test_images_of_no_size(size):
    with pytest.raises(ValueError, match="has images of size .*: expected an int from 1 to 10,000$"):
        image_side(size)


@pytest.mark.parametrize("values", [{"image_std": None}, {"size": -5}])
def test_a_network_whose_images_cannot_be_made(vit, tmp_path, values):
    folder = shutil.copytree(vit, tmp_path / "vit")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(
        ValueError, match=r"^transformers cannot build .*: expected .*\)$"
    ):  # random weights are no help
        add_capsules(f"transformers/{folder}", 3)


def test_a_routing_pool_needs_a_pool(vit):
    with pytest.raises(ValueError, match="has no nn.AdaptiveAvgPool2d to size 1 that could be replaced: use head='ca"):
        library_network(f"transformers/{vit}", head="pool")
    with pytest.raises(ValueError, match="types is not for head='pool': leave it out, or choose the other head"):
        library_network(f"transformers/{vit}", head="pool", types=3)
    with pytest.raises(ValueError, match="sharpness is not for head='capsules'"):
        library_network(f"transformers/{vit}", sharpness=1.0)


def test_a_routing_pool_in_networks_of_torchvision(monkeypatch):
    """With a last linear layer, as in a ResNet, and without one, as in a SqueezeNet."""
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    networks = {
        "torchvision/resnet": nn.Sequential(nn.Conv2d(3, 32, 3), *pool, nn.Linear(32, 10)),
        "torchvision/squeezenet": nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 10, 1), *pool),
    }
    monkeypatch.setattr(
        "torchcaps.models.backbone.named_network", lambda name, *_: NamedNetwork(networks[name], MEAN, STD, 8)
    )
    model = library_network("torchvision/resnet", 3, head="pool", pretrained=False)
    assert model(torch.rand(2, 3, 8, 8)).scores.shape == (2, 3)
    assert [type(module) for module in networks["torchvision/resnet"]][1:] == [RoutingPool2d, nn.Flatten, nn.Identity]
    with pytest.raises(
        ValueError, match=r"squeezenet has no nn.Linear at its end that could be replaced: use head='ca"
    ):
        library_network("torchvision/squeezenet", 3, head="pool", pretrained=False)


def test_a_resnet_of_this_library():
    model = create_model("capsule_resnet", depth=8, in_channels=1, classes=3)
    plain = create_model("pooling_resnet", depth=8, in_channels=1)
    assert model.features.state_dict().keys() == plain.features.state_dict().keys()
    assert model(EXAMPLE).scores.shape == (2, 3)
