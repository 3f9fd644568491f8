"""Protocols on cases whose answers are known."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from networks import Network
from torch import Tensor, nn

from torchcaps import (
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    CapsuleShared,
    DynamicRouting,
    EMRouting,
    Prediction,
    RoutingPool2d,
    Segmentation,
    SlotAttention,
    UniformRouting,
    create_model,
    squash,
)
from torchcaps.data import EncodedImages, StereoData, TextData
from torchcaps.data.stereo import Metadata
from torchcaps.evaluate import PROTOCOLS, DoesNotApply, Subject, evaluate, viewpoint
from torchcaps.evaluate.attack import attack, gradient
from torchcaps.evaluate.corruptions import CORRUPTIONS, _blurred, corrupted, plasma, turned_masks
from torchcaps.evaluate.drawing import protocol_figure
from torchcaps.evaluate.overlap import pairs
from torchcaps.evaluate.parts import change_of_coefficients
from torchcaps.evaluate.pose import features_of, r2
from torchcaps.evaluate.routing import agreement, changed_coefficients, changes
from torchcaps.evaluate.runs import subject_of
from torchcaps.explain.controls import uniform_coefficients
from torchcaps.explain.dead import dead_capsules
from torchcaps.measures.calibration import calibration_error, reliability
from torchcaps.recipes import load_recipe
from torchcaps.training.build import Training
from torchcaps.training.values import Values


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=seeded())


class Routed(nn.Module):
    """Capsules from pixels, a convolution and class capsules."""

    def __init__(self, routing: nn.Module) -> None:
        super().__init__()
        self.conv = CapsuleConv2d(2, 3, 4, 4, kernel_size=2, routing=routing)
        self.digits = CapsuleLinear(12, 5, 4, 4, routing=routing)
        self.double()

    def forward(self, images: Tensor) -> Prediction:
        poses = images.double().unflatten(1, (2, 4)).movedim(2, -1)
        scores = images.double().mean(1, keepdim=True).expand(-1, 2, -1, -1)
        capsules = self.digits(self.conv(Capsules(squash(poses), scores)))
        return Prediction(activations=capsules.activations, capsules=capsules)


# Affine


class Lookup(nn.Module):
    """Recognizes the images that it was given, whose gray levels are bytes; all others are of class 0."""

    def __init__(self, images: Tensor, labels: Tensor, classes: int) -> None:
        super().__init__()
        self.known = {self.key(image): int(label) for image, label in zip(images, labels, strict=True)}
        self.classes = classes

    def key(self, image: Tensor) -> bytes:
        return (255 * image).round().byte().numpy().tobytes()

    def forward(self, images: Tensor) -> Tensor:
        found = torch.tensor([self.known.get(self.key(image), 0) for image in images])
        return nn.functional.one_hot(found, self.classes).float()


def test_accuracy_by_severity() -> None:
    """A network that knows the images only as they are: all others are of class 0, and no image is."""
    images = (255 * random_images(30, 1, 9, 9)).round() / 255
    labels = 1 + torch.arange(30) % 3
    found = evaluate(Subject(Lookup(images, labels, 4), images, labels), ["affine"])["affine"]
    assert found["numbers"] == {"accuracy as they are (%)": 100, "accuracy on affine images (%)": 0}
    shifts = dict(found["curves"]["shift"]["points"])
    assert shifts == {0.0: 100, 5.0: 0, 10.0: 0, 15.0: 0, 20.0: 0}
    assert [x for x, _ in found["curves"]["rotation"]["points"]] == [-30, -20, -10, 0, 10, 20, 30]
    assert [x for x, _ in found["curves"]["scale"]["points"]] == [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]


# Viewpoint


class Poses(StereoData):
    """Images whose pixels are the class and the indices of elevation and azimuth."""

    shape = (2, 2, 2)

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        grid = torch.cartesian_prod(torch.arange(5), torch.arange(9), torch.arange(0, 36, 2), torch.arange(2))
        images = grid[:, :, None].byte().expand(-1, -1, 2).unflatten(1, (2, 2))
        return images, Metadata(grid[:, 0], torch.zeros(len(grid)).long(), *grid[:, 1:].unbind(1))


class OfFamiliarPoses(nn.Module):
    """Knows the class at elevations 0 and 1 and azimuths below 6, and takes another one for it elsewhere."""

    def forward(self, images: Tensor) -> Tensor:
        class_, elevation, azimuth, _ = (255 * images[..., 0]).round().long().flatten(1).unbind(1)
        knows = (elevation < 2) & (azimuth < 6)
        return nn.functional.one_hot((class_ + ~knows) % 5, 5).float()


def test_a_network_that_knows_only_familiar_viewpoints() -> None:
    data = Poses(train_elevations=[0, 1], train_azimuths=[0, 2, 4], test_elevations=[3], train_lightings=[0])
    subject = Subject(OfFamiliarPoses(), torch.zeros(1, 2, 2, 2), torch.zeros(1).long(), data=data)
    found = evaluate(subject, ["viewpoint"])["viewpoint"]
    assert found["numbers"] == {"familiar viewpoints: accuracy (%)": 100, "new viewpoints: accuracy (%)": 0}
    assert found["images"] == 5 * 9 * 18 * 2
    elevations = dict(found["curves"]["elevation"]["points"])
    assert list(elevations) == [30, 35, 40, 45, 50, 55, 60, 65, 70]
    assert [angle for angle, value in elevations.items() if value] == [30, 35]
    assert elevations[30] == pytest.approx(100 * 3 / 18)  # three of the azimuths are familiar
    azimuths = dict(found["curves"]["azimuth"]["points"])
    assert [angle for angle, value in azimuths.items() if value] == [0, 20, 40]
    assert data.grid(train=False)[0] == [3]
    whole = evaluate(replace(subject, data=Poses()), ["viewpoint"])["viewpoint"]
    assert whole["reason"].startswith("the training had all viewpoints: train with some, by ")


def test_angles_are_means_over_all_pairs_where_only_some_were_tested() -> None:
    hits = torch.tensor([100.0, 100.0, 50.0, torch.nan, torch.nan, torch.nan, 0.0])
    familiar = torch.tensor([True, True, False, False, False, False, False])
    at = torch.tensor([True] * 6 + [False])
    assert viewpoint._mean(hits, at, familiar) == pytest.approx((2 * 100 + 4 * 50) / 6)


# Images of a run


def test_images_of_a_run_are_in_random_order() -> None:
    """A protocol may take the first ones only, and the files of a data set may be in the order of the classes."""
    training = Training(Values.of(load_recipe("quickstart")))
    subject = subject_of(training, 100, 0, lambda line: None, lambda count: training.model.network)
    stored = training.datamodule.test_set.images.float() / 255
    places = [int((stored == image).flatten(1).all(1).nonzero()[0]) for image in subject.images]
    assert places != sorted(places)
    assert torch.equal(subject.labels, training.datamodule.test_set.labels[places])


# Few images


def test_accuracy_by_the_number_of_images() -> None:
    """A training that learns a class by heart for each 10 images."""
    labels = torch.arange(100) % 10
    images = (255 * random_images(100, 1, 8, 8)).round() / 255

    def training(count: int) -> nn.Module:
        known = labels < count / 50
        return Lookup(images[known], labels[known], 10)

    found = evaluate(Subject(training(0), images, labels, training=training), ["few"])["few"]
    # Class 0 is right in any case.
    assert found["curves"][""]["points"] == [(10, 10), (50, 10), (100, 20), (500, 100)]
    assert found["numbers"]["500 images per class: accuracy (%)"] == 100


def test_counts_that_a_class_does_not_have() -> None:
    images, labels = random_images(2, 1, 8, 8), torch.arange(2)

    def training(count: int) -> nn.Module:
        if count > most:
            raise DoesNotApply(f"one class has {most} training images")
        return Lookup(images, labels, 2)

    most = 60
    subject = Subject(training(1), images, labels, training=training)
    found = evaluate(subject, ["few"])["few"]
    assert found["curves"][""]["points"] == [(10, 100), (50, 100)]
    assert found["notes"] == ["100 and 500 images per class: one class has 60 training images."]
    most = 9
    assert evaluate(subject, ["few"])["few"]["reason"] == "one class has 9 training images"


# Overlap


class Rows(nn.Module):
    """The score of a class is the brightness of its row."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((1, 3))


