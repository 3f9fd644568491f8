"""The LightningModule of all recipes, tested without a Trainer where possible."""

import numpy as np
import pytest
import torch
from lightning import Trainer
from recorder import small_trainer
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from torchcaps import CapsNet, CapsuleHead, CapsuleLinear, DynamicRouting, MarginLoss, Prediction, SpreadLoss
from torchcaps.data import LabeledData, notes
from torchcaps.data.images import ImageSet
from torchcaps.functional import margin_loss
from torchcaps.measures.predicting import predict
from torchcaps.models import FeatureClassifier
from torchcaps.training import Classifier, mixup
from torchcaps.training.classifier import check_compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


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
    torch.testing.assert_close(loss, margin_loss(prediction.activations, labels) + 0.01 * error)
    loss = Classifier(network, MarginLoss(), classes=3).training_step((images, labels.byte()), 0)  # any integers
    torch.testing.assert_close(loss, margin_loss(prediction.activations, labels))


def test_training_reconstructs_the_label_and_tests_the_likeliest_class(monkeypatch):
    network, (images, labels), drawn = small(), batch(), []
    monkeypatch.setattr(network, "reconstruct", lambda capsules, labels=None: (drawn.append(labels), images)[1])
    classifier = Classifier(network, MarginLoss(), classes=3, reconstruction_weight=0.01)
    classifier.training_step((images, labels), 0)
    classifier.test_step((images, labels), 0)
    assert drawn[0] is labels
    assert drawn[1] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 4}, "top_k must be from 1 to classes=3"),
        ({"mixup": 0.2, "labels_per_image": 2}, "mixup must be 0 with numbers or masks, with a given number"),
        ({"features_lr": 0.1}, "features_lr=0.1 needs a network with `features`, and CapsNet has none"),
        ({"compile": True, "feedback": lambda network: None}, "compile must be false with feedback"),
        ({"reconstruction_weight": 0.1, "labels_per_image": None}, "reconstruction_weight=0.1 needs a number as"),
        ({"reconstruction_weight": 0.1}, "needs a network with a decoder"),
    ],
)
def test_arguments_that_do_not_fit_together(options, said):
    with pytest.raises(ValueError, match=said):
        Classifier(small(decoder=None), MarginLoss(), classes=3, **options)


# Images of several classes


def of_activations(loss: nn.Module) -> nn.Module:
    """Let a loss that is made for scores read activations."""
    loss.reads = "activations"
    return loss


class Scores(nn.Module):
    """A network that returns its inputs as scores."""

    def forward(self, images):
        return Prediction(images)


