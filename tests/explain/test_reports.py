"""The content of the page, made from networks of all kinds."""

import copy
from dataclasses import replace

import pytest
import torch
from networks import Network
from pictures import draw_digits
from torch import nn

from torchcaps import CapsuleLinear, DynamicRouting, HeinsenRouting, create_model
from torchcaps.data import Digits, ImageFolder
from torchcaps.explain import credit, heat, parse_tree
from torchcaps.explain.page import Samples, image_samples, report, write_page
from torchcaps.explain.page.reports import _agreement

pytest_plugins = ["pages"]


@pytest.fixture(scope="module")
def found(digits):
    other = create_model("capsnet_digits").eval()
    return report(*digits, "digits", [("recipe", "quickstart")], temperature=2.0, shuffled=other)


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


def test_own_pictures_are_called_by_their_files(tmp_path) -> None:
    data = ImageFolder(str(draw_digits(tmp_path / "digits", 0, 20)), num_workers=0)
    samples = image_samples(data, 5)
    assert len(samples.titles) == 5
    for title, label in zip(samples.titles, samples.labels, strict=True):
        assert title.startswith(f"{data.names[label]}/")
        assert title.endswith(".png")


def test_numbers_are_those_of_the_network(digits, found) -> None:
    network, samples = digits
    images = torch.cat(samples.inputs)
    scores = network(images).evidence.detach()
    right = scores.argmax(1) == samples.labels
    (snapshot,) = found["snapshots"]
    assert snapshot["accuracy"] == pytest.approx(float(right.double().mean()))
    of_class = [float(right[samples.labels == label].double().mean()) for label in samples.labels.unique()]
    assert snapshot["balanced"] == pytest.approx(sum(of_class) / len(of_class))
    assert snapshot["tested"] == 60
    confusion = found["confusion"]
    assert (found["scores"], found["temperature"]) == ("activations", 2.0)
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
    assert turned["scores"][turned["values"] == 0][0].tolist() == pytest.approx(scores[index].tolist(), abs=1e-4)


def test_several_labels_are_judged_by_their_thresholds(label_report, of_labels) -> None:
    (snapshot,) = label_report["snapshots"]
    assert snapshot["accuracy"] == pytest.approx(2 / 3)
    assert [example["named"] for example in snapshot["examples"]] == [[0, 2], [1], []]
    assert [example["labels"] for example in snapshot["examples"]] == [[0, 2], [1], [0]]
    assert snapshot["examples"][0]["scores"].tolist() == pytest.approx(torch.tensor([6.0, -4, 6]).sigmoid().tolist())
    assert "probabilities" not in snapshot["examples"][0]
    moved = snapshot["examples"][0]["transformed"][2]
    assert moved["scores"][moved["values"] == 0][0].tolist() == pytest.approx([0.9975, 0.0180, 0.9975], abs=1e-4)
    assert (label_report["scores"], label_report["confusion"]) == ("probabilities", None)
    assert label_report["terms"] == ("label", "labels")
    assert [row[0] for row in label_report["table"]] == ["label", "door", "window", "<chair>", "mean of the labels"]
    assert "adds to a label" in label_report["limits"][1]
    lower = report(*of_labels, "Labels", thresholds=torch.tensor([0.01, 0.01, 0.7]))
    assert [example["named"] for example in lower["snapshots"][0]["examples"]] == [[0, 1, 2], [0, 1], [0, 1]]
    assert lower["snapshots"][0]["accuracy"] == 0
    assert lower["snapshots"][0]["controls"][0]["value"].endswith("0 % with routing")


def test_numbers_have_errors_and_no_accuracy(number_report) -> None:
    (snapshot,) = number_report["snapshots"]
    assert (snapshot["accuracy"], snapshot["tested"], number_report["confusion"]) == (None, 0, None)
    example = snapshot["examples"][0]
    assert example["scores"].tolist() == [6, -4, 6]
    assert example["true"].tolist() == [6.5, -4, 6]
    assert {"probabilities", "labels", "named", "transformed"}.isdisjoint(example)
    assert len(example["trees"]) == 3
    assert all("parts" in tree for tree in example["trees"])
    assert [row[:2] for row in number_report["table"]][:2] == [("number", "RMSE"), ("door", "0.2887")]
    assert [control["name"] for control in snapshot["controls"]][:1] == ["Dead capsules"]


def test_the_agreement_of_maps_is_a_mean_of_rank_correlations() -> None:
    maps = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    # Two exchanges of neighbors: 1 - 6 * 4 / (4 * 15).
    for others, expected in ((3 * maps**2, "+1.00"), (-maps, "-1.00"), (maps.flip(2), "+0.60")):
        assert _agreement(maps, others) == expected
    even = torch.ones(1, 2, 2)  # it ranks nothing
    assert _agreement(torch.cat([maps, even]), torch.cat([-maps, maps])) == "-1.00"
    assert _agreement(even, maps) == "nothing that can be compared"


