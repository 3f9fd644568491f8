"""capsule_cnn: signals, images and volumes of any size, for classes, labels and numbers; its exports."""

import pytest
import torch
import torch.nn.functional as F
from networks import assert_it_trains
from torch import Tensor
from torch.testing import assert_close

from torchcaps import CapsuleHead, CapsuleRegressor, EMRouting, create_model
from torchcaps.deploy import export

SMALL = {"width": 8, "types": 4, "pose": 4}
SIDES = {1: (24,), 2: (10, 12), 3: (6, 7, 8)}
MORE = {1: (37,), 2: (12, 9), 3: (7, 9, 6)}
every_dims = pytest.mark.parametrize("dims", SIDES)


def examples(dims: int, sides: tuple[int, ...], count: int = 6) -> Tensor:
    return torch.randn(count, 2, *sides)


@every_dims
@pytest.mark.parametrize("routing", [None, EMRouting()])
def test_classes_of_inputs_of_any_size(dims, routing):
    model = create_model("capsule_cnn", in_channels=2, classes=5, dims=dims, routing=routing, **SMALL)
    assert isinstance(model.classifier, CapsuleHead)
    assert model.image_shape == (2, *[None] * dims)
    assert_it_trains(model, examples(dims, SIDES[dims]), 5)
    prediction = model.eval()(examples(dims, MORE[dims]), return_coefficients=True)
    assert prediction.scores.shape == (6, 5)
    positions = torch.Size([(n + 3) // 4 for n in MORE[dims]]).numel()
    assert prediction.capsules.coefficients.shape == (6, 4 * positions, 5)


@every_dims
def test_numbers_of_inputs_of_any_size(dims):
    """As many numbers as asked for, in their units, whatever the number of classes is."""
    model = create_model("capsule_cnn", in_channels=2, numbers=3, dims=dims, **SMALL)
    assert isinstance(model.classifier, CapsuleRegressor)
    targets = torch.randn(6, 3) + torch.tensor([0.0, 50.0, 2000.0])
    model.classifier.standardize(targets)
    inputs = examples(dims, SIDES[dims])
    loss = F.mse_loss(model(inputs).scores, targets)
    loss.backward()
    assert loss < 10
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model(examples(dims, MORE[dims])).scores.shape == (6, 3)


def test_depth_width_and_kernels():
    model = create_model("capsule_cnn", dims=1, width=6, depth=5, kernel_size=3)
    convolutions = [module for module in model.features if isinstance(module, torch.nn.Conv1d)]
    assert [x.stride[0] for x in convolutions] == [2, 2, 2, 2, 1]
    assert {(x.out_channels, x.kernel_size[0], x.padding[0]) for x in convolutions} == {(6, 3, 1)}
    by_default = (create_model("capsule_cnn", dims=dims).features[0] for dims in (1, 2, 3))
    assert [x.kernel_size for x in by_default] == [(9,), (3, 3), (3, 3, 3)]


@pytest.mark.parametrize(
    ("dims", "given", "message"),
    [
        (1, (12, 24), r"expected signals of shape \(batch, 2, length\), got \(12, 24\)$"),
        (1, (2, 24), r"got \(2, 24\): a single signal needs signals.unsqueeze\(0\)$"),
        (1, (6, 24, 2), r"got \(6, 24, 2\): channels that come last need signals.movedim\(-1, 1\)$"),
        (
            3,
            (2, 6, 7, 8),
            r"volumes of shape .batch, 2, depth, height, width.*: a single volume needs volumes.unsqueeze",
        ),
        (3, (6, 6, 7, 8, 2), r"channels that come last need volumes.movedim\(-1, 1\)$"),
        (2, (6, 2, 24), r"expected images of shape \(batch, 2, height, width\), got \(6, 2, 24\)$"),
    ],
)
def test_inputs_of_another_shape(dims, given, message):
    model = create_model("capsule_cnn", in_channels=2, dims=dims, **SMALL)
    with pytest.raises(ValueError, match=message) as error:
        model(torch.randn(given))
    assert "\n" not in str(error.value)
    way = str(error.value).partition(" need")[2].partition(" ")[2]
    if way:
        kind = way.partition(".")[0]
        model(eval(way, {kind: torch.randn(given)}))


def test_signals_without_channels():
    model = create_model("capsule_cnn", dims=1, **SMALL)
    with pytest.raises(
        ValueError, match=r"a single signal needs .*0\), signals without channels need signals.unsqueeze"
    ):
        model(torch.randn(1, 24))
    with pytest.raises(ValueError, match=r": signals without channels need signals.unsqueeze\(1\)$"):
        model(torch.randn(6, 24))


@pytest.mark.parametrize(("dims", "options"), [(1, {"classes": 3}), (2, {"numbers": 2}), (3, {"classes": 3})])
def test_exported_to_onnx(dims, options, tmp_path):
    """`export` compares the file with the network on batches of several sizes."""
    torch.manual_seed(0)
    model = create_model("capsule_cnn", in_channels=2, dims=dims, **SMALL, **options)
    model(examples(dims, SIDES[dims], 16))
    if "numbers" in options:
        model.classifier.standardize(torch.randn(9, 2) + torch.tensor([0.0, 50.0]))
    difference = export(model.eval(), examples(dims, SIDES[dims], 3), tmp_path / "model.onnx", "onnx")
    assert difference < 1e-4


def test_several_labels_in_a_few_steps():
    """Each of three bars is in an image or is not, anywhere: every label is told by binary cross-entropy."""
    torch.manual_seed(0)
    labels = (torch.rand(400, 3) < 0.5).float()
    images = torch.zeros(400, 1, 12, 12)
    for image, present in zip(images, labels, strict=True):
        y, x = torch.randint(2, 10, (2,)).tolist()
        image[0, y, :] += present[0]
        image[0, :, x] += present[1]
        image[0, :2, :2] += 2 * present[2]
    images += 0.1 * torch.randn_like(images)
    model = create_model("capsule_cnn", classes=3, width=16, depth=2, types=8, pose=8)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(120):
        batch = torch.randint(300, (32,))
        loss = F.binary_cross_entropy_with_logits(model(images[batch]).scores, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        exact = ((model.eval()(images[300:]).scores > 0) == (labels[300:] > 0)).all(1).float().mean().item()
    assert exact > 0.8
    assert_close(model(images[:0]).scores.shape, torch.Size([0, 3]))