SCORES = torch.tensor([[3.0, -1.0, 2.0, -2.0], [0.5, 0.1, -1.0, -3.0], [-1.0, 4.0, -2.0, -3.0], [1.0, 2.0, 3.0, -1.0]])
PRESENT = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("labels_per_image", "correct"),
    [
        # The two highest are {0, 2}, {0, 1}, {0, 1}, {1, 2}; the true classes are {0, 2}, {0, 3}, {1}, {1, 2}.
        (2, [1, 0, 0, 1]),
        # Above 0: {0, 2}, {0, 1}, {1}, {0, 1, 2}.
        (None, [1, 0, 1, 0]),
        (3, [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.1])  # scores inside and outside of [-1, 1], never probabilities
def test_exact_match(labels_per_image, correct, scale):
    classifier = Classifier(Scores(), nn.BCEWithLogitsLoss(), classes=4, labels_per_image=labels_per_image)
    for i, expected in enumerate(correct):
        classifier.test_step((scale * SCORES[i : i + 1], PRESENT[i : i + 1]), 0)
        assert classifier.test_accuracy.compute() == sum(correct[: i + 1]) / (i + 1), expected
    classifier.validation_step((scale * SCORES, PRESENT), 0)
    assert classifier.val_accuracy.compute() == sum(correct) / 4


def test_several_labels():
    # All lengths of capsules are above 0, so that a threshold of 0 would predict every class: the highest count.
    loss = MarginLoss()
    loss.reads = "scores"
    classifier = Classifier(Scores(), loss, classes=4, labels_per_image=2)
    classifier.test_step((torch.tensor([[0.3, 0.1, 0.2, 0.05]]), torch.tensor([[1.0, 0.0, 1.0, 0.0]])), 0)
    assert classifier.test_accuracy.compute() == 1
    loss = nn.BCEWithLogitsLoss()
    classifier = Classifier(Scores(), loss, classes=4, labels_per_image=None)
    torch.testing.assert_close(classifier.training_step((SCORES, PRESENT), 0), loss(SCORES, PRESENT))


@pytest.mark.parametrize(
    ("labels_per_image", "labels", "message"),
    [
        (1, PRESENT, r"labels_per_image=1 needs labels of shape \(4,\), got \(4, 4\)"),
        (2, torch.tensor([0, 1, 2, 3]), r"labels_per_image=2 needs labels of shape \(4, 4\), got \(4,\)"),
    ],
)
def test_labels_of_another_shape(labels_per_image, labels, message):
    classifier = Classifier(Scores(), nn.CrossEntropyLoss(), classes=4, labels_per_image=labels_per_image)
    with pytest.raises(ValueError, match=message):
        classifier.training_step((SCORES, labels), 0)


def test_each_digit_of_an_image_is_drawn_from_its_own_capsule():
    network, images = small(), torch.rand(2, 1, 8, 8)
    labels, parts = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), torch.rand(2, 3, 1, 8, 8)
    classifier = Classifier(network, MarginLoss(), classes=3, reconstruction_weight=0.01, labels_per_image=2)
    prediction = network(images)
    capsules, scores = prediction.capsules, prediction.evidence

    def expected(chosen):
        error = 0.0
        for index in range(2):
            for label in chosen[index]:
                drawn = network.reconstruct(capsules, torch.tensor([label, label]))[index]
                error += (drawn - parts[index, label]).square().sum() / 2
        return margin_loss(scores, labels) + 0.01 * error

    torch.testing.assert_close(classifier.training_step((images, labels, parts), 0), expected([[0, 2], [1, 2]]))
    predicted = [sorted(range(3), key=lambda label: -scores[index, label])[:2] for index in range(2)]
    torch.testing.assert_close(classifier.outcome("test", (images, labels, parts), 0).loss, expected(predicted))
    with pytest.raises(ValueError, match=r"needs batches with each class's own image .*MultiMNIST\(parts=True\)"):
        classifier.training_step((images, labels), 0)


# Several crops of an image


@pytest.mark.parametrize(("loss", "labels_per_image"), [(nn.CrossEntropyLoss(), 1), (nn.BCEWithLogitsLoss(), 2)])
def test_scores_of_crops_are_averaged(loss, labels_per_image):
    network, crops = small(decoder=None), torch.rand(4, 10, 1, 8, 8)
    labels = torch.tensor([0, 2, 1, 1]) if labels_per_image == 1 else torch.tensor([[1.0, 0.0, 1.0]] * 4)
    classifier = Classifier(network, of_activations(loss), classes=3, labels_per_image=labels_per_image)
    single = [network(crops[:, k]).evidence for k in range(10)]
    mean = sum(single) / 10
    torch.testing.assert_close(classifier(crops).evidence, mean)
    torch.testing.assert_close(classifier.outcome("test", (crops, labels), 0).loss, loss(mean, labels))
    classifier.test_step((crops, labels), 0)
    if labels_per_image == 1:
        right = mean.argmax(1) == labels
    else:
        right = mean.argmin(1) == 1  # two of the three classes are predicted
    assert classifier.test_accuracy.compute() == right.float().mean()


def test_volumes_are_no_crops():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv3d(1, 8, 3, stride=2)
            self.head = CapsuleHead(8, classes=2, dims=3)

        def forward(self, volumes: torch.Tensor) -> Prediction:
            return self.head.predict(self.features(volumes))

    network, volumes = Net(), torch.rand(4, 1, 8, 8, 8)
    scores = Classifier(network, nn.CrossEntropyLoss(), classes=2)(volumes).scores
    torch.testing.assert_close(scores, network(volumes).scores)


def test_crops_are_not_reconstructed():
    network = small().eval()
    crops, labels = torch.rand(4, 10, 1, 8, 8), torch.tensor([0, 2, 1, 1])
    losses = [
        Classifier(network, MarginLoss(), classes=3, reconstruction_weight=weight)
        .outcome("test", (crops, labels), 0)
        .loss
        for weight in (0.01, 0.0)
    ]
    assert losses[0] == losses[1]