def test_controls(found) -> None:
    controls = found["snapshots"][0]["controls"]
    names = [control["name"] for control in controls]
    assert names == ["Uniform coefficients", "Dead capsules", "Weights drawn anew", "Shuffled labels"]
    assert "% with routing" in controls[0]["value"]
    assert len(controls[3]["pictures"]) == 9


def test_mistakes_are_examples_and_a_module_without_reset_costs_one_control(digits) -> None:
    network, samples = digits
    labels = samples.labels.clone()
    labels[17] = (labels[17] + 1) % 10
    network = copy.deepcopy(network)
    network.extra = nn.MultiheadAttention(4, 2)  # it cannot draw its weights anew
    (snapshot,) = report(network, replace(samples, labels=labels), "digits")["snapshots"]
    assert any(x["title"] == samples.titles[17] and x["predicted"] != x["label"] for x in snapshot["examples"])
    assert [control["name"] for control in snapshot["controls"]] == ["Uniform coefficients", "Dead capsules"]


def test_statistics_are_of_all_classes_of_a_sorted_test_set(digits) -> None:
    _, samples = digits
    ordered = Samples(samples.inputs, samples.labels.sort().values, samples.names, samples.titles)
    assert len({int(label) for _, labels in ordered.batches(10) for label in labels}) > 5
    ((_, labels),) = ordered.batches(30)
    assert set(labels.tolist()) == set(range(10))


def test_several_states(digits_report) -> None:
    before, after = digits_report["snapshots"]
    assert (before["label"], after["label"]) == ("after epoch 1", "after epoch 25")
    assert before["accuracy"] < 0.4 < 0.9 < after["accuracy"]
    titles = [[example["title"] for example in snapshot["examples"]] for snapshot in (before, after)]
    assert titles[0] == titles[1]
    assert int(digits_report["confusion"].diagonal().sum()) == round(60 * after["accuracy"])


@pytest.mark.parametrize(
    ("model", "options", "shape", "classes", "layers"),
    [
        ("narrow_cifar10", {"routing": HeinsenRouting(2), "types": 2, "channels": 8}, (3, 32, 32), 10, 3),
        ("capnet_em", {"types": 2, "grid": 2}, (3, 32, 32), 10, 2),
        ("shallow_encapnet", {"types": 2}, (3, 32, 32), 10, 1),
        ("heinsen_smallnorb", {"parts": 4, "channels": 4}, (2, 32, 32), 5, 2),
        ("pooling_resnet_small", {}, (3, 32, 32), 10, 1),
        ("pooling_cnn", {"pooling": "max"}, (3, 32, 32), 10, 0),
    ],
)
def test_networks_of_all_papers(model, options, shape, classes, layers, tmp_path) -> None:
    found = noise(create_model(model, **options), shape, classes, model)
    assert len(found["layers"]) == layers
    example = found["snapshots"][0]["examples"][0]
    assert ("maps" in example) == bool(layers)
    assert ("trees" in example) == (bool(layers) and not model.startswith("pooling"))  # a pool has no tree
    assert found["limits"]
    write_page(found, tmp_path / "index.html")


def test_activations_of_a_network_of_ones_own_and_classes_without_samples() -> None:
    """And pictures of unknown classes are all shown, also at several checkpoints."""
    capsules = CapsuleLinear(16, 5, 4, 4, DynamicRouting(2))
    network = Network(lambda net, x: net.capsules(x.reshape(len(x), 16, 4)), capsules=capsules).eval()
    images = torch.rand(6, 1, 8, 8)
    samples = Samples(list(images.split(1)), None, ["a", "b"], [f"picture {k}" for k in range(6)])
    found = report(network, samples, "own", states=[("first", lambda: None), ("last", lambda: None)])
    assert (found["scores"], found["classes"]) == ("activations", ["a", "b", "class 2", "class 3", "class 4"])
    assert [len(snapshot["examples"]) for snapshot in found["snapshots"]] == [6, 6]


def test_images_of_two_classes_are_taken_apart(digits) -> None:
    network, samples = digits
    labels = torch.zeros(60, 10)
    labels[torch.arange(60), samples.labels] = 1
    labels[1:, 0] = 1
    both = Samples(samples.inputs[:8], labels[:8], samples.names, samples.titles[:8], dark=True)
    found = report(network, both, "two")
    (snapshot,) = found["snapshots"]
    assert found["confusion"] is None
    assert len(snapshot["overlaps"]) == 5
    assert set(snapshot["overlaps"][0]["labels"]) == set(labels[1].nonzero().flatten().tolist())
    assert "inputs" not in snapshot["overlaps"][0]
    assert snapshot["examples"][1]["labels"] == labels[1].nonzero().flatten().tolist()
    assert snapshot["examples"][1]["label"] is None


def test_many_classes_have_maps_of_the_likeliest_alone() -> None:
    found = noise(create_model("shallow_encapnet", types=2, classes=100), (3, 32, 32), 100)
    example = found["snapshots"][0]["examples"][0]
    maps = example["maps"][0]["maps"]
    assert 20 <= sum(bool(text) for text in maps) <= 21
    assert maps[example["predicted"]]
    assert maps[example["label"]]