def test_a_network_that_sees_both_images_finds_both() -> None:
    labels = torch.tensor([0, 1, 2, 3, 3, 3])
    images = torch.zeros(6, 1, 8, 8)  # too small to be moved
    images[torch.arange(6), 0, labels + 1, 1:-1] = 1
    both, classes = pairs(images, labels, seeded())
    assert classes.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0], [3, 0], [3, 0]]
    assert torch.equal(both[0], images[0] + images[1])
    subject = Subject(Rows(), images, labels + 1)
    numbers = evaluate(subject, ["overlap"])["overlap"]["numbers"]
    assert set(numbers.values()) == {100}
    images[:3] *= 0.5  # too dark to be seen below; one of them is in each pair
    blind = Subject(nn.Sequential(Rows(), nn.Threshold(0.5, 0)), images, labels + 1)
    assert list(evaluate(blind, ["overlap"])["overlap"]["numbers"].values())[::2] == [50, 0]
    own = Subject(Rows(), both, torch.zeros(6, 8).scatter(1, classes + 1, 1.0))
    assert evaluate(own, ["overlap"])["overlap"]["numbers"] == {
        "its own test: all classes have the highest scores (%)": 100
    }
    gray = evaluate(Subject(Rows(), images + 0.1, labels + 1), ["overlap"])["overlap"]
    assert gray["reason"].startswith("the images are not gray on black")


def test_images_are_moved_by_whole_pixels() -> None:
    images = torch.zeros(400, 1, 19, 19)
    images[:, :, 9, 9] = 1
    labels = torch.arange(400) % 2
    both, _ = pairs(images, labels, seeded())
    row, column = both[:, 0].nonzero()[:, 1:].unbind(1)
    for places in (row, column):
        assert places.unique().tolist() == [7, 8, 9, 10, 11]  # a ninth of 19 pixels is 2


# Routing


@pytest.mark.parametrize("routing", [DynamicRouting(3), EMRouting(2), DynamicRouting(3, softmax="children")])
def test_coefficients_that_are_not_changed_change_nothing(routing: nn.Module) -> None:
    network = Routed(routing)
    images = random_images(3, 8, 3, 3)
    layers = [network.conv, network.digits]
    with changed_coefficients(layers, lambda x, over_parents, absent: x):
        same = network(images)
    plain = network(images)
    assert torch.allclose(same.evidence, plain.evidence, rtol=0, atol=1e-9)
    mean = lambda x, over_parents, absent: x.mean(2 if over_parents else 1, keepdim=True).expand_as(x)  # noqa: E731
    with changed_coefficients([network.digits], mean):
        changed = network(images)
    with network.digits.routing.uniform():
        expected = network(images)
    assert torch.allclose(changed.evidence, expected.evidence, rtol=0, atol=1e-9)
    assert not torch.allclose(changed.evidence, plain.evidence, atol=1e-6)
    assert torch.equal(network(images).evidence, plain.evidence)  # nothing is left behind