# What goes wrong while training


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.root = nn.Linear(64, 3), nn.ReLU()
        self.root.register_forward_hook(lambda module, inputs, output: output.sub(1e3).sqrt())

    def forward(self, images):
        return Prediction(self.root(self.fine(images.flatten(1))))


def test_a_loss_that_is_not_finite_names_step_and_layer():
    classifier = Classifier(Broken(), nn.CrossEntropyLoss(), classes=3)
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 0: .* is that of root \(ReLU\)") as raised:
        classifier.training_step(batch(), 0)
    assert "; look at the first weights and the loss, or try float32 if you train in half" in str(raised.value)
    network = small()
    with torch.no_grad():
        network.conv.weight[0, 0, 0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"the parameter conv.weight is not finite"):
        Classifier(network, MarginLoss(), classes=3).training_step(batch(), 0)
    images, labels = batch()
    images[0, 0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="the inputs themselves are not finite: correct the data$"):
        Classifier(small(), MarginLoss(), classes=3).training_step((images, labels), 0)
    with pytest.raises(FloatingPointError, match="correct the data, or train in float32: float16 has no numbers above"):
        Classifier(small().half(), MarginLoss(), classes=3).training_step((1e5 * batch()[0].half(), labels), 0)


def test_predictions_of_scores_that_are_not_finite_are_refused():
    classifier = Classifier(Broken(), nn.CrossEntropyLoss(), classes=3)
    for step in (classifier.validation_step, classifier.test_step):
        with pytest.raises(ValueError, match="the network gives scores that are NaN or infinite"):
            step(batch(), 0)


def test_schedules_count_steps_or_epochs():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    configured = Classifier(small(), MarginLoss(), scheduler=schedule, scheduler_interval="step").configure_optimizers()
    assert configured["lr_scheduler"]["interval"] == "step"
    assert isinstance(Classifier(small(), MarginLoss()).configure_optimizers(), torch.optim.Adam)


def test_on_the_cpu_weights_of_convolutions_have_their_channels_last():
    """But not those of 1x1: PyTorch 2.13 writes beyond its memory in the backward pass of the second one here."""
    network = nn.ModuleList(
        [nn.Conv2d(3, 48, 3, 2, 1), nn.Conv2d(3, 48, 1, 2), CapsuleLinear(2, 2, 2, 2, DynamicRouting())]
    )
    before = [part.weight.stride() for part in network[1:]]
    classifier = Classifier(network, MarginLoss(), classes=3)
    classifier.trainer = Trainer(accelerator="cpu", logger=False)
    classifier.setup("fit")
    assert network[0].weight.stride() == (27, 1, 9, 3)
    assert [part.weight.stride() for part in network[1:]] == before


# Wrong batches, networks, losses and functions


IMAGES, LABELS = torch.rand(4, 1, 8, 8), torch.tensor([0, 2, 1, 1])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (None, TypeError, "a batch must be a tuple of inputs and labels, got None"),
        ((None, LABELS), TypeError, "the inputs of a batch must be a tensor or several in a tuple, got None"),
        ((IMAGES, None), TypeError, "the labels of a batch must be a tensor, got None"),
        ((IMAGES, LABELS[0]), ValueError, "a batch must have at least one sample"),
        ((IMAGES, LABELS + 1), ValueError, "labels must be from 0 to 2, as there are 3 classes, got 3"),
        ((IMAGES, LABELS.float()), TypeError, "labels must be class indices, integers, got torch.float32"),
    ],
)
def test_wrong_batches(wrong, error, message):
    for alpha in (0.0, 0.2):
        classifier = Classifier(small(), of_activations(nn.CrossEntropyLoss()), classes=3, mixup=alpha)
        with pytest.raises(error, match=rf"^{message}[^\n]*$"):
            classifier.training_step(wrong, 0)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (SCORES, TypeError, r"the network must return .*Prediction\(scores\), got a tensor of shape \(4, 4\)"),
        (Prediction(SCORES[0]), ValueError, r"must be a tensor \(batch, classes\), got .*\(4,\)"),
        (Prediction(), ValueError, "scores .* or activations, got neither"),
    ],
)
def test_networks_that_return_no_prediction(output, error, message):
    class Network(nn.Module):
        def forward(self, *inputs):
            return output

    classifier = Classifier(Network(), nn.CrossEntropyLoss(), classes=4)
    for images in (IMAGES, IMAGES.unsqueeze(1), (IMAGES, IMAGES)):
        with pytest.raises(error, match=message):
            classifier.training_step((images, LABELS), 0)


