"""Warnings about networks whose capsules or gradients are almost zero at the first steps."""

import warnings

import pytest
import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchcaps import CapsuleLinear, Capsules, CapsuleStack, DynamicRouting, HeinsenRouting, MarginLoss, Prediction
from torchcaps.training import Classifier

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Deep(nn.Module):
    """Three capsule layers, from vectors to class capsules."""

    def __init__(self, routing):
        super().__init__()
        layers = [CapsuleLinear(16, 16, 8, 8, routing) for _ in range(2)]
        self.stack = CapsuleStack(*layers, CapsuleLinear(16, 3, 8, 8, routing))

    def forward(self, x: Tensor) -> Prediction:
        capsules = self.stack(Capsules(x))
        return Prediction(activations=capsules.activations, capsules=capsules)


def said(network: nn.Module, loss: nn.Module | None = None, accumulated: int = 1, scale: float = 0.1) -> list[str]:
    """Train and return the warnings."""
    data = TensorDataset(scale * torch.randn(16, 16, 8), torch.randint(3, (16,)))
    trainer = Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulated,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(network, loss or MarginLoss(), classes=3), DataLoader(data, batch_size=4))
    return [str(x.message) for x in caught if x.filename.endswith(("alive.py", "test_alive.py"))]


def test_a_stack_that_begins_dead_names_its_layer():
    (message,) = said(Deep(DynamicRouting(2, init="paper")))
    assert message.startswith("CapsuleLinear(16, 3, in_pose=8, out_pose=8) starts dead: ")
    assert "init='fan_in'" in message


def test_a_first_layer_without_a_gradient_is_named():
    class Cut(Deep):
        def forward(self, x: Tensor) -> Prediction:
            return super().forward(self.below(x) * 0 + x)

    network = Cut(DynamicRouting(2))
    network.below = nn.Linear(8, 8)
    network._modules = {"below": network._modules.pop("below"), **network._modules}
    (message,) = said(network)
    assert "below" in message
    assert "; try routings with init='fan_in'" in message


class Dense(nn.Module):
    """No capsules, and a first layer to which no gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.top = nn.Linear(128, 8), nn.Linear(8, 3)
        nn.init.constant_(self.below.bias, -100.0)

    def forward(self, x: Tensor) -> Prediction:
        return Prediction(self.top(self.below(x.flatten(1)).relu()))


def test_advice_about_routings_is_for_networks_that_route():
    (message,) = said(Dense(), nn.CrossEntropyLoss())
    assert message.endswith("below, does not learn: its gradient is 0 at the first two steps")
    network = Dense()
    nn.init.constant_(network.below.bias, 1.0)
    (message,) = said(network, nn.CrossEntropyLoss(), scale=0.0)
    assert message.endswith("its gradient is 0 at the first two steps, as the inputs are")


def test_a_cross_entropy_that_cannot_fall_is_named():
    class AsScores(Deep):
        factor = 1

        def forward(self, x: Tensor) -> Prediction:
            _, capsules, activations = super().forward(x)
            return Prediction(self.factor * activations, capsules)

    class Sure(AsScores):
        factor = 4

    (message,) = said(AsScores(DynamicRouting(2)), loss=nn.CrossEntropyLoss())
    assert message == (
        "the cross-entropy of activations, which are from 0 to 1, cannot fall below 0.55 with 3 classes: use "
        "torchcaps.MarginLoss, or logits such as those of a CapsuleHead"
    )
    assert said(Sure(DynamicRouting(2)), loss=nn.CrossEntropyLoss()) == []


def test_networks_that_live_are_silent():
    network = Deep(DynamicRouting(2))
    assert said(network) == []
    assert not any(module._forward_hooks for module in network.modules())
    # The betas start at zero, so that only they have a gradient at the first step.
    assert said(Deep(HeinsenRouting(2, init="paper"))) == []
    assert said(Deep(HeinsenRouting(2, init="paper")), accumulated=2) == []
