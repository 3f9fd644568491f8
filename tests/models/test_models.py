"""CapsNet and its baseline: image sizes; the registry of models."""

import functools
import importlib
import inspect
import re

import pytest
import torch

from torchcaps import (
    CapsNet,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    VectorNormRouting,
    create_model,
    list_models,
    register_model,
)
from torchcaps.functional import squash
from torchcaps.models import convnet_mnist, registry
from torchcaps.models.inputs import check_images

SMALL = {"channels": 8, "kernel_size": 3, "primary_types": 2, "primary_kernel_size": 3, "decoder": (16, 32)}


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, (9, 12)), (2, 32)])
@pytest.mark.parametrize("routing", [None, EMRouting(2), HeinsenRouting(2), VectorNormRouting(2, activation=squash)])
def test_any_image(channels, size, routing):
    model = CapsNet(channels, size, classes=4, routing=routing, **SMALL)
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.rand(2, channels, height, width)
    prediction = model(images)
    assert prediction.evidence.shape == (2, 4)
    assert ((prediction.evidence >= 0) & (prediction.evidence <= 1)).all()
    assert model.reconstruct(prediction.capsules).shape == images.shape


def test_reconstruct_is_the_decoder():
    model = CapsNet(1, 8, classes=3, **SMALL)
    capsules, labels = model(torch.rand(2, 1, 8, 8)).capsules, torch.tensor([2, 0])
    torch.testing.assert_close(model.reconstruct(capsules, labels), model.decoder(capsules, labels))
    torch.testing.assert_close(model.reconstruct(capsules), model.decoder(capsules))


def test_bad_input():
    model = CapsNet(1, 8, **(SMALL | {"decoder": None}))
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 1, 8, 8\), got \(2, 1, 9, 9\)"):
        model(torch.rand(2, 1, 9, 9))
    with pytest.raises(RuntimeError, match="no decoder"):
        model.reconstruct(model(torch.rand(2, 1, 8, 8)).capsules)


@pytest.mark.parametrize(
    ("channels", "given", "advice"),
    [
        (1, (1, 8, 8), ["images.unsqueeze(0)", "images.unsqueeze(1)"]),
        (1, (5, 8, 8), ["images.unsqueeze(1)"]),
        (1, (8, 8), ["images[None, None]"]),
        (1, (5, 8, 8, 1), ["images.movedim(-1, 1)"]),
        (3, (3, 8, 8), ["images.unsqueeze(0)"]),
        (3, (5, 8, 8, 3), ["images.movedim(-1, 1)"]),
        (3, (5, 8, 8), []),
        (3, (5, 9, 9, 3), []),
        (3, (5, 1, 8, 8), []),
        (3, (), []),
    ],
)
def test_images_of_another_shape(channels, given, advice):
    """What the error says gives a shape that the network takes."""
    images, weight = torch.rand(given), torch.rand(1)
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, ., 8, 8\), got") as error:
        check_images(images, (channels, 8, 8), weight)
    assert re.findall(r"images(?:\.|\[)\S*(?:(?<=,) \S*)*[)\]]", str(error.value).partition("got")[2]) == advice
    for way in advice:
        check_images(eval(way), (channels, 8, 8), weight)


def test_registry():
    assert {"capsnet_mnist", "capsnet_digits", "convnet_mnist"} <= set(list_models())
    assert list_models("capsnet_*") == [name for name in list_models() if name.startswith("capsnet_")]
    with pytest.raises(ValueError, match="no model 'capsnet_mnits'; did you mean capsnet_mnist"):
        create_model("capsnet_mnits")
    with pytest.raises(TypeError, match="iteration"):
        create_model("capsnet_mnist", iteration=3)


@pytest.fixture
def own_registry(monkeypatch):
    """A copy of the registry, so that models registered by a test are forgotten."""
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))


BUILDER = """
from torchcaps.models import convnet_mnist, register_model

@register_model
def mine():
    return convnet_mnist()
"""


def test_a_name_that_is_taken(own_registry):
    def capsnet_mnist():
        return convnet_mnist()

    ours = registry._builders["capsnet_mnist"]
    with pytest.raises(ValueError, match="'capsnet_mnist' of .*test_models.py, line .*sabour2017.py, line") as error:
        register_model(capsnet_mnist)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(": give it another name")
    assert registry._builders["capsnet_mnist"] is ours


def test_a_module_that_is_loaded_again(own_registry, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("reloaded_models", "other_models"):
        (tmp_path / f"{name}.py").write_text(BUILDER)
    module = importlib.import_module("reloaded_models")
    first = module.mine
    importlib.reload(module)
    assert registry._builders["mine"] is module.mine is not first
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'reloaded_models.py'}, line")):
        importlib.import_module("other_models")


def test_a_cell_of_a_notebook_that_runs_again(own_registry):
    for cell in ("cell 1", "cell 2"):
        namespace = {"__name__": "__main__"}
        exec(compile("def mine():\n    return None\n", cell, "exec"), namespace)
        register_model(namespace["mine"])
    assert inspect.unwrap(registry._builders["mine"]) is namespace["mine"]


@pytest.mark.parametrize("wrong", [None, 3, "x", torch.nn.Linear(1, 1), functools.partial(convnet_mnist)])
def test_what_is_no_builder(own_registry, wrong):
    with pytest.raises(TypeError, match=r"^register_model takes a function that builds a model, got [^\n]*$"):
        register_model(wrong)


def test_a_builder_that_returns_no_module(own_registry):
    @register_model
    def three():
        return 3

    with pytest.raises(TypeError, match=r"the builder of 'three' must return an nn.Module, got 3 \(int\)"):
        create_model("three")


def test_the_small_capsnet_takes_any_routing_whose_activations_say_how_present_a_class_is():
    network = create_model("capsnet_digits", decoder=False, routing=EMRouting())
    scores = network(torch.rand(2, 1, 8, 8)).evidence
    assert ((scores >= 0) & (scores <= 1)).all()
    for arguments, message in (
        ({"routing": InvertedAttentionRouting()}, "does not say how present a class is.*: use DynamicRouting"),
        ({"routing": EMRouting(), "iterations": 2}, "iterations=2 is of the dynamic routing, .*: leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            create_model("capsnet_digits", **arguments)
