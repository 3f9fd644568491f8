"""The loss of networks that segment, beside a loop over pixels."""

import math

import pytest
import torch
from torch.testing import assert_close

from torchcaps import Segmentation, SegmentationLoss
from torchcaps.functional import segmentation_loss
from torchcaps.nn.losses import input_of_loss


def by_loops(segmentation, masks, cross_entropy, dice, weight):
    """The equation of `segmentation_loss`, a pixel at a time."""
    evidence = segmentation.evidence.tolist()
    classes, total, weights = segmentation.evidence.shape[1], 0.0, 0.0
    both, either = [0.0] * classes, [0.0] * classes
    for b, mask in enumerate(masks.tolist()):
        for y, row in enumerate(mask):
            for x, label in enumerate(row):
                if label == -100:
                    continue
                values = [evidence[b][k][y][x] for k in range(classes)]
                if segmentation.activations is None:
                    of_all = sum(map(math.exp, values))
                    p = [math.exp(value) / of_all for value in values]
                    entropy = -math.log(p[label])
                else:
                    p = values
                    each = [-math.log(v if k == label else 1 - v) for k, v in enumerate(values)]
                    entropy = sum(each) / classes
                total += weight[label] * entropy
                weights += weight[label]
                for k in range(classes):
                    both[k] += p[k] * (k == label)
                    either[k] += p[k] + (k == label)
    mean = sum((2 * b + 1) / (e + 1) for b, e in zip(both, either, strict=True)) / classes
    return cross_entropy * total / weights + dice * (1 - mean)


@pytest.mark.parametrize("kind", ["scores", "activations"])
@pytest.mark.parametrize("weight", [None, [0.5, 2.0, 1.0]])
def test_plain_loops(kind, weight):
    torch.manual_seed(0)
    evidence = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    segmentation = Segmentation(**{kind: evidence if kind == "scores" else evidence.sigmoid()})
    masks = torch.randint(0, 3, (2, 4, 5))
    masks[0, 1:, 2] = -100
    options = 0.7, 1.3, None if weight is None else torch.tensor(weight)
    expected = by_loops(segmentation, masks, 0.7, 1.3, weight or [1.0, 1.0, 1.0])
    assert segmentation_loss(segmentation, masks, *options).item() == pytest.approx(expected, abs=1e-13)


def test_cross_entropy_alone_is_that_of_pytorch():
    torch.manual_seed(0)
    scores, masks = torch.randn(2, 4, 6, 6), torch.randint(0, 4, (2, 6, 6))
    masks[1, :2] = -100
    weight = torch.rand(4)
    loss = SegmentationLoss(dice=0.0, weight=weight)
    assert_close(loss(Segmentation(scores), masks), torch.nn.functional.cross_entropy(scores, masks, weight))


def test_gradients():
    torch.manual_seed(0)
    masks = torch.randint(0, 2, (1, 3, 3))
    masks[0, 0, 0] = -100
    scores = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: segmentation_loss(Segmentation(x), masks), scores)
    torch.autograd.gradcheck(lambda x: segmentation_loss(Segmentation(activations=x.sigmoid()), masks), scores)


def test_lines_and_volumes_have_pixels_too():
    for sides in ((7,), (2, 3, 4)):
        scores, masks = torch.randn(2, 3, *sides), torch.randint(0, 3, (2, *sides))
        flat = Segmentation(scores.flatten(2).unsqueeze(2))
        assert_close(segmentation_loss(Segmentation(scores), masks), segmentation_loss(flat, masks.view(2, 1, -1)))


def test_a_batch_without_a_pixel_that_counts_has_a_loss_of_zero_entropy():
    loss = segmentation_loss(Segmentation(torch.randn(1, 2, 2, 2)), torch.full((1, 2, 2), -100))
    assert loss == 0


def test_a_class_that_is_ruled_out_changes_nothing_else():
    scores, masks = torch.randn(1, 3, 2, 2), torch.zeros(1, 2, 2).long()
    scores[:, 2] = -torch.inf
    two = segmentation_loss(Segmentation(scores[:, :2]), masks, dice=0.0)
    assert_close(segmentation_loss(Segmentation(scores), masks, dice=0.0), two)
    masks[0, 0, 0], scores[0, :, 0, 0] = -100, torch.tensor([-torch.inf, 0, 0])
    assert segmentation_loss(Segmentation(scores), masks).isfinite()


def test_it_reads_the_whole_prediction():
    segmentation = Segmentation(torch.randn(1, 2, 3, 3))
    assert input_of_loss(SegmentationLoss(), segmentation) is segmentation
    with pytest.raises(ValueError, match="use another loss, such as SegmentationLoss"):
        input_of_loss(torch.nn.CrossEntropyLoss(), Segmentation(activations=torch.rand(1, 2, 3, 3)))


@pytest.mark.parametrize(
    ("masks", "error", "said"),
    [
        (torch.zeros(1, 3, 4).long(), ValueError, r"expected masks of shape \(1, 3, 3\), got \(1, 3, 4\)"),
        (torch.zeros(1, 3, 3), TypeError, "masks must be class indices, integers, got torch.float32"),
        (torch.full((1, 3, 3), 2), ValueError, "masks must be from 0 to 1, as there are 2 classes, or -100 .*, got 2"),
        (torch.full((1, 3, 3), -1), ValueError, "or -100 where a position does not count, got -1"),
    ],
)
def test_masks_that_are_wrong(masks, error, said):
    with pytest.raises(error, match=said):
        segmentation_loss(Segmentation(torch.randn(1, 2, 3, 3)), masks)


def test_options_that_are_wrong():
    with pytest.raises(ValueError, match="cross_entropy or dice must be above 0"):
        SegmentationLoss(0.0, 0.0)
    with pytest.raises(ValueError, match="weight must be a floating-point tensor of 2 numbers"):
        segmentation_loss(
            Segmentation(torch.randn(1, 2, 3, 3)), torch.zeros(1, 3, 3).long(), weight=torch.tensor([1.0, 2.0, 3.0])
        )
