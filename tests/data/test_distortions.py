"""The distortions of digits: each step does what its docstring says."""

import pytest
import torch

from torchcaps.data import MNIST, distortions
from torchcaps.data.distortions import distort


def digit(n: int = 400) -> torch.Tensor:
    """A frame with a thick left side: ink from 6 to 19 across and from 4 to 21 down."""
    image = torch.zeros(n, 1, 28, 28)
    image[:, :, 4:22, 6:20] = 1
    image[:, :, 7:19, 11:17] = 0
    return image


def test_shifts_stay_within_the_margins():
    shifted = distortions._shift(digit())
    assert (shifted.sum((1, 2, 3)) == digit().sum((1, 2, 3))).all()
    first = (shifted.sum((1, 2)) > 0).int().argmax(1) - 6
    down = (shifted.sum((1, 3)) > 0).int().argmax(1) - 4
    assert (first.min(), first.max()) == (-6, 8)
    assert (down.min(), down.max()) == (-4, 6)
    assert (first == 0).float().mean() > 0.1  # small shifts are the likeliest
    for image, across, below in zip(shifted[:20], first[:20].tolist(), down[:20].tolist(), strict=True):
        assert (image == digit(1)[0].roll((below, across), (1, 2))).all()


def test_half_of_the_images_are_rotated():
    rotated = distortions._rotate(digit())
    same = (rotated - digit()).abs().amax((1, 2, 3)) < 1e-5
    assert 0.4 < same.float().mean() < 0.6  # and some by less than a degree
    # A rotation by 30 degrees moves the corner by 3 pixels or so, not more.
    assert (rotated.sum((1, 2, 3)) / digit().sum((1, 2, 3))).min() > 0.9


def test_squeezed_images_keep_their_rows():
    squeezed = distortions._squeeze(digit())
    rows = squeezed.sum((1, 3)) / digit().sum((1, 3)).clamp_min(1)
    widths = rows[:, 4]
    assert 27 / 28 + 0.01 > widths.max() > 0.9
    assert widths.min() < 0.85
    assert (rows[:, :4] == 0).all()
    # By one pixel, in the middle or one pixel to the right: the center of mass moves by less than two pixels.
    across = torch.arange(28.0)
    center = (squeezed.sum((1, 2)) * across).sum(1) / squeezed.sum((1, 2, 3))
    original = (digit(1).sum((1, 2)) * across).sum(1) / digit(1).sum()
    assert (center - original).abs().max() < 2.5
    assert distortions._squeezing(28, torch.device("cpu"), torch.float32).shape == (14, 28, 28)


def test_the_kernel_is_that_of_lanczos_with_three_lobes():
    matrices = distortions._squeezing(28, torch.device("cpu"), torch.float32)
    weights = matrices[0, :, 0 + 10]  # of column 10 of an image that is one pixel narrower
    centers = (10 + 0.5) * 28 / 27 - 0.5 - torch.arange(28)
    x = centers * 27 / 28
    expected = torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0)
    torch.testing.assert_close(weights, expected / expected.sum())


def test_a_square_is_erased_away_from_the_edge():
    erased = distortions._erase(torch.ones(2000, 1, 28, 28))
    assert (erased.sum((1, 2, 3)) == 28 * 28 - 16).all()
    seen = (erased == 0).any(0)[0]
    assert seen[4:26, 4:26].all()
    assert seen.sum() == 22 * 22


def test_all_together():
    images = distort(digit())
    assert images.shape == (400, 1, 28, 28)
    assert images.min() >= 0
    assert images.max() <= 1
    assert len({x.sum().item() for x in images}) > 300


@pytest.mark.parametrize("images", [torch.zeros(2, 28, 28), torch.zeros(2, 1, 8, 28)])
def test_what_cannot_be(images):
    with pytest.raises(ValueError, match="at least 12x12"):
        distort(images)


def test_only_training_images_are_distorted():
    data, images = MNIST(distort=True), torch.full((4, 1, 28, 28), 0.5)
    assert (data.augment(images) != images).any()
    assert (data.center(images) == images).all()
    assert (MNIST().augment(images) == images).all()
