"""CapsNet figures: reconstructions, perturbations, and the files that are written."""

import pytest
import torch
from networks import small_capsnet

from torchcaps import CapsNet
from torchcaps.explain import perturb, write_figures
from torchcaps.models import ConvNet


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
        ((1, 8, 9), 0, torch.zeros(1), r"expected an image of shape \(1, 8, 8\), got "),
    ],
)
def test_wrong_arguments_of_perturb(network, shape, label, tweaks, message):
    with pytest.raises(ValueError, match=message):
        perturb(network, torch.rand(shape), label, tweaks)


def test_write_figures(network, tmp_path, monkeypatch):
    batches = [(torch.rand(3, 1, 8, 8), torch.tensor([1, 1, 0])), (torch.rand(1, 1, 8, 8), torch.tensor([2]))]
    written = list(write_figures(network, batches, tmp_path / "new"))
    assert [path.name for path in written] == ["credit.png", "reconstructions.png", "perturbations.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in written)
    monkeypatch.setattr("torchcaps.explain.figures.write", lambda figure, path: path)  # writing takes a second
    network.decoder = None
    assert [path.name for path in write_figures(network, batches, tmp_path)] == ["credit.png"]
    assert not list(write_figures(ConvNet(1, 8, 3, (2, 2, 2), (4, 4)), batches, tmp_path))
    network.train()
    many = [(torch.rand(3, 1, 8, 8), torch.ones(3, 2))]
    with pytest.raises(TypeError, match="several labels each"):
        list(write_figures(network, many, tmp_path))
    assert network.training
