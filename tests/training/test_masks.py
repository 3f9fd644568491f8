"""Training and testing a class of each pixel: counts beside loops, the report, and the loops of Lightning and ours."""

import math

import pytest
import torch
from recorder import small_trainer
from torch import nn
from torch.testing import assert_close

from torchcaps import Segmentation, SegmentationLoss, create_model
from torchcaps.data import ImageData
from torchcaps.data.labeled import LabeledSet
from torchcaps.measures.masks import dice_of, of_each_class, overlaps
from torchcaps.measures.results import MaskResults, Predicted
from torchcaps.training import Classifier, Report

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")

NAMES = ["ground", "dark", "bright"]


class Squares(LabeledSet):
    """Images of noise with a dark and a bright square, one at least in part behind the other."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = 0.3 * torch.rand(count, 1, 16, 16, generator=generator)
        self.masks = torch.zeros(count, 16, 16, dtype=torch.long)
        for image, mask in zip(self.images, self.masks, strict=True):
            for label in (1, 2):
                y, x = torch.randint(0, 11, (2,), generator=generator).tolist()
                image[0, y : y + 5, x : x + 5] += 0.3 * label
                mask[y : y + 5, x : x + 5] = label
        self.masks[:, 0] = -100
        self.labels = torch.stack([(self.masks == label).sum((1, 2)) for label in range(3)], 1)

    def __getitems__(self, indices):
        return self.images[indices], self.masks[indices]


class SquaresData(ImageData):
    shape, classes, target, names = (1, 16, 16), 3, "masks", NAMES
    _validates = True

    def setup(self, stage=None):
        self.train_set, self.val_set, self.test_set = (Squares(24, seed) for seed in range(3))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class ToScores(nn.Module):
    """Scores of each class from one number for each class."""

    def __init__(self, reads="scores"):
        super().__init__()
        self.reads, self.conv = reads, nn.Conv2d(1, 3, 1)

    def forward(self, images):
        scores = self.conv(images)
        return Segmentation(scores) if self.reads == "scores" else Segmentation(activations=scores.sigmoid())


def test_overlaps_by_loops():
    torch.manual_seed(0)
    predicted, masks = torch.randint(0, 4, (3, 5, 6)), torch.randint(0, 3, (3, 5, 6))  # class 3 is in no mask
    masks[0, :2] = masks[1, :, 3] = -100
    counts = overlaps(predicted, masks, 5)
    for n in range(3):
        for label in range(5):
            of_mask = {(y, x) for y in range(5) for x in range(6) if masks[n, y, x] == label}
            of_network = {
                (y, x) for y in range(5) for x in range(6) if predicted[n, y, x] == label and masks[n, y, x] != -100
            }
            expected = [len(of_mask), len(of_network), len(of_mask & of_network)]
            assert counts[n, :, label].tolist() == expected


def test_dice_and_iou_by_hand_and_of_classes_without_pixels():
    # Two images, three classes: the second class is predicted in the first image alone, the third nowhere.
    counts = torch.tensor([[[6, 2, 0], [5, 3, 0], [5, 2, 0]], [[8, 0, 0], [8, 0, 0], [8, 0, 0]]])
    ground, dark, bright = of_each_class(counts)
    assert (ground.dice, ground.iou) == pytest.approx((26 / 27, 13 / 14))
    assert ground.of_images == pytest.approx((10 / 11 + 1) / 2)
    assert dark == pytest.approx((4 / 5, 2 / 3, 4 / 5, 2 / 16, 1))  # the image without it does not count
    assert math.isnan(bright.dice)
    assert math.isnan(bright.iou)
    assert math.isnan(bright.of_images)
    assert bright.images == 0
    assert dice_of(torch.tensor([[0], [4], [0]])).item() == 0  # predicted, and not there
    results = MaskResults(NAMES, Predicted(counts[:, 0], counts[:, 1:].flatten(1)), None)
    assert results.metrics["iou"] == pytest.approx((13 / 14 + 2 / 3) / 2)
    assert list(results.metrics) == ["iou", "dice_of_images", "dice/ground", "dice/dark"]
    assert results.rows[2] == ("bright", "", "", "", "0.0000", "0")
    assert results.mistakes().rows[0] == ("0.8545", "dark 0.8000")


@pytest.mark.parametrize("reads", ["scores", "activations"])
def test_what_is_logged_is_what_the_test_set_gives(tmp_path, reads):
    torch.manual_seed(0)
    model = Classifier(ToScores(reads), SegmentationLoss(), 3, predicts="masks", optimizer=torch.optim.Adam)
    report, trainer, data = Report(), small_trainer(), SquaresData(batch_size=7)
    report.folder = tmp_path
    trainer.callbacks.append(report)
    trainer.fit(model, data)
    assert {"val/dice", "train/dice", "val/loss"} <= set(trainer.callback_metrics)
    trainer.validate(model, data, verbose=False)
    (metrics,) = trainer.test(model, data, verbose=False)
    images, masks = data.test_set.images, data.test_set.masks
    segmentation = model.network(images)
    counts = overlaps(segmentation.evidence.argmax(1), masks, 3)
    assert metrics["test/dice"] == pytest.approx(dice_of(counts.sum(0)).nanmean().item())
    assert metrics["test/dice/dark"] == pytest.approx(dice_of(counts.sum(0))[1].item(), nan_ok=True)
    table = (tmp_path / "report" / "masks.csv").read_text().splitlines()
    assert table[0] == "class,Dice,IoU,Dice of an image,share of the pixels,test images"
    assert len(table) == 5
    assert (tmp_path / "report" / "masks.png").is_file()
    assert not (tmp_path / "report" / "mistakes.png").exists()
    assert "val/dice/ground" in report.about["metrics"]


def test_balanced_weights_count_pixels_and_are_those_of_the_loss():
    model = Classifier(ToScores(), SegmentationLoss(), 3, predicts="masks", class_weights="balanced")
    data = SquaresData(batch_size=8)
    small_trainer().fit(model, data)
    counts = data.train_set.labels.sum(0)
    assert_close(model.loss.weight, counts.sum() / (3 * counts))
    batch = data.test_set.__getitems__([0, 1])
    assert_close(model.outcome("val", batch, 0).loss, model.loss(model.network(batch[0]), batch[1]))


def test_a_class_without_a_training_pixel_has_a_weight_of_one():
    model = Classifier(ToScores(), SegmentationLoss(), 3, predicts="masks", class_weights="balanced")
    data = SquaresData(batch_size=8)
    data.setup()
    data.setup = lambda stage=None: None
    data.train_set.masks[data.train_set.masks == 2] = 0
    data.train_set.labels = torch.stack([(data.train_set.masks == label).sum((1, 2)) for label in range(3)], 1)
    small_trainer().fit(model, data)
    assert model.loss.weight[2] == 1


def test_what_is_reconstructed_is_what_is_of_no_first_class():
    torch.manual_seed(0)
    network = create_model("segcaps", classes=3, features=4)
    model = Classifier(network, SegmentationLoss(), 3, predicts="masks", reconstruction_weight=0.5)
    images, masks = Squares(2, 0).__getitems__([0, 1])
    outcome = model.outcome("train", (images, masks), 0)
    segmentation = network(images)
    present = torch.stack([torch.zeros(2, 16, 16), masks == 1, masks == 2], 1)
    drawn = network.reconstruct(segmentation.capsules, present)
    error = ((drawn - images)[(masks > 0).unsqueeze(1)] ** 2).sum() / 2
    assert_close(outcome.means["reconstruction_error"], error)
    assert_close(outcome.loss, SegmentationLoss()(segmentation, masks) + 0.5 * error)


@pytest.mark.parametrize("options", [{"labels_per_image": None}, {"top_k": 2}, {"mixup": 0.2}])
def test_options_that_masks_do_not_have(options):
    with pytest.raises(ValueError, match=r"predicts='masks'"):
        Classifier(ToScores(), SegmentationLoss(), 3, predicts="masks", **options)


def test_outputs_and_masks_that_do_not_fit():
    model = Classifier(nn.Conv2d(1, 3, 1), SegmentationLoss(), 3, predicts="masks")
    with pytest.raises(TypeError, match=r"must return a torchcaps.Segmentation\(scores\), got a tensor of shape"):
        model(torch.rand(1, 1, 4, 4))
    model = Classifier(ToScores(), SegmentationLoss(), 3, predicts="masks")
    with pytest.raises(ValueError, match=r"expected masks of shape \(1, 4, 4\), got \(1, 5, 4\)"):
        model.outcome("train", (torch.rand(1, 1, 4, 4), torch.zeros(1, 5, 4).long()), 0)