@pytest.mark.parametrize(
    ("library", "said", "kind", "message"),
    [
        (
            "torch.nn",
            "shapes cannot be multiplied",
            ValueError,
            r"^the network does not fit the samples: of a batch of sh",
        ),
        ("torch.nn", "DefaultCPUAllocator: can't allocate memory", RuntimeError, "^DefaultCPUAllocator"),
        ("mine", "shapes cannot be multiplied", RuntimeError, "^shapes cannot"),  # with its traceback
    ],
)
def test_errors_of_a_network(library, said, kind, message):
    class Raises(nn.Module):
        def forward(self, images):
            raise RuntimeError(said)

    Raises.__module__ = library
    with pytest.raises(kind, match=message):
        Classifier(Raises(), nn.CrossEntropyLoss(), classes=3)(IMAGES)
    with pytest.raises(kind, match=message):
        predict(Raises(), IMAGES)


@pytest.mark.parametrize("parts", [torch.rand(4, 1, 8, 8), torch.rand(4, 2, 1, 8, 8), torch.rand(4, 3, 1, 8, 1), None])
def test_digits_of_another_shape(parts):
    classifier = Classifier(small(), MarginLoss(), classes=3, reconstruction_weight=0.01, labels_per_image=2)
    message = r"the third tensor of a batch, each class's own image, must have the shape \(4, 3, 1, 8, 8\), got "
    with pytest.raises(ValueError, match=message):
        classifier.training_step((IMAGES, torch.tensor([[1.0, 0.0, 1.0]] * 4), parts), 0)


def test_functions_that_return_something_else():
    classifier = Classifier(small(), of_activations(nn.CrossEntropyLoss(reduction="none")), classes=3)
    with pytest.raises(ValueError, match=r"a tensor of one number, .* \(4,\) .*: give CrossEntropyLoss the option"):
        classifier.training_step((IMAGES, LABELS), 0)

    class Plain(nn.Module):
        reads = "activations"

        def forward(self, scores, labels):
            return 0.5

    with pytest.raises(
        ValueError, match=r"the loss must be a tensor of one number, the mean over the batch, got 0\.5$"
    ):
        Classifier(small(), Plain(), classes=3).training_step((IMAGES, LABELS), 0)
    with pytest.raises(TypeError, match=r"feedback must return a FeedbackAgreement, got 3 \(int\)"):
        Classifier(small(), MarginLoss(), feedback=lambda network: 3)
    classifier = Classifier(small(), MarginLoss(), optimizer=lambda parameters: 3)
    with pytest.raises(TypeError, match=r"optimizer must return a torch.optim.Optimizer, got 3 \(int\)"):
        classifier.configure_optimizers()


# Features and a head


def two_parts(trainable="all", **options) -> Classifier:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    network = FeatureClassifier(features, CapsuleHead(4, 3), trainable=trainable)
    return Classifier(network, nn.CrossEntropyLoss(), classes=3, **options)


def test_features_have_a_learning_rate_of_their_own():
    classifier = two_parts(features_lr=1e-5)
    head, features = classifier.configure_optimizers().param_groups
    assert (head["lr"], features["lr"]) == (1e-3, 1e-5)
    assert {id(p) for p in features["params"]} == {id(p) for p in classifier.network.features.parameters()}
    assert {id(p) for p in head["params"]} == {id(p) for p in classifier.network.classifier.parameters()}
    (group,) = two_parts().configure_optimizers().param_groups
    assert len(group["params"]) == len(list(classifier.network.parameters()))
    classifier.loss.scale = nn.Parameter(torch.ones(()))
    assert any(p is classifier.loss.scale for p in classifier.configure_optimizers().param_groups[0]["params"])
    classifier = two_parts(trainable="head", features_lr=1e-5)  # the optimizer gets what is trained
    head, features = classifier.configure_optimizers().param_groups
    assert len(head["params"]) == len(list(classifier.network.classifier.parameters()))
    assert features["params"] == []


