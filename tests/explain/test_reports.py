"""The content of the page, made from networks of all kinds."""

import copy
import json

import pytest
import torch
from reports import image_report
from torch import nn

from torchcaps import HeinsenRouting, InvertedAttentionRouting, create_model
from torchcaps.data import Digits
from torchcaps.explain import credit, heat, parse_tree
from torchcaps.explain.page import Samples, image_samples, report, write_page


def keys(value: object) -> object:
    """The names in a report, without the values."""
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return None


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Samples]:
    return create_model("capsnet_digits", pretrained="digits"), image_samples(Digits(), 60)


@pytest.fixture(scope="module")
def found(digits):
    return report(*digits, "digits", [("recipe", "quickstart")], temperature=2.0)


def noise(network: nn.Module, shape: tuple[int, int, int], classes: int, title: str = "noise"):
    torch.manual_seed(0)
    images = torch.rand(4, *shape)
    names = [f"class {k}" for k in range(classes)]
    samples = Samples(list(images.split(1)), torch.arange(4) % classes, names, [f"image {k}" for k in range(4)])
    return report(network.eval(), samples, title)


def test_samples_are_evenly_spaced_and_named(digits) -> None:
    _, samples = digits
    data = Digits()
    data.setup("test")
    assert samples.titles[0] == "test image 0"
    assert samples.titles[-1] == f"test image {len(data.test_set) - 1}"
    place = int(samples.titles[30].split()[-1])
    torch.testing.assert_close(samples.inputs[30][0], data.test_set[place][0])
    assert int(samples.labels[30]) == int(data.test_set[place][1])
    assert samples.dark


def test_a_report_has_all_that_the_page_shows(found) -> None:
    made_up = image_report()
    assert set(found) == set(made_up)
    (snapshot,) = found["snapshots"]
    assert set(snapshot) == set(made_up["snapshots"][0])
    for example in snapshot["examples"]:
        assert set(example) == set(made_up["snapshots"][0]["examples"][0]) - {"words", "word_shares"}
    for name in ("sharpening", "overlaps"):
        assert set(snapshot[name][0]) == set(made_up["snapshots"][0][name][0])
    json.dumps(found, allow_nan=False)


def test_numbers_are_those_of_the_network(digits, found) -> None:
    network, samples = digits
    images = torch.cat(samples.inputs)
    scores = network(images).evidence.detach()
    right = scores.argmax(1) == samples.labels
    (snapshot,) = found["snapshots"]
    assert snapshot["accuracy"] == pytest.approx(float(right.double().mean()))
    assert snapshot["tested"] == 60
    confusion = torch.tensor(found["confusion"])
    assert int(confusion.diagonal().sum()) == int(right.sum())
    assert int(confusion.sum()) == 60
    example = snapshot["examples"][3]
    index = samples.titles.index(example["title"])
    assert example["label"] == 3
    assert example["scores"] == pytest.approx(scores[index].tolist(), rel=1e-4)
    assert example["probabilities"] == pytest.approx((scores[index] / 2).softmax(0).tolist(), rel=1e-4)
    tree = parse_tree(credit(network, images[index : index + 1]), 0, 3)
    assert example["trees"][3]["parts"][0]["share"] == pytest.approx(tree.parts[0].share, rel=1e-4)
    row, column = tree.parts[0].place
    assert example["trees"][3]["parts"][0]["name"] == f"row {row + 1}, column {column + 1}"
    (maps,) = example["maps"]
    assert maps["peak"] == pytest.approx(
        float(heat(network, images[index : index + 1])["class_capsules"].max()), rel=1e-3
    )
    assert example["sliders"]["values"][5] == 0
    assert len(example["sliders"]["pose"]) == example["sliders"]["sprite"]["rows"] == 16
    turned = example["transformed"][0]
    assert turned["scores"][turned["values"].index(0)] == pytest.approx(scores[index].tolist(), abs=1e-4)


def test_mistakes_are_among_the_examples(digits) -> None:
    network, samples = digits
    scores = network(torch.cat(samples.inputs)).evidence
    wrong_labels = samples.labels.clone()
    wrong_labels[17] = (int(scores[17].argmax()) + 1) % 10
    mistaken = Samples(samples.inputs, wrong_labels, samples.names, samples.titles)
    examples = report(network, mistaken, "digits")["snapshots"][0]["examples"]
    assert any(x["title"] == samples.titles[17] and x["predicted"] != x["label"] for x in examples)


