"""Mixup and the one-cycle schedule: by their formulas, and in a training."""

import contextlib
import math

import pytest
import torch
from lightning import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader

from torchcaps import MarginLoss, Prediction
from torchcaps.training import Classifier, OneCycle, mixup

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

# Mixup


def test_each_sample_is_mixed_with_one_other_and_its_label_alike():
    labels = torch.arange(8)
    mixed, soft = mixup(torch.eye(8, dtype=torch.float64).unsqueeze(2), labels, 8, alpha=1.0)
    torch.testing.assert_close(mixed.squeeze(2), soft)  # the inputs are their one-hot labels
    assert soft.dtype == torch.float64
    torch.testing.assert_close(soft.sum(1), torch.ones(8, dtype=torch.float64))
    assert ((soft > 0).sum(1) <= 2).all()
    assert (soft[range(8), labels] > 0).all()  # every sample keeps a part of its own label
    torch.testing.assert_close(torch.sort((soft > 0).float().sum(0)).values.max(), torch.tensor(2.0))
    shares = soft[range(8), labels]
    assert len(shares.unique()) > 5  # one proportion for each sample


def test_the_shares_are_of_the_beta_distribution():
    labels = torch.tensor([0, 1]).repeat(20_000)
    for alpha in (0.2, 1.0, 4.0):
        _, soft = mixup(torch.zeros(40_000, 1), labels, 2, alpha)
        between = soft[(soft > 0).all(1)][:, 1].double()  # mixed with the other class
        assert between.mean() == pytest.approx(0.5, abs=0.01)
        assert between.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_all_inputs_are_mixed_alike_in_their_own_precision():
    numbers = torch.rand(6, 3)
    labels = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.uint8)  # or any other integers
    (first, second), soft = mixup((numbers, numbers[:, :1].half()), labels, 2)
    torch.testing.assert_close(second.float(), first[:, :1], rtol=1e-2, atol=1e-3)
    assert second.dtype == torch.float16
    assert soft.dtype == torch.float32
    assert not torch.equal(first, numbers)
    torch.set_default_dtype(torch.bfloat16)  # as the Trainer does for precision bf16-true
    try:
        mixed, soft = mixup(torch.rand(8, 3), torch.arange(8) % 2, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert mixed.dtype == soft.dtype == torch.bfloat16
    assert ((soft > 0) & (soft < 1)).any()


class Scores(nn.Module):
    """A network that returns its inputs as scores, multiplied by a mask if there is one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs, mask=None):
        return Prediction(self.scale * (inputs if mask is None else inputs * mask))


def test_the_loss_is_that_of_mixed_samples():
    inputs, labels = torch.randn(8, 3), torch.tensor([0, 1, 2, 2, 1, 0, 0, 1])
    model = Classifier(Scores(), nn.CrossEntropyLoss(), classes=3, mixup=0.5)
    torch.manual_seed(1)
    loss = model.training_step((inputs, labels), 0)
    torch.manual_seed(1)
    mixed, soft = mixup(inputs, labels, 3, 0.5)
    expected = -(soft * mixed.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss.detach(), expected)
    assert model.train_accuracy.compute() == (mixed.argmax(1) == soft.argmax(1)).float().mean()
    of_scores = MarginLoss()
    of_scores.reads = "scores"
    loss = Classifier(Scores(), of_scores, classes=3, mixup=0.5).training_step((inputs.sigmoid(), labels), 0)
    assert loss.isfinite()


def test_validation_and_test_are_never_mixed():
    inputs, labels = torch.randn(64, 3), torch.arange(64) % 3
    model = Classifier(Scores(), nn.CrossEntropyLoss(), classes=3, mixup=0.5)
    model.validation_step((inputs, labels), 0)
    model.test_step((inputs, labels), 0)
    expected = (inputs.argmax(1) == labels).float().mean()
    assert model.val_accuracy.compute() == model.test_accuracy.compute() == expected


def test_inputs_that_are_a_tuple_are_arguments():
    inputs, labels = torch.randn(8, 3), torch.arange(8) % 3
    model = Classifier(Scores(), nn.CrossEntropyLoss(), classes=3, mixup=0.5)
    model.test_step(((inputs, -torch.ones(8, 3)), labels), 0)
    assert model.test_accuracy.compute() == (inputs.argmin(1) == labels).float().mean()
    with pytest.raises(FloatingPointError, match="the inputs themselves are not finite"):
        model.training_step(((inputs, torch.full((8, 3), torch.nan)), labels), 0)


# One cycle


def test_the_part_of_a_step_by_hand():
    cycle = OneCycle(warmup=0.1)
    assert [cycle.part(step, 100) for step in (0, 5, 10)] == [0, 0.5, 1]
    assert cycle.part(55, 100) == pytest.approx(0.5)
    assert cycle.part(40, 100) == pytest.approx(0.75)  # cos 60 degrees
    assert cycle.part(99, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert OneCycle(warmup=0).part(0, 10) == 1
    assert OneCycle(warmup=1).part(9, 10) == 0.9
    with pytest.raises(ValueError, match="steps must be an int of at least 1, got -5"):
        OneCycle().part(0, -5)
    assert cycle.part(130, 100) == cycle.part(100, 100) == pytest.approx(0)
    assert [cycle.part(step, 1) for step in (0, 1)] == [0, pytest.approx(0)]


class Recorder(OneCycle):
    """Record the learning rate and the momentum of each step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def on_train_batch_start(self, trainer, *rest):
        super().on_train_batch_start(trainer, *rest)
        (group,) = trainer.optimizers[0].param_groups
        self.seen.append((group["lr"], group["betas"][0] if "betas" in group else group["momentum"]))


def fit(cycle, optimizer, checkpoint=None, epochs=2, **options) -> Trainer:
    model = Classifier(Scores(), nn.CrossEntropyLoss(), classes=3, optimizer=optimizer, **options)
    samples = [(torch.randn(3), i % 3) for i in range(20)]
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[cycle],
    )
    trainer.fit(model, DataLoader(samples, batch_size=4), ckpt_path=checkpoint, weights_only=True)
    return trainer