def test_changed_coefficients_keep_their_sums() -> None:
    for over_parents, dim in ((True, 2), (False, 1)):
        coefficients = torch.rand(4, 5, 3, generator=seeded()).softmax(dim)
        for name, change in changes(seeded()).items():
            changed = change(coefficients, over_parents, None)
            assert torch.allclose(changed.sum(dim), torch.ones(()), atol=1e-6), name
        shuffled = changes(seeded())["shuffled"](coefficients, over_parents, None)
        assert torch.equal(shuffled.sort(dim).values, coefficients.sort(dim).values)
        assert not torch.equal(shuffled, coefficients)


def test_another_image_gives_the_coefficients_of_the_same_window() -> None:
    """Windows are samples of their own: 6 images have 4 each here."""
    coefficients = torch.rand(6, 4, 5, 3, generator=seeded())
    changed = changes(seeded())["another image's"](coefficients.flatten(0, 1), True, None)
    assert torch.equal(changed.unflatten(0, (6, 4)), coefficients[[3, 4, 5, 0, 1, 2]])


def test_absent_children_get_no_coefficients() -> None:
    absent = torch.tensor([[False, True, False, False, True], [False, False, False, True, False]])
    logits = torch.rand(2, 5, 3, generator=seeded()).masked_fill(absent.unsqueeze(2), -torch.inf)
    coefficients = logits.softmax(1)
    for name in ("random", "shuffled"):
        changed = changes(seeded())[name](coefficients, False, absent)
        assert torch.equal(changed == 0, absent.unsqueeze(2).expand(-1, -1, 3)), name
        assert torch.allclose(changed.sum(1), torch.ones(())), name
        assert not torch.allclose(changed, coefficients), name
    assert torch.equal(changed.sort(1).values, coefficients.sort(1).values)


def test_uniform_coefficients_lose_nothing_by_a_shuffle() -> None:
    network = Routed(UniformRouting())
    images = random_images(40, 8, 3, 3)
    labels = network(images).evidence.argmax(1)
    numbers = evaluate(Subject(network, images, labels), ["routing"])["routing"]["numbers"]
    for what in ("uniform", "shuffled", "another image's"):
        for layer in ("conv", "digits", "all layers"):
            assert numbers[f"{layer}, {what}: accuracy (%)"] == 100
            assert numbers[f"{layer}, {what}: predictions that change (%)"] == 0
    assert numbers["accuracy as it is (%)"] == 100
    random = [numbers[f"{layer}, random: predictions that change (%)"] for layer in ("conv", "digits", "all layers")]
    assert max(random) > 0


def test_entropy_and_agreement_by_iteration() -> None:
    """Children that agree: dynamic routing begins uniform, then sharpens toward the parent that they agree on."""
    network = Routed(DynamicRouting(3))
    images = random_images(4, 8, 3, 3)
    curves = evaluate(Subject(network, images, torch.arange(4)), ["routing"])["routing"]["curves"]
    for layer in ("conv", "digits"):
        entropy, cosine = (dict(curves[f"{layer}: {what}"]["points"]) for what in ("entropy", "agreement"))
        assert entropy[1.0] == pytest.approx(100)
        assert entropy[1.0] > entropy[2.0] > entropy[3.0]
        assert cosine[1.0] < cosine[2.0] < cosine[3.0] <= 1
    one = CapsuleLinear(1, 1, 4, 4, routing=DynamicRouting(2))  # a parent is its only child's vote, squashed
    assert agreement(nn.Sequential(one), [Capsules(random_images(5, 1, 4))])["0"] == pytest.approx([1, 1])
    slots = CapsuleShared(None, 2, 4, SlotAttention(2))  # its parents are no sums of votes
    assert agreement(nn.Sequential(slots), [Capsules(random_images(5, 3, 4))]) == {}


def test_a_pool_routes_too() -> None:
    network = nn.Sequential(RoutingPool2d(4, sharpness=20.0), nn.Flatten())
    images = random_images(40, 4, 5, 5)
    found = evaluate(Subject(network, images, torch.arange(40) % 4), ["routing"])["routing"]
    assert found["curves"]["0: entropy"]["points"][-1][1] < 99
    routed = network(images).argmax(1)
    with uniform_coefficients(network):
        changed = 100 * float((network(images).argmax(1) != routed).float().mean())
    assert found["numbers"]["0, uniform: predictions that change (%)"] == pytest.approx(changed)
    assert changed > 0
    assert found["numbers"]["0, another image's: predictions that change (%)"] > 0


# Parts


def test_uniform_coefficients_do_not_change_and_others_do() -> None:
    images = random_images(20, 8, 3, 3)
    uniform = change_of_coefficients(Routed(UniformRouting()), images)
    assert uniform == pytest.approx({"conv": 0, "digits": 0}, abs=1e-4)
    assert min(change_of_coefficients(Routed(DynamicRouting(3)), images).values()) > 0.1