def test_controls(digits) -> None:
    network, samples = digits
    other = create_model("capsnet_digits").eval()
    (snapshot,) = report(network, samples, "digits", shuffled=other)["snapshots"]
    names = [control["name"] for control in snapshot["controls"]]
    assert names == ["Uniform coefficients", "Dead capsules", "Weights drawn anew", "Shuffled labels"]
    assert "% with routing" in snapshot["controls"][0]["value"]
    assert len(snapshot["controls"][3]["pictures"]) == 9


def test_a_module_that_cannot_draw_its_weights_anew_costs_one_control(digits) -> None:
    network, samples = digits
    network = copy.deepcopy(network)
    network.extra = nn.MultiheadAttention(4, 2)
    (snapshot,) = report(network, samples, "digits")["snapshots"]
    assert [control["name"] for control in snapshot["controls"]] == ["Uniform coefficients", "Dead capsules"]


def test_statistics_are_of_all_classes_of_a_sorted_test_set(digits) -> None:
    _, samples = digits
    ordered = Samples(samples.inputs, samples.labels.sort().values, samples.names, samples.titles)
    assert len({int(ordered.labels[index]) for index in ordered.spread(10)}) > 5
    ((_, labels),) = ordered.batches(30)
    assert set(labels.tolist()) == set(range(10))


def test_several_states(digits) -> None:
    network, samples = digits
    trained = {name: value.clone() for name, value in network.state_dict().items()}
    fresh = create_model("capsnet_digits").state_dict()
    states = [("before", lambda: network.load_state_dict(fresh)), ("after", lambda: network.load_state_dict(trained))]
    found = report(network, samples, "digits", states=states)
    before, after = found["snapshots"]
    assert (before["label"], after["label"]) == ("before", "after")
    assert before["accuracy"] < 0.4 < 0.9 < after["accuracy"]
    titles = [[example["title"] for example in snapshot["examples"]] for snapshot in found["snapshots"]]
    assert titles[0] == titles[1]
    assert int(torch.tensor(found["confusion"]).diagonal().sum()) == round(60 * after["accuracy"])


@pytest.mark.parametrize(
    ("model", "options", "shape", "classes", "layers"),
    [
        ("narrow_cifar10", {"routing": InvertedAttentionRouting(2), "types": 2, "channels": 8}, (3, 32, 32), 10, 3),
        ("narrow_cifar10", {"routing": HeinsenRouting(2), "types": 2, "channels": 8}, (3, 32, 32), 10, 3),
        ("capnet_em", {"types": 2, "grid": 2}, (3, 32, 32), 10, 2),
        ("shallow_encapnet", {"types": 2}, (3, 32, 32), 10, 1),
        ("heinsen_smallnorb", {"parts": 4, "channels": 4}, (2, 32, 32), 5, 2),
        ("pooling_resnet_small", {}, (3, 32, 32), 10, 1),
        ("pooling_cnn", {"pooling": "max"}, (3, 32, 32), 10, 0),
        ("convnet_mnist", {}, (1, 28, 28), 10, 0),
    ],
)
def test_networks_of_all_papers(model, options, shape, classes, layers, tmp_path) -> None:
    torch.manual_seed(0)
    found = noise(create_model(model, **options), shape, classes, model)
    assert len(found["layers"]) == layers
    example = found["snapshots"][0]["examples"][0]
    assert ("maps" in example) == bool(layers)
    assert found["limits"]
    write_page(found, tmp_path / "index.html")


def test_images_of_two_classes_are_taken_apart(digits) -> None:
    network, samples = digits
    labels = torch.zeros(60, 10)
    labels[torch.arange(60), samples.labels] = 1
    labels[1:, 0] = 1
    both = Samples(samples.inputs, labels, samples.names, samples.titles, dark=True)
    found = report(network, both, "two")
    (snapshot,) = found["snapshots"]
    assert found["confusion"] is None
    assert len(snapshot["overlaps"]) == 5
    assert set(snapshot["overlaps"][0]["labels"]) == set(labels[1].nonzero().flatten().tolist())
    assert "inputs" not in snapshot["overlaps"][0]
    assert snapshot["examples"][1]["title"].endswith(f"0 and {int(samples.labels[1])}")
    assert snapshot["examples"][1]["label"] is None


def test_many_classes_have_maps_of_the_likeliest_alone() -> None:
    found = noise(create_model("shallow_encapnet", types=2, classes=100), (3, 32, 32), 100)
    example = found["snapshots"][0]["examples"][0]
    maps = example["maps"][0]["maps"]
    assert 20 <= sum(bool(text) for text in maps) <= 21
    assert maps[example["predicted"]]
    assert maps[example["label"]]
