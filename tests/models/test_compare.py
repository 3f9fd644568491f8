"""The network on which only the routing changes, and its controls: scores, gradients, images of any size."""

import pytest
import torch
from networks import assert_it_trains

from torchcaps import (
    Capsules,
    DynamicRouting,
    EMRouting,
    InvertedAttentionRouting,
    create_model,
    list_routings,
    routing,
)
from torchcaps.models import compare
from torchcaps.nn.head import log_activations

SMALL = {"in_channels": 1, "classes": 5, "channels": 6, "types": 3, "parts": 4, "pose": 4}
CONTROLS = {"compare_average": {}, "compare_cnn": {}, "pooling_resnet": {"depth": 20, "pooling": "average"}}
# The algorithms of the package, with arguments of their own.
OWN = [name for name in list_routings() if hasattr(routing, name)]


def own(name: str) -> routing.Routing:
    """Return an algorithm with its own settings; the slots of classes must differ."""
    return getattr(routing, name)(**({"start": "learned"} if name == "SlotAttention" else {}))


@pytest.mark.parametrize("name", OWN)
def test_every_algorithm_with_its_own_settings(name):
    model = compare(own(name), **SMALL)
    assert_it_trains(model, torch.rand(6, 1, 8, 8), 5)
    model.eval()
    assert model(torch.rand(1, 1, 8, 8)).scores.isfinite().all()


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 32, 32), (1, 28, 20)])
def test_controls(name, channels, height, width):
    assert_it_trains(
        create_model(name, in_channels=channels, **CONTROLS[name]), torch.rand(4, channels, height, width), 10
    )


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 32, 32), (1, 9, 14)])
@pytest.mark.parametrize("routing", [DynamicRouting(), EMRouting(), InvertedAttentionRouting()])
def test_any_image(channels, height, width, routing):
    model = compare(routing, **{**SMALL, "in_channels": channels})
    prediction = model(torch.rand(2, channels, height, width), return_coefficients=True)
    assert prediction.scores.shape == (2, 5)
    assert prediction.capsules.poses.shape == (2, 5, 4)
    assert prediction.capsules.coefficients.shape == (2, 4, 5)


def test_logits_by_hand():
    """A pose of length 5 and one of length 0, then scores; the activation of a score is its sigmoid."""
    poses = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    expected = torch.tensor([[5.0, 1e-6]]).log()
    torch.testing.assert_close(log_activations(Capsules(poses)), expected)
    scores = torch.tensor([[0.0, -1000.0]])
    expected = torch.tensor([[-0.693147, -1000.0]])
    torch.testing.assert_close(log_activations(Capsules(poses, scores)), expected)


def test_only_the_routing_changes():
    """All but what an algorithm learns, and the scores that it needs, has the same names and shapes."""
    shapes = {
        name: p.shape for name, p in compare(**SMALL).named_parameters() if name != "classifier.classifier.weight"
    }
    for name in OWN:
        model = compare(own(name), **SMALL)
        other = {key: p.shape for key, p in model.named_parameters() if key != "classifier.classifier.weight"}
        missing = {
            f"classifier.capsules.layers.{k}.weight"
            for k in (0, 1)
            if model.classifier.capsules.layers[0].routing.needs_poses
        }
        assert {key for key, shape in shapes.items() if other.get(key) != shape} == missing
        assert all(".routing." in key or "score_conv" in key for key in other.keys() - shapes.keys())


def test_the_average_has_the_primary_capsules_of_the_network():
    average, network = create_model("compare_average"), compare()
    network.features.load_state_dict(average.features[0].state_dict())
    network.classifier.primary.load_state_dict(average.features[2].state_dict())
    images = torch.rand(2, 3, 16, 16)
    mean = network.classifier.primary_capsules(network.features(images)).poses.flatten(2, 3).mean(2).flatten(1)
    torch.testing.assert_close(average(images).scores, average.classifier(mean))
