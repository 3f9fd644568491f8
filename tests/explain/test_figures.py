"""CapsNet figures: reconstructions, perturbations, and the files that are written."""

import copy

import pytest
import torch
from networks import small_capsnet
from torch import nn

from torchcaps import CapsNet, Capsules, Prediction
from torchcaps.explain import perturb, reconstructions_figure, write_figures
from torchcaps.explain.figures import FIGURES
from torchcaps.explain.page import samples_of
from torchcaps.models import ResNetCapsNet, convnet_mnist


@pytest.fixture
def network() -> CapsNet:
    return small_capsnet(decoder=(16,))


def test_perturbations_tweak_one_entry_at_a_time(network):
    image, tweaks = torch.rand(1, 8, 8), torch.tensor([-0.25, 0.0, 0.25])
    drawn = perturb(network, image, label=2, tweaks=tweaks)
    assert drawn.shape == (3, 3, 1, 8, 8)
    capsules = network(image.unsqueeze(0)).capsules
    label = torch.tensor([2])
    plain = network.reconstruct(capsules, label)[0]
    for entry in range(3):
        torch.testing.assert_close(drawn[entry, 1], plain)
        poses = capsules.poses.clone()
        poses[0, 2, entry] += 0.25
        torch.testing.assert_close(drawn[entry, 2], network.reconstruct(capsules._replace(poses=poses), label)[0])
    assert not torch.allclose(drawn[0, 2], drawn[1, 2])


@pytest.mark.parametrize(
    ("shape", "label", "tweaks", "message"),
    [
        ((1, 8, 8), 3, torch.zeros(1), "label must be from 0 to 2, as the network has 3 classes, got 3"),
        ((1, 8, 8), 0, torch.zeros(0), r"tweaks must have the shape \(tweaks,\), with .* got .* shape \(0,\)"),
        ((8, 8), 0, torch.zeros(1), r"expected an image of shape \(channels, height, width\), got "),
        ((1, 8, 9), 0, torch.zeros(1), "expected images of shape"),
    ],
)
def test_wrong_arguments_of_perturb(network, shape, label, tweaks, message):
    with pytest.raises(ValueError, match=message):
        perturb(network, torch.rand(shape), label, tweaks)


def test_networks_are_run_in_evaluation_mode_and_left_as_they_were():
    network = ResNetCapsNet(image_size=16, classes=3, depth=8, decoder=(4,)).train()
    before = copy.deepcopy(network.state_dict())
    image = torch.rand(1, 16, 16)
    drawn = perturb(network, image, 1, torch.zeros(1))
    reconstructions_figure(network, image.unsqueeze(0), torch.tensor([1]))
    assert network.training
    assert all(value.equal(before[name]) for name, value in network.state_dict().items())  # also of batch norm
    network.eval()
    capsules = network(image.unsqueeze(0)).capsules
    torch.testing.assert_close(drawn[0, 0], network.reconstruct(capsules, torch.tensor([1]))[0])


class OwnDecoder(nn.Module):
    """Network of one's own, with matrix poses: a capsule draws its pose."""

    decoder = True

    def forward(self, images):
        return Prediction(images.sum((2, 3)), Capsules(images))

    def reconstruct(self, capsules, labels):
        return capsules.poses[torch.arange(len(labels)), labels].unsqueeze(1)


def test_matrix_poses_of_a_network_of_ones_own():
    image = torch.rand(3, 2, 4)
    drawn = perturb(OwnDecoder(), image, 2, torch.tensor([0.0, 0.5]))
    assert drawn.shape == (8, 2, 1, 2, 4)
    for entry in range(8):
        assert drawn[entry, 0, 0].equal(image[2])
        assert (drawn[entry, 1] - drawn[entry, 0]).flatten().nonzero().tolist() == [[entry]]


def test_write_figures(network, tmp_path, monkeypatch):
    samples = samples_of(torch.rand(4, 1, 8, 8), torch.tensor([1, 1, 0, 2]), ["a", "b", "c"], list("1234"))
    written = [path for path, _ in write_figures(network, samples, tmp_path / "new")]
    assert [path.name for path in written] == ["credit.png", "reconstructions.png", "perturbations.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in written)
    monkeypatch.setattr("torchcaps.explain.figures.write", lambda figure, path: path)  # writing takes a second
    network.decoder = None
    assert [path.name for path, _ in write_figures(network, samples, tmp_path)] == ["credit.png"]
    digits = samples_of(torch.rand(2, 1, 28, 28), torch.tensor([1, 0]), ["a", "b", "c"], list("12"))
    assert not list(write_figures(convnet_mnist(0.5, 3, (2, 2, 2), (4, 4)), digits, tmp_path))
    of_several_classes = samples_of(torch.rand(3, 1, 8, 8), torch.ones(3, 2), ["a", "b"], list("123"))
    assert not list(write_figures(network, of_several_classes, tmp_path))
    own = samples_of(torch.rand(2, 3, 2, 4), torch.tensor([1, 0]), ["a", "b", "c"], list("12"))
    assert [path.name for path, _ in write_figures(OwnDecoder(), own, tmp_path)] == [
        "reconstructions.png", "perturbations.png",
    ]  # fmt: skip


def test_figures_of_several_states(network, tmp_path, monkeypatch):
    monkeypatch.setattr("torchcaps.explain.figures.write", lambda figure, path: path)
    loaded = []
    states = [(f"after epoch {epoch}", lambda epoch=epoch: loaded.append(epoch)) for epoch in (1, 2)]
    images, names = torch.rand(3, 1, 8, 8), ["a", "b", "c"]
    for labels in (torch.tensor([1, 0, 2]), torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]])):
        samples = samples_of(images, labels, names, list("123"))
        (path, caption), *_ = write_figures(network, samples, tmp_path, states=states)
        assert path == tmp_path / "dynamics.png"
        assert caption == "how long votes are, and how well they agree with the parents"
    assert loaded == [1, 2] * 2
    own_pictures = samples_of(images, None, names, list("123"))
    assert not list(write_figures(network, own_pictures, tmp_path, states=states))


def test_every_figure_has_a_name_of_its_own():
    names = [kind.name for kind in FIGURES]
    assert len(names) == len(set(names))
    assert all(kind.caption for kind in FIGURES)
