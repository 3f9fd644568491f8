"""What is drawn of networks that segment."""

import pytest
import torch
from torch.testing import assert_close

from torchcaps import create_model
from torchcaps.capsules import IGNORED
from torchcaps.explain.figures import write_figures
from torchcaps.explain.page import report, write_page
from torchcaps.explain.samples import samples_of
from torchcaps.explain.segmentation import color_of, masks_figure, over, segmented
from torchcaps.measures.masks import dice_of, overlaps


@pytest.mark.parametrize("sides", [(16, 16), (19, 13)])
def test_coefficients_are_those_of_the_last_layer(sides):
    torch.manual_seed(0)
    network = create_model("segcaps", classes=3, features=4, decoder=False).eval()
    images = torch.rand(2, 1, *sides)
    with torch.no_grad():
        probabilities, coefficients = segmented(network, images)
        seen = []
        handle = network.after_skip[-1].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
        expected = network(images).probabilities
        handle.remove()
        of_layer = network.after_skip[-1](seen[0], return_coefficients=True).coefficients
    assert_close(probabilities, expected)
    assert_close(coefficients, of_layer.mean(1)[..., : sides[0], : sides[1]])
    assert_close(coefficients.sum(1), torch.ones(2, *sides))


def test_a_unet_has_none():
    _, coefficients = segmented(create_model("unet", channels=2, classes=3).eval(), torch.rand(1, 1, 16, 16))
    assert coefficients is None


def test_classes_lie_over_images_and_the_first_does_not():
    image, mask = torch.full((1, 1, 2, 2), 0.5), torch.tensor([[[0, 1], [2, -100]]])
    (drawn,) = over(image, mask)
    assert drawn[:, 0, 0].tolist() == [0.5] * 3
    assert drawn[:, 1, 1].tolist() == [1.0] * 3
    for label, place in ((1, (0, 1)), (2, (1, 0))):
        color = torch.tensor([int(color_of(label)[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert_close(drawn[:, place[0], place[1]], 0.4 * 0.5 + 0.6 * color)


def test_the_figure_has_a_row_for_each_thing(tmp_path):
    network = create_model("segcaps", classes=3, features=4, decoder=False).eval()
    images, masks = torch.rand(8, 1, 16, 16), torch.randint(0, 3, (8, 16, 16))
    figure = masks_figure(network, images, masks, ["ground", "a", "b"], maps=True)
    labels = [axis.get_ylabel() for axis in figure.axes if axis.get_ylabel()]
    assert labels[:3] == ["image", "mask", "prediction"]
    assert labels[3:6] == ["coefficients:\nground", "coefficients:\na", "coefficients:\nb"]
    assert sum(axis.get_title().startswith("Dice 0.") for axis in figure.axes) == 6  # at most six images
    samples = samples_of(images, masks, ["ground", "a", "b"], ["x"] * 8, "masks")
    assert [path.name for path, _ in write_figures(network, samples, tmp_path)] == ["masks.png"]
    unknown = samples_of(images, None, ["ground", "a", "b"], ["x"] * 8, "masks")
    assert [path.name for path, _ in write_figures(network, unknown, tmp_path)] == ["masks.png"]


@pytest.mark.parametrize("masks", [True, False])
def test_the_page_of_masks(masks, tmp_path):
    torch.manual_seed(0)
    network = create_model("segcaps", classes=3, features=4, decoder=False).eval()
    truth = torch.randint(0, 3, (12, 16, 16))
    truth[:, 0] = IGNORED
    images, names = torch.rand(12, 1, 16, 16), ["ground", "a", "b"]
    samples = samples_of(images, truth if masks else None, names, [f"image {i}" for i in range(12)], "masks")
    content = report(network, samples, "A network")
    (snapshot,) = content["snapshots"]
    maps = [f"coefficients: {name}" for name in names]
    for example in snapshot["masks"]:
        assert [of for _, of in example["pictures"]] == ["image", *["mask"] * masks, "prediction", *maps]
    assert content["colors"] == [None, color_of(1), color_of(2)]
    assert len(content["limits"]) == 1 + masks
    assert write_page(content, tmp_path / "index.html").stat().st_size > 10_000
    if not masks:
        assert (content["table"], snapshot["dice"], len(snapshot["masks"])) == (None, None, 12)
        return
    predicted = network(images).probabilities.argmax(1)
    expected = dice_of(overlaps(predicted, truth, 3))
    of_classes = dice_of(overlaps(predicted, truth, 3).sum(0))
    assert snapshot["dice"] == pytest.approx(float(of_classes.nanmean()))
    assert [row[1] for row in content["table"][1:4]] == [f"{x:.4f}" for x in of_classes.tolist()]
    shown = {example["title"]: example["dice"] for example in snapshot["masks"]}
    assert len(shown) == 8
    assert shown == pytest.approx(
        {f"image {i}": float(expected[i].nanmean()) for i in range(12) if f"image {i}" in shown}
    )
    lowest = f"image {expected.nanmean(1).argmin()}"
    assert lowest in shown


def test_the_page_of_masks_without_a_pixel_that_counts(tmp_path):
    network = create_model("unet", channels=1, classes=3).eval()
    truth = torch.full((2, 16, 16), IGNORED)
    content = report(
        network, samples_of(torch.rand(2, 1, 16, 16), truth, ["ground", "a", "b"], ["x", "y"], "masks"), "A network"
    )
    assert content["snapshots"][0]["dice"] is None
    write_page(content, tmp_path / "index.html")


@pytest.mark.parametrize("masks", [True, False])
def test_a_network_with_more_classes_than_the_data(masks, tmp_path):
    images, truth = torch.rand(3, 1, 16, 16), torch.randint(0, 2, (3, 16, 16))
    samples = samples_of(images, truth if masks else None, ["ground", "a"], ["x"] * 3, "masks")
    network = create_model("segcaps", classes=4, features=4, decoder=False).eval()
    content = report(network, samples, "A network")
    assert content["classes"] == ["ground", "a", "class 2", "class 3"]
    assert len(content["colors"]) == 4
    assert write_page(content, tmp_path / "index.html").exists()
    assert [path.name for path, _ in write_figures(network, samples, tmp_path)] == ["masks.png"]