# Classes of unequal size


WEIGHTS = [2.0, 1.0, 10.0]
UNEQUAL = torch.tensor([0, 2, 1, 1])


def loss_of(scores: torch.Tensor, labels: torch.Tensor, loss: nn.Module, **options) -> torch.Tensor:
    classifier = Classifier(Scores(), loss, classes=3, **options)
    return classifier.training_step((scores, labels), 0)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.NLLLoss()])
def test_weighted_losses_of_scores_are_those_of_pytorch(loss):
    """But for the divisor: the number of samples in place of the sum of the weights of the batch."""
    scores, weight = torch.randn(4, 3).log_softmax(1), torch.tensor(WEIGHTS)
    options = {"label_smoothing": 0.1} if getattr(loss, "label_smoothing", 0) else {}
    expected = type(loss)(weight=weight, **options)(scores, UNEQUAL) * (2 + 10 + 1 + 1) / 4
    torch.testing.assert_close(loss_of(scores, UNEQUAL, loss, class_weights=WEIGHTS), expected)
    assert loss.weight is None  # the user's own stays as it is
    torch.testing.assert_close(loss_of(scores, UNEQUAL, loss), loss(scores, UNEQUAL))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MultiMarginLoss(), MarginLoss(), SpreadLoss()])
def test_weighted_losses_do_not_depend_on_the_batches(loss):
    scores, loss.reads = torch.rand(4, 3), "scores"
    alone = [loss_of(scores[i : i + 1], UNEQUAL[i : i + 1], loss) for i in range(4)]
    expected = sum(WEIGHTS[label] * one for label, one in zip(UNEQUAL, alone, strict=True)) / 4
    halves = [loss_of(scores[part], UNEQUAL[part], loss, class_weights=WEIGHTS) for part in ([0, 1], [2, 3])]
    torch.testing.assert_close(sum(halves) / 2, expected)
    torch.testing.assert_close(loss_of(scores, UNEQUAL, loss, class_weights=WEIGHTS), expected)
    both = [loss_of(scores, UNEQUAL, loss, class_weights=weights) for weights in (None, [1, 1, 1])]
    assert torch.equal(*both)
    total = loss_of(scores, UNEQUAL, nn.CrossEntropyLoss(reduction="sum"), class_weights=WEIGHTS)
    mean = loss_of(scores, UNEQUAL, nn.CrossEntropyLoss(), class_weights=WEIGHTS)
    torch.testing.assert_close(total, 4 * mean)


def test_mixed_labels_are_weighted(monkeypatch):
    scores, labels = (
        torch.randn(4, 3),
        torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.3, 0.7], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]),
    )
    monkeypatch.setattr("torchcaps.training.classifier.mixup", lambda inputs, *_: (inputs, labels))
    found = loss_of(scores, UNEQUAL, nn.CrossEntropyLoss(), class_weights=WEIGHTS, mixup=0.2)
    torch.testing.assert_close(found, -(torch.tensor(WEIGHTS) * labels * scores.log_softmax(1)).sum() / 4)
    loss = MarginLoss()
    loss.reads = "scores"
    found = loss_of(scores.sigmoid(), UNEQUAL, loss, class_weights=WEIGHTS, mixup=0.2)
    torch.testing.assert_close(found, margin_loss(scores.sigmoid(), labels, weight=torch.tensor(WEIGHTS)))


def test_class_weights_are_in_the_state():
    given = Classifier(Scores(), nn.CrossEntropyLoss(), classes=3, class_weights=WEIGHTS).state_dict()
    later = Classifier(Scores(), nn.CrossEntropyLoss(), classes=3, class_weights="balanced")
    later.load_state_dict(given)
    assert later.loss.weight.tolist() == WEIGHTS
    assert "loss.weight" not in Classifier(Scores(), MarginLoss(), classes=3).state_dict()