@pytest.mark.parametrize(
    ("optimizer", "first"),
    [
        (lambda p: torch.optim.RAdam(p, 5e-4, betas=(0.8, 0.99)), 0.8),
        (lambda p: torch.optim.SGD(p, 5e-4, 0.95), 0.95),
        (lambda p: torch.optim.SGD(p, 5e-4), 0.0),
    ],
)
def test_the_cycle_of_a_training(optimizer, first):
    cycle = Recorder(first=1e-5, warmup=0.2, momentum=0.9)
    fit(cycle, optimizer)
    parts = [0, 0.5, 1, *(0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 8))]
    expected = [(1e-5 + part * 49e-5, first * (1 - 0.1 * part)) for part in parts]
    assert len(cycle.seen) == 10
    torch.testing.assert_close(torch.tensor(cycle.seen), torch.tensor(expected))


def test_bad_cycles():
    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    with pytest.raises(ValueError, match=r"OneCycle .*model\.scheduler"):
        fit(OneCycle(), torch.optim.Adam, scheduler=halving)
    with pytest.raises(ValueError, match=r"OneCycle .*trainer\.max_epochs"):
        fit(OneCycle(), torch.optim.Adam, epochs=-1)


# Wrong arguments of mixup


@pytest.mark.parametrize(
    ("inputs", "labels", "error", "message"),
    [
        (torch.rand(3, 2), torch.tensor([0.0, 1, 2]), TypeError, "labels must be .* integers, got torch.float"),
        (torch.ones(3, 2).byte(), torch.arange(3), TypeError, r"inputs must be .*: convert bytes by .float\(\) / 255"),
        ((torch.rand(3, 2), torch.ones(3) > 0), torch.arange(3), TypeError, "inputs must be .*, got torch.bool"),
    ],
)
def test_wrong_arguments_of_mixup(inputs, labels, error, message):
    with pytest.raises(error, match=message) as raised:
        mixup(inputs, labels, classes=3)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using")
@pytest.mark.parametrize(
    ("interval", "total", "advice"),
    [
        ("step", 9, r"after 9 steps, .* takes 10: give --model\.scheduler\.total_steps 10 or --trainer\.max_steps 9$"),
        ("epoch", 2, r"after 2 epochs, .* takes 3: give --model\.scheduler\.total_steps 3 or --trainer\.max_epochs 2$"),
        ("step", 10, None),
    ],
)
def test_a_schedule_that_ends_before_the_training(interval, total, advice):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)

    expected = pytest.raises(ValueError, match="OneCycleLR ends " + advice) if advice else contextlib.nullcontext()
    with expected:
        fit(
            Callback(),
            torch.optim.Adam,
            epochs=2 if interval == "step" else 3,
            scheduler=schedule,
            scheduler_interval=interval,
        )