def test_children_that_are_never_there_do_not_count() -> None:
    """A convolution whose padding doubles the number of its children."""
    layer = CapsuleConv2d(2, 3, 4, 4, kernel_size=3, stride=3, routing=DynamicRouting(2))
    padded = CapsuleConv2d(2, 3, 4, 4, kernel_size=3, stride=3, padding=3, routing=DynamicRouting(2))
    padded.load_state_dict(layer.state_dict())
    networks = [Network(lambda net, poses: net.layer(poses).poses, layer=x) for x in (layer, padded)]
    poses = random_images(20, 2, 3, 3, 4)
    alone, beside_padding = (change_of_coefficients(network, poses)["layer"] for network in networks)
    assert alone > 0.1
    assert beside_padding == pytest.approx(alone)


def test_a_dead_capsule_and_a_layer_without_a_gradient() -> None:
    network = Routed(DynamicRouting(1))
    with torch.no_grad():
        network.digits.weight[:, 0] = 0
    network.conv.requires_grad_(False)
    images = random_images(20, 8, 3, 3)
    loss = lambda scores, labels: 2 * scores.sum()  # noqa: E731
    found = evaluate(Subject(network, images, torch.arange(20) % 5, loss=loss), ["parts"])["parts"]
    numbers = found["numbers"]
    assert numbers["digits: dead capsules (%)"] == pytest.approx(20)
    assert [x for x, _ in found["curves"]["dead capsules"]["points"]] == [1, 2]
    network.eval()(images).evidence.sum().backward()
    weights = sum(float(p.detach().square().sum()) for p in network.digits.parameters())
    slopes = sum(float(p.grad.square().sum()) for p in network.digits.parameters())
    assert numbers["digits: gradient norm / weight norm"] == pytest.approx(2 * (slopes / weights) ** 0.5, rel=1e-6)
    assert numbers["conv: gradient norm / weight norm"] == 0


# Pose


