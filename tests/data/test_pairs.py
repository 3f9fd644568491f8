"""Pairs of views: the second is the first, turned by the transform."""

import pytest
import torch
from torch.testing import assert_close

from torchcaps.data import Metadata, stereo_pairs, turned_pairs, viewpoints


def places(images):
    """The places of blobs, x to the right and y up from the center, in pixels."""
    side = images.shape[-1]
    pixels = torch.arange(side) - (side - 1) / 2
    mass = images.sum((1, 2, 3))
    x = (images * pixels).sum((1, 2, 3)) / mass
    y = -(images * pixels.view(-1, 1)).sum((1, 2, 3)) / mass
    return torch.stack([x, y], 1)


def test_the_transform_turns_the_first_view_into_the_second():
    pixels = torch.arange(41.0)
    blob = (-((pixels - 30) ** 2 + (pixels.view(-1, 1) - 20) ** 2) / 8).exp().repeat(50, 1, 1, 1)
    pairs = turned_pairs(blob, 90, torch.Generator().manual_seed(0))
    first, second = places(pairs.first), places(pairs.second)
    assert_close((first.unsqueeze(1) @ pairs.transforms).squeeze(1), second, atol=0.05, rtol=0)
    assert (first[:, 0] > -0.1).all()  # from -90 to 90 degrees
    assert first[:, 1].min() < -5
    assert first[:, 1].max() > 5
    again = turned_pairs(blob, 90, torch.Generator().manual_seed(0))
    assert all(map(torch.equal, pairs, again))
    with pytest.raises(ValueError, match=r"expected images of shape \(n, channels, height, width\), got \(41, 41\)"):
        turned_pairs(blob[0, 0], 90)


def grid():
    """Metadata of two toys under two lightings, with three elevations and two azimuths."""
    columns = torch.meshgrid(*map(torch.tensor, ([1, 3], [4], [0, 4, 8], [0, 6], [0, 5])), indexing="ij")
    return Metadata(*(column.flatten() for column in columns))


def test_stereo_pairs_show_the_same_toy_under_the_same_lighting():
    metadata = grid()
    count = len(metadata.category)
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 3, 3)  # each tells its index
    first = torch.arange(count).repeat(60)
    pairs = stereo_pairs(images, metadata, first, torch.Generator().manual_seed(0))
    chosen = (pairs.second[:, 0, 0, 0] * 255).round().long()
    assert_close(pairs.first[:, 0, 0, 0] * 255, first.float())
    one, other = metadata.at(first), metadata.at(chosen)
    for name in ("category", "instance", "lighting"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert len(set(zip(first.tolist(), chosen.tolist(), strict=True))) == count * 6  # every view of a toy is drawn
    # A direction of the toy, as the cameras of each view see it.
    direction = torch.tensor([0.3, -1.0, 2.0])
    seen = viewpoints(metadata) @ direction
    assert_close((seen[first].unsqueeze(1) @ pairs.transforms).squeeze(1), seen[chosen])


@pytest.mark.parametrize(
    ("elevation", "azimuth", "nose", "top"),
    [
        (0, 0, (1, 0, 0), (0, 3**0.5 / 2, 0.5)),  # 30 degrees above the horizontal; the nose points to the right
        (0, 18, (-1, 0, 0), (0, 3**0.5 / 2, 0.5)),  # turned by 180 degrees: to the left
        (6, 27, (0, -(3**0.5) / 2, 0.5), (0, 0.5, 3**0.5 / 2)),  # by 270: towards the cameras, seen from 60 degrees
    ],
)
def test_viewpoints_by_hand(elevation, azimuth, nose, top):
    one = torch.tensor([0])
    rotation = viewpoints(Metadata(one, one, one + elevation, one + azimuth, one))[0]
    assert_close(rotation[:, 0], torch.tensor(nose, dtype=torch.float), atol=1e-6, rtol=0)
    assert_close(rotation[:, 2], torch.tensor(top, dtype=torch.float), atol=1e-6, rtol=0)