@pytest.mark.parametrize(
    ("loss", "options", "said"),
    [
        (nn.CrossEntropyLoss(), {"class_weights": [1, 2]}, "one number for each of 3 classes, got 2: give so many, or"),
        (
            nn.CrossEntropyLoss(),
            {"class_weights": [1, 2, 0]},
            "class_weights must be one of 'balanced' or a tuple, each",
        ),
        (
            nn.HuberLoss(),
            {"class_weights": "balanced"},
            "class_weights='balanced' need a loss with .* HuberLoss has none",
        ),
        (nn.CrossEntropyLoss(torch.ones(3)), {"class_weights": WEIGHTS}, "has a weight already: leave out one of them"),
        (MarginLoss(), {"class_weights": WEIGHTS, "labels_per_image": 2}, "must be None with several labels per image"),
    ],
)
def test_class_weights_that_cannot_be_used(loss, options, said):
    with pytest.raises(ValueError, match=said):
        Classifier(Scores(), loss, classes=3, **options)


class Unequal(LabeledData):
    """Classes of 40, 4 and 5 samples."""

    classes = 3
    names = ("many", "few", "some")

    def setup(self, stage=None):
        self.train_set = ImageSet(
            torch.zeros(49, 1, 2, 2, dtype=torch.uint8), torch.tensor([0] * 40 + [1] * 4 + [2] * 5)
        )


class OwnLoss(nn.CrossEntropyLoss):
    """A loss without a buffer for weights."""

    def __init__(self):
        super().__init__()
        del self.weight


def fit_starts(loss: nn.Module, balance: bool | None, capsys, **options) -> tuple[Classifier, str]:
    """Return a classifier at the start of a training, and what it said."""
    classifier = Classifier(Scores(), loss, classes=3, **options)
    classifier.trainer = Trainer(accelerator="cpu", logger=False)
    classifier.trainer.datamodule = data = Unequal()
    data.balance = balance
    data.setup("fit")
    classifier.setup("fit")
    return classifier, capsys.readouterr().err


@pytest.fixture
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(notes, "_said", set())


def test_balanced_weights_are_those_of_scikit_learn(capsys):
    classifier, _ = fit_starts(nn.CrossEntropyLoss(), None, capsys, class_weights="balanced")
    labels = classifier.trainer.datamodule.train_set.labels
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert classifier.loss.weight.tolist() == pytest.approx(expected.tolist())
    classifier = Classifier(Scores(), nn.CrossEntropyLoss(), classes=3, class_weights="balanced")
    classifier.trainer = Trainer(accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match="class_weights must be one number for each class here: 'balanced' counts"):
        classifier.setup("fit")


REMEDIES = {
    "balance": "--data.balance true",
    "weights": "--model.class_weights balanced",
    "both": "--data.balance true or --model.class_weights balanced",
}


@pytest.mark.usefixtures("_nothing_said_yet")
@pytest.mark.parametrize(
    ("loss", "balance", "weights", "remedies"),
    [
        (MarginLoss(), False, None, "both"),
        (OwnLoss(), False, None, "balance"),
        (MarginLoss(), None, None, "weights"),
        (OwnLoss(), None, None, None),
        (MarginLoss(), True, None, None),
        (MarginLoss(), False, "balanced", None),
        (MarginLoss(weight=torch.ones(3)), False, None, None),
    ],
)
def test_a_note_on_rare_classes(loss, balance, weights, remedies, capsys):
    """Of classes of 40, 4 and 5 samples, one is rare."""
    _, said = fit_starts(loss, balance, capsys, class_weights=weights)
    expected = (
        "torchcaps: rare classes in training: few (4), beside many (40); a network may never predict them: give "
        f"{REMEDIES[remedies]}\n"
        if remedies
        else ""
    )
    assert said == expected


@pytest.mark.usefixtures("_nothing_said_yet")
def test_two_corrections_are_one_too_many(capsys):
    _, said = fit_starts(MarginLoss(), True, capsys, class_weights=WEIGHTS)
    twice = "--data.balance true and --model.class_weights correct for rare classes twice"
    assert said == f"torchcaps: {twice}: one of them is enough\n"


# Compiled steps


def test_what_cannot_be_compiled(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ValueError, match=r"does not work on this machine \(no C\+\+ compiler was found\)"):
        check_compiler(torch.device("cpu"))