class Centroid(nn.Module):
    """The pose of each class capsule is the center of brightness, times the number of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)  # the last module with weights

    def forward(self, images: Tensor) -> Prediction:
        mass = images.sum((1, 2, 3))
        places = torch.arange(images.shape[-1], dtype=images.dtype)
        down = (images.sum((1, 3)) * places).sum(1) / mass
        right = (images.sum((1, 2)) * places).sum(1) / mass
        self.scale(mass[:, None])
        center = torch.stack([right, down], 1)
        poses = center[:, None] * torch.tensor([1.0, -3.0])[:, None]
        return Prediction(torch.stack([right, 9 - right], 1), Capsules(poses))


def test_a_pose_that_is_there_is_found() -> None:
    images = torch.zeros(400, 1, 17, 17)
    images[:, :, 6:11, 6:11] = 1
    numbers = evaluate(Subject(Centroid(), images, torch.zeros(400).long()), ["pose"])["pose"]["numbers"]
    assert numbers["R2 of shift across, from the pose"] > 0.99
    assert numbers["R2 of shift down, from the pose"] > 0.99
    assert numbers["R2 of rotation, from the pose"] < 0.1
    below = {name: value for name, value in numbers.items() if name.endswith("penultimate layer")}
    assert max(below.values()) < 0.7  # the mass says only something of the scale


def test_each_class_has_a_regression_of_its_own() -> None:
    factors = torch.randn(400, 1, generator=seeded())
    winners = torch.arange(400) % 2
    features = torch.where(winners[:, None] == 0, factors, 5 - 3 * factors)
    assert r2(features, winners, factors)[0] > 0.999
    assert r2(features, torch.zeros(400).long(), factors)[0] < 0.9
    noise = torch.randn(400, 100, generator=seeded(1))  # fits some of the images, and says nothing of the others
    assert r2(noise, torch.zeros(400).long(), factors)[0] < 0.1
    poses, penultimate, classes = features_of(Centroid(), random_images(5, 1, 9, 9))
    assert poses is not None
    assert (poses.shape, penultimate.shape, classes.shape) == ((5, 2), (5, 1), (5,))
    point = torch.zeros(2, 1, 9, 9)
    point[0, 0, 4, 8] = point[1, 0, 4, 2] = 1  # class 0 wins on the right, class 1 on the left
    assert features_of(Centroid(), point)[0].tolist() == [[8, 4], [-6, -12]]  # type: ignore[union-attr]


# Attacks


def test_an_attack_on_a_linear_network_is_the_closed_form() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    images = 0.4 + 0.2 * random_images(50, 1, 3, 3)  # so far from 0 and 1 that nothing is clipped
    labels = network(images).argmax(1)
    weight = network[1].weight.detach()
    directions = (weight[1 - labels] - weight[labels]).view(-1, 1, 3, 3)
    assert torch.allclose(gradient(network, images, labels), directions, atol=1e-6)
    for steps, length in ((1, 1.0), (10, 0.2)):
        changed = attack(network, images, labels, 0.1, steps, length)
        assert torch.allclose(changed, images + 0.1 * directions.sign(), atol=1e-5)
    random = attack(network, images, labels, 0.1, 10, 0.25, seeded())
    assert torch.allclose(random, images + 0.1 * directions.sign(), atol=1e-5)  # the steps lead there from anywhere
    once = attack(network, images, labels, 0.1, 1, 0.25, seeded())
    assert not torch.allclose(once, attack(network, images, labels, 0.1, 1, 0.25), atol=1e-2)
    numbers = evaluate(Subject(network, images, labels), ["attack"])["attack"]["numbers"]
    leads = network(images).detach().gather(1, labels[:, None]) - network(images).detach().gather(
        1, 1 - labels[:, None]
    )
    still = leads[:, 0] > 0.1 * directions.abs().sum((1, 2, 3))
    assert numbers["FGSM 0.1: accuracy (%)"] == pytest.approx(100 * float(still.float().mean()))
    assert numbers["gradient is zero (%)"] == 0


def test_an_attack_stays_within_its_strength_and_the_gray_levels() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    images, labels = random_images(200, 1, 3, 3), torch.arange(200) % 2
    for start in (None, seeded()):
        changed = attack(network, images, labels, 0.3, 3, 0.5, start)
        assert changed.min() == 0
        assert changed.max() == 1
        assert (changed - images).abs().max() <= 0.3 + 1e-6
    starts = attack(network, torch.full_like(images, 0.5), labels, 0.3, 0, 0.5, seeded()) - 0.5
    assert starts.mean().item() == pytest.approx(0, abs=0.02)
    assert starts.min().item() == pytest.approx(-0.3, abs=0.01)
    assert starts.max().item() == pytest.approx(0.3, abs=0.01)


class Drawing(nn.Module):
    """Classes by the brightness of the halves; the decoder draws the half of a class as it is in the images."""

    decoder = True

    def forward(self, images: Tensor) -> Prediction:
        halves = torch.stack([images[..., :2].sum((1, 2, 3)), images[..., 2:].sum((1, 2, 3))], 1)
        return Prediction(halves, Capsules(images.flatten(1)[:, None].expand(-1, 2, -1)))

    def reconstruct(self, capsules: Capsules, labels: Tensor) -> Tensor:
        left = (torch.arange(4) < 2).expand(len(labels), 1, 4, 4)
        return torch.where(left == (labels == 0)[:, None, None, None], 0.1, 0.0)


def test_a_reconstruction_gives_an_attack_away() -> None:
    labels = torch.arange(200) % 2
    images = torch.zeros(200, 1, 4, 4)
    images[labels == 0, :, :, :2] = 0.1
    images[labels == 1, :, :, 2:] = 0.1
    noisy = images + 0.01 * random_images(200, 1, 4, 4)
    held_out = images + 0.01 * torch.rand(200, 1, 4, 4, generator=seeded(1)), labels
    numbers = evaluate(Subject(Drawing(), noisy, labels, held_out), ["attack"])["attack"]["numbers"]
    assert numbers["suspected as they are (%)"] == pytest.approx(5, abs=4)
    assert numbers["FGSM 0.3: accuracy (%)"] == 0
    assert numbers["FGSM 0.3: successful and not suspected (%)"] == 0  # the other half is brighter than it should be
    far = held_out[0] + 1, labels  # no image is as far from its reconstruction as these
    numbers = evaluate(Subject(Drawing(), noisy, labels, far), ["attack"])["attack"]["numbers"]
    assert numbers["FGSM 0.3: successful and not suspected (%)"] == 100
    alone = evaluate(Subject(Drawing(), noisy, labels), ["attack"])["attack"]
    assert alone["notes"] == ["there are no held-out images for the threshold of the reconstruction: train with some"]


# Corruptions


def test_corruptions_are_what_they_say() -> None:
    images = random_images(200, 1, 28, 28)
    assert len(CORRUPTIONS) == 15
    for name in CORRUPTIONS:
        changed = corrupted(images[:20], name, seeded())
        assert changed.shape == (20, 1, 28, 28)
        assert changed.min() >= 0, name
        assert changed.max() <= 1, name
        assert torch.equal(changed, corrupted(images[:20], name, seeded())), name
        assert (changed - images[:20]).abs().mean() > 0.01, name
        assert corrupted(random_images(2, 3, 32, 32), name, seeded()).shape == (2, 3, 32, 32)
    assert torch.allclose(corrupted(corrupted(images, "stripe", seeded()), "stripe", seeded()), images, atol=1e-6)
    inverted = corrupted(images, "stripe", seeded()) != images
    assert inverted[..., :7].all()
    assert not inverted[..., 7:21].any()
    noise = corrupted(images, "impulse_noise", seeded())
    assert float((noise == 0).float().mean()) == pytest.approx(0.085, abs=0.005)
    assert float((noise == 1).float().mean()) == pytest.approx(0.085, abs=0.005)
    assert torch.allclose(corrupted(images, "brightness", seeded()), (images + 0.5).clamp(max=1), atol=1e-6)
    shot = 3 * corrupted(images, "shot_noise", seeded())
    assert torch.allclose(shot, shot.round(), atol=1e-5)
    dark = corrupted(torch.full((200, 1, 28, 28), 0.1), "shot_noise", seeded())
    assert float(dark.mean()) == pytest.approx(0.1, abs=0.002)  # noise leaves the mean as it is
    assert float(dark.var()) == pytest.approx(0.1 / 3, abs=0.001)
    black = torch.zeros(50, 1, 28, 28)
    for name, least, most in (("dotted_line", 0.005, 0.08), ("zigzag", 0.01, 0.15), ("spatter", 0.001, 0.25)):
        assert least < corrupted(black, name, seeded()).mean() < most, name
    flat = torch.full((2, 1, 28, 28), 0.5)
    for name in ("glass_blur", "motion_blur"):
        assert torch.allclose(corrupted(flat, name, seeded()), flat, atol=1e-5), name
    moved = (corrupted(images, "glass_blur", seeded()) - _blurred(_blurred(images, 0.7), 0.7)).abs().mean((0, 1))
    assert moved[1:-1, 1:-1].min() > 0.01  # neighbors are exchanged everywhere
    mud = corrupted(black, "spatter", seeded()) * 255 / 63
    assert ((mud == 0) | (mud >= 0.8 - 1e-5)).all()
    assert torch.allclose(corrupted(1 - black, "spatter", seeded()), 1 - mud * (1 - 63 / 255), atol=1e-5)
    half = torch.zeros(2, 1, 28, 28)
    half[..., 14:] = 1
    edges = corrupted(half, "canny_edges", seeded())
    assert set(edges.unique().tolist()) == {0, 1}
    assert not edges[..., :12].any()
    assert edges[..., 2:-2, 12:16].any(-1).all()
    assert not edges[..., 16:].any()


def centers(images: Tensor) -> Tensor:
    """Return the centers of brightness, right and down from the middle, `(n, 2)`."""
    places = torch.arange(28.0) - 13.5
    mass = images.sum((1, 2, 3))
    return torch.stack([images.sum((1, 2)) @ places / mass, images.sum((1, 3)) @ places / mass], 1)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("scale", {(3.5, -2.8)}),
        ("rotate", {(3.05, -5.63), (6.16, -1.74)}),  # by 0.4 radians, 23 degrees, either way
        ("shear", {(5 - 4 * 0.4228, -4 * 1.0857), (5 + 4 * 0.4228, -4 * 1.0857)}),  # tan 0.4, and 1 / cos 0.4
        ("translate", {(8.0, -1.0), (8.0, -7.0), (2.0, -1.0), (2.0, -7.0)}),
    ],
)
def test_where_a_blob_moves(name: str, ends: set[tuple[float, float]]) -> None:
    places = torch.arange(28.0) - 13.5
    blob = torch.exp(-((places - 5) ** 2 + (places[:, None] + 4) ** 2) / 4).expand(60, 1, 28, 28)
    assert torch.allclose(centers(blob), torch.tensor([5.0, -4.0]), atol=1e-3)
    assert_places(centers(corrupted(blob, name, seeded())), ends)


def assert_places(found: Tensor, expected: set[tuple[float, float]]) -> None:
    """Assert that every place is one of those expected, and that each of these is there."""
    near = torch.cdist(found, torch.tensor(sorted(expected))) < 0.05
    assert near.any(1).all()
    assert near.any(0).all()


def test_motion_blurs_to_one_side() -> None:
    """A point becomes the half of a Gaussian, whose mean is 2 pixels away, at most 45 degrees off the horizontal."""
    point = torch.zeros(300, 1, 28, 28)
    point[..., 14, 20] = 1
    blurred = corrupted(point, "motion_blur", seeded())
    weights = torch.exp(-0.5 * (torch.arange(21) / 3.0) ** 2)
    assert torch.allclose(blurred.sum((1, 2, 3)), torch.ones(()), atol=1e-3)
    own = 1 / float(weights.sum())
    assert blurred[..., 14, 20].min() == pytest.approx(own)  # at 45 degrees the next step still is another pixel
    assert not blurred[..., 21:].any()
    offsets = centers(blurred) - torch.tensor([6.5, 0.5])
    mean = float((weights * torch.arange(21)).sum() / weights.sum())
    assert offsets.norm(dim=1) == pytest.approx(mean, abs=0.25)
    angles = torch.rad2deg(torch.atan2(offsets[:, 1], -offsets[:, 0]))
    assert -46 < angles.min() < -38
    assert 38 < angles.max() < 46


def test_plasma_is_smooth() -> None:
    """Its noise has half the amplitude at half the distance, 1 / 1.4^2: fog differs little between neighbors."""
    maps = plasma(40, seeded())
    changes = [float((maps - maps.roll(step, dim)).abs().mean()) for dim in (1, 2) for step in (1, 64)]
    assert changes == pytest.approx([0.008, 0.178] * 2, rel=0.1)


@pytest.mark.parametrize("gray", [0.0, 0.5, 1.0])
def test_fog_is_three_times_as_bright_as_white(gray: float) -> None:
    """The maps of fog run from 0 to 1 over 256x256 pixels."""
    foggy = corrupted(torch.full((2, 1, 256, 256), gray), "fog", seeded()).flatten(1)
    assert foggy.amin(1).tolist() == pytest.approx([gray * gray / (gray + 3)] * 2)
    assert foggy.amax(1).tolist() == pytest.approx([gray] * 2)


# Calibration


class Confident(nn.Module):
    """The probability of class 1 is the first pixel; scores are twice as far apart as its logarithms."""

    def forward(self, images: Tensor) -> Tensor:
        probability = images[:, 0, 0, 0]
        return 2 * torch.stack([torch.zeros(len(images)), torch.log(probability / (1 - probability))], 1)


def as_often_right(*groups: tuple[float, int, int]) -> tuple[Tensor, Tensor]:
    """Images of class 1 or 0: for each probability of class 1, how many there are, and how many are of class 1."""
    pixels = torch.cat([torch.full((count,), probability) for probability, count, _ in groups])
    labels = torch.cat([(torch.arange(count) < ones).long() for _, count, ones in groups])
    return pixels.view(-1, 1, 1, 1), labels


def test_calibration_by_hand() -> None:
    images, labels = as_often_right((0.75, 40, 30), (0.6, 10, 4))
    held_out = as_often_right((0.75, 4000, 3000))
    found = evaluate(Subject(Confident(), images, labels, held_out), ["calibration"])["calibration"]
    # Odds of 3 to 1 and of 3 to 2, squared: the network says 0.9 and 9/13.
    before = (40 * (0.9 - 0.75) + 10 * (9 / 13 - 0.4)) / 50
    after = 10 * (0.6 - 0.4) / 50
    assert found["numbers"] == {
        "accuracy (%)": pytest.approx(68),
        "calibration error (%)": pytest.approx(100 * before, abs=1e-4),
        "temperature": pytest.approx(2, abs=1e-4),
        "calibration error with it (%)": pytest.approx(100 * after, abs=1e-2),
    }
    points = [found["curves"][name]["points"] for name in ("as it is", "with the temperature")]
    assert points == [
        [pytest.approx((900 / 13, 40)), pytest.approx((90, 75))],
        [pytest.approx((60, 40), abs=1e-2), pytest.approx((75, 75), abs=1e-2)],
    ]
    assert found["notes"] == []


def test_calibration_without_a_temperature() -> None:
    subject = Subject(Confident(), *as_often_right((0.75, 40, 30)))
    few = replace(subject, held_out=as_often_right((0.75, 8, 6)))
    for one, note in ((subject, "there are no held-out images"), (few, "8 held-out images are too few")):
        found = evaluate(one, ["calibration"])["calibration"]
        assert list(found["numbers"]) == ["accuracy (%)", "calibration error (%)"]
        assert list(found["curves"]) == ["as it is"]
        assert note in found["notes"][0]
    several = replace(subject, labels=torch.ones(40, 2))
    assert evaluate(several, ["calibration"])["calibration"] == {"reason": "images have several labels each"}


def test_activations_are_calibrated_as_scores() -> None:
    images, labels = as_often_right((0.75, 400, 320))
    network = Network(lambda net, x: Prediction(activations=torch.cat([1 - x, x], 1)[..., 0, 0]))
    found = evaluate(Subject(network, images, labels, (images, labels)), ["calibration"])["calibration"]
    # Activations of 1/4 and 3/4: the softmax of their difference, 1/2, is right as often as it says at 1/2 / log(4).
    assert found["numbers"]["calibration error (%)"] == pytest.approx(80 - 100 / (1 + math.exp(-0.5)), abs=1e-2)
    assert found["numbers"]["temperature"] == pytest.approx(0.5 / math.log(4), abs=1e-3)
    assert "activations in [0, 1]" in found["notes"][0]


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_bins_of_the_calibration_error(temperature: float) -> None:
    scores, labels = 3 * torch.randn(500, 4, generator=seeded()), torch.arange(500) % 4
    confidences, likeliest = (scores.double() / temperature).softmax(1).max(1)
    error = 0.0
    points = []
    for low in range(15):
        chosen = (confidences >= low / 15) & (confidences < (low + 1) / 15)
        if chosen.any():
            confidence = float(confidences[chosen].mean())
            accuracy = float((likeliest == labels)[chosen].double().mean())
            points.append((confidence, accuracy))
            error += float(chosen.double().mean()) * abs(confidence - accuracy)
    assert reliability(scores, labels, temperature) == [pytest.approx(point) for point in points]
    assert calibration_error(scores, labels, temperature) == pytest.approx(error, abs=1e-6)
    certain_and_nearly = torch.tensor([[1000.0, 0.0], [math.log(19), 0.0]])  # 1 and 0.95, in the last bin
    assert reliability(certain_and_nearly, torch.tensor([0, 1])) == [pytest.approx((0.975, 0.5))]


# All


def test_results_are_json_and_the_same_for_a_seed() -> None:
    network = Routed(DynamicRouting(2))
    subject = Subject(network, random_images(20, 8, 16, 16)[..., :3, :3], torch.arange(20) % 5)
    first = evaluate(subject)
    for name, found in first.items():
        if found.get("curves"):
            assert (
                protocol_figure(name, {"one": found, "two": {"reason": "none"}}).axes[0].get_title() in found["curves"]
            )
    assert list(first) == [name for name in PROTOCOLS if name != "few"]
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(evaluate(subject)))
    assert first["corruptions"] == {"reason": "images have 3x3 pixels, and 16 to 256 are needed"}
    assert first["viewpoint"]["reason"].startswith("the data has no viewpoints")
    assert evaluate(subject, ["few"])["few"]["reason"].startswith("there is no recipe")


def test_what_cannot_be_measured() -> None:
    subject = Subject(Rows(), torch.zeros(4, 1, 8, 8), torch.zeros(4, 8).long())
    for name in ("routing", "parts", "pose", "attack", "corruptions"):
        assert "reason" in evaluate(subject, [name])[name]
    with pytest.raises(ValueError, match="protocols must be one of 'affine'"):
        evaluate(subject, ["afine"])
    with pytest.raises(ValueError, match="no image"):
        evaluate(Subject(Rows(), torch.zeros(0, 1, 8, 8), torch.zeros(0).long()))
    images = torch.zeros(4, 1, 8, 8)
    for labels, message in (
        (torch.arange(3), r"^expected labels of shape \(4,\) or \(4, 8\), as there are 4 images and 8 classes, got"),
        (torch.zeros(4, 7), r"^expected labels of shape \(4,\) or \(4, 8\)"),
        (torch.tensor([0, 1, 8, 0]), "^labels must be from 0 to 7, as there are 8 classes, got 8"),
        (torch.tensor([0, 1, -1, 0]), "^labels must be from 0 to 7, as there are 8 classes, got -1"),
    ):
        for name in ("parts", "overlap"):
            with pytest.raises(ValueError, match=message):
                evaluate(Subject(Rows(), images, labels), [name])
    with pytest.raises(TypeError, match="labels must be class indices, integers"):
        evaluate(Subject(Rows(), images, torch.rand(4)), ["affine"])
    with pytest.raises(ValueError, match="the network gives scores that are NaN or infinite"):
        evaluate(Subject(Rows(), images * torch.nan, torch.zeros(4).long()), ["parts"])
    with pytest.raises(DoesNotApply, match="of one class"):
        pairs(torch.zeros(3, 1, 8, 8), torch.zeros(3).long(), seeded())
    with pytest.raises(TypeError, match="must return a Prediction"):
        evaluate(Subject(nn.Identity(), torch.zeros(4, 1, 8, 8), torch.arange(4)), ["affine"])


def test_several_labels_are_right_where_exactly_they_are_above_their_thresholds() -> None:
    scores = torch.tensor([[2.0, -2], [2, -2], [-2, -2], [2, 2]])  # probabilities of 0.88 and 0.12
    images = scores[:, None, None, :].expand(4, 1, 2, 2)
    network = Network(lambda self, images: images[:, 0, 0])
    labels = torch.tensor([[1.0, 0], [1, 1], [0, 0], [1, 1]])
    for thresholds, right in ((None, 75), (torch.tensor([0.5, 0.1]), 50), (torch.tensor([0.9, 0.5]), 25)):
        subject = Subject(network, images, labels, target="labels", thresholds=thresholds)
        assert subject.accuracy(images) == right
        found = evaluate(subject, ["overlap", "attack", "calibration", "few"])
        assert found["overlap"]["numbers"] == {"its own test: its labels are predicted (%)": right}
        assert {found[name]["reason"] for name in ("attack", "calibration", "few")} == {
            "images have several labels each"
        }


def test_networks_of_numbers_have_no_accuracy() -> None:
    network = Network(lambda self, images: images.mean((1, 2)))
    subject = Subject(network, torch.rand(200, 1, 16, 16), torch.rand(200, 16), target="numbers")
    names = ["affine", "overlap", "pose", "corruptions", "calibration", "attack", "few"]
    assert {result.get("reason") for result in evaluate(subject, names).values()} == {
        "the network predicts numbers, and this measures classes of whole images"
    }


def test_data_without_images_name_commands_that_take_them():
    for kind, more in ((EncodedImages, False), (TextData, True)):
        training = SimpleNamespace(datamodule=object.__new__(kind))
        with pytest.raises(ValueError, match="torchcaps test gives the accuracy") as raised:
            subject_of(training, 100, 0, lambda line: None, lambda count: None)
        assert ("torchcaps explain" in str(raised.value)) == more  # which has no pages about encoded images


# ---------------------------------------------------------------- masks


class Threshold(nn.Module):
    """Pixels above a half are of the second class."""

    def forward(self, images):
        return Segmentation(torch.cat([0.5 - images, images - 0.5], 1))


def test_masks_have_a_dice_of_corrupted_and_of_turned_images():
    torch.manual_seed(0)
    images = torch.zeros(4, 1, 20, 20)
    images[:, :, 6:14, 3:12] = 1.0
    masks = (images[:, 0] > 0.5).long()
    found = evaluate(Subject(Threshold(), images, masks, target="masks"))
    applied = [name for name, result in found.items() if "numbers" in result]
    assert applied == ["corruptions"]
    assert all(
        result["reason"] == "the network predicts masks, and this measures classes of whole images"
        for name, result in found.items()
        if name in ("affine", "routing", "overlap", "pose", "attack", "calibration")
    )
    numbers, curves = found["corruptions"]["numbers"], found["corruptions"]["curves"]
    assert numbers["as they are: mean Dice (%)"] == 100
    assert not any(name.startswith(("rotate", "shear", "scale", "translate")) for name in numbers)
    turned = dict(curves["rotation"]["points"])
    assert turned[90.0] == turned[180.0] == 100  # no pixel is interpolated
    assert all(value > 90 for value in turned.values())
    with pytest.raises(ValueError, match="expected a mask of the size of its image"):
        evaluate(Subject(Threshold(), images, masks[:, 1:], target="masks"))


def test_a_network_of_masks_that_routes_has_no_parts():
    network = create_model("segcaps", classes=2, features=2, decoder=False)
    subject = Subject(network, torch.rand(4, 1, 16, 16), torch.randint(0, 2, (4, 16, 16)), target="masks")
    found = evaluate(subject)
    assert [name for name, result in found.items() if "numbers" in result] == ["corruptions"]
    assert dead_capsules(network, [torch.rand(2, 1, 16, 16)])


def test_masks_turn_as_images_do():
    assert (turned_masks(torch.full((1, 8, 8), -100), 30.0) == -100).all()
    masks = torch.randint(0, 3, (2, 8, 8))
    assert torch.equal(turned_masks(masks, 90.0), masks.rot90(1, (1, 2)))
    masks[0, 2, 3] = -100
    turned = turned_masks(masks, 30.0)
    assert (turned[:, 0, 0] == -100).all()  # comes in from outside
    assert ((turned >= 0) | (turned == -100)).all()
