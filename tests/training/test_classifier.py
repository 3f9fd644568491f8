"""The LightningModule, without a Trainer where that is enough."""

import pytest
import torch
from torch import nn

from torchcaps import CapsNet, MarginLoss, Prediction
from torchcaps.functional import margin_loss
from torchcaps.training import Classifier

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")


def small(decoder=(16,)) -> CapsNet:
    torch.manual_seed(0)
    return CapsNet(1, 8, 3, channels=4, kernel_size=3, primary_types=2, primary_kernel_size=3, decoder=decoder)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(4, 1, 8, 8), torch.tensor([0, 2, 1, 1])


def test_the_loss_is_margin_plus_reconstruction():
    network, (images, labels) = small(), batch()
    loss = Classifier(network, MarginLoss(), classes=3, reconstruction_weight=0.01).training_step((images, labels), 0)
    prediction = network(images)
    error = (network.reconstruct(prediction.capsules, labels) - images).square().sum(dim=(1, 2, 3)).mean()
    torch.testing.assert_close(loss, margin_loss(prediction.scores, labels) + 0.01 * error)
    loss = Classifier(network, MarginLoss(), classes=3).training_step((images, labels), 0)
    torch.testing.assert_close(loss, margin_loss(prediction.scores, labels))


def test_reconstruction_needs_a_decoder():
    with pytest.raises(ValueError, match="needs a network with a decoder"):
        Classifier(small(decoder=None), MarginLoss(), reconstruction_weight=0.1)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.root = nn.Linear(64, 3), nn.ReLU()
        self.root.register_forward_hook(lambda module, inputs, output: output.sub(1e3).sqrt())

    def forward(self, images):
        return Prediction(self.root(self.fine(images.flatten(1))))


def test_a_loss_that_is_not_finite_names_step_and_layer():
    classifier = Classifier(Broken(), nn.CrossEntropyLoss(), classes=3)
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 0: .* is that of root \(ReLU\)"):
        classifier.training_step(batch(), 0)
    network = small()
    with torch.no_grad():
        network.conv.weight[0, 0, 0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"the parameter conv.weight is not finite"):
        Classifier(network, MarginLoss(), classes=3).training_step(batch(), 0)
    images, labels = batch()
    images[0, 0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="the images themselves are not finite"):
        Classifier(small(), MarginLoss(), classes=3).training_step((images, labels), 0)


def test_schedules_count_steps_or_epochs():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    configured = Classifier(small(), MarginLoss(), scheduler=schedule, scheduler_interval="step").configure_optimizers()
    assert configured["lr_scheduler"]["interval"] == "step"
    assert isinstance(Classifier(small(), MarginLoss()).configure_optimizers(), torch.optim.Adam)