class OfTargets(LabeledData):
    """Sixteen inputs of two features, whose targets are numbers or labels."""

    classes = 2

    def __init__(self, target: str, labels: torch.Tensor) -> None:
        super().__init__(batch_size=4)
        self.target, self.labels = target, labels

    def _set(self, stage: str) -> ImageSet:
        return ImageSet(torch.arange(32.0).view(16, 2, 1, 1) / 10, self.labels)


class ToScores(nn.Module):
    """A linear map of the features to scores or, squashed, to activations."""

    def __init__(self, gives_logits: bool = True) -> None:
        super().__init__()
        self.gives_logits = gives_logits
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> Prediction:
        scores = self.linear(inputs.flatten(1))
        return Prediction(scores) if self.gives_logits else Prediction(activations=scores.sigmoid())


def trained(model: Classifier, data: LabeledData) -> Trainer:
    trainer = small_trainer()
    trainer.fit(model, data)
    return trainer


def test_numbers_are_standardized_in_the_loss():
    numbers = torch.stack([torch.arange(16.0), 1000 * torch.arange(16.0).square()], 1)
    model = Classifier(ToScores(), nn.MSELoss(), 2, predicts="numbers", optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    trainer = trained(model, OfTargets("numbers", numbers))
    torch.testing.assert_close(model.mean, numbers.mean(0))
    torch.testing.assert_close(model.deviation, numbers.std(0, correction=0))
    inputs = torch.arange(32.0).view(16, 2, 1, 1) / 10
    errors = (model.network(inputs).scores - numbers) / numbers.std(0, correction=0)
    torch.testing.assert_close(trainer.callback_metrics["val/loss"], errors.square().mean().detach())
    assert "val/accuracy" not in trainer.callback_metrics
    assert {"mean", "deviation"} <= model.state_dict().keys()  # a test of a checkpoint has the same loss


def test_numbers_need_labels_of_numbers():
    model = Classifier(ToScores(), nn.MSELoss(), 2, predicts="numbers")
    with pytest.raises(ValueError, match=r"needs a data set of torchcaps.data with labels \(n, 2\), and the training"):
        trained(model, OfTargets("numbers", torch.arange(16)))
    for options in ({"labels_per_image": None}, {"class_weights": [1.0, 2.0]}):
        with pytest.raises(ValueError, match="predicts='numbers' needs labels_per_image=1"):
            Classifier(ToScores(), nn.MSELoss(), 2, predicts="numbers", **options)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_numbers_are_not_rounded(precision):
    """bfloat16 has no year between 2000 and 2008."""
    model = Classifier(ToScores(), nn.MSELoss(), 2, predicts="numbers")
    trainer = small_trainer(precision=precision)
    with pytest.raises(ValueError, match=f"{precision} rounds the numbers of the data: take bf16-mixed"):
        trainer.test(model, OfTargets("numbers", torch.rand(16, 2)))


@pytest.mark.parametrize("gives_logits", [True, False])
def test_several_labels_are_likely_or_not(gives_logits):
    """Of scores as of activations, a label is predicted where its probability is above one half."""
    network = ToScores(gives_logits)
    labels = (network.linear(torch.arange(32.0).view(16, 2) / 10) > 0).float().detach()
    labels[0] = 1 - labels[0]  # one of sixteen is wrong
    loss = nn.BCEWithLogitsLoss() if gives_logits else MarginLoss()
    model = Classifier(network, loss, 2, labels_per_image=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    trainer = trained(model, OfTargets("labels", labels))
    assert trainer.callback_metrics["val/accuracy"] == 15 / 16
    predicted = model.outcome("test", (torch.rand(3, 2, 1, 1), torch.ones(3, 2)), 0).predicted
    assert predicted.min() >= 0
    assert predicted.max() <= 1


def test_mixup_of_several_labels():
    torch.manual_seed(0)
    labels = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).repeat(8, 1)
    inputs, mixed = mixup(labels[:, :, None], labels, 2, alpha=1.0)
    assert torch.equal(inputs.squeeze(2), mixed)
    assert ((mixed > 0) & (mixed < 1)).any()
    model = Classifier(ToScores(), nn.BCEWithLogitsLoss(), 2, labels_per_image=None, mixup=0.2)
    assert trained(model, OfTargets("labels", labels)).callback_metrics["train/loss"].isfinite()
