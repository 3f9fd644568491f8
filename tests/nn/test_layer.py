"""The length of the first parents, which follows from the initial weights of every layer with a routing."""

import pytest
import torch

from torchcaps import (
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleLinear,
    DynamicRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    VectorNormRouting,
    squash,
)
from torchcaps.routing.shape import CHILDREN


def linear(**options):
    return CapsuleLinear(**{"in_capsules": 30, "out_capsules": 20, "in_pose": 16, "out_pose": 24} | options)


SIZES = [  # layers of 20 parents, each with its expected number of children
    (lambda r: linear(routing=r), 30),
    (lambda r: linear(routing=r, in_pose=(3, 8), out_pose=(3, 12)), 30),
    (lambda r: linear(routing=r, in_capsules=None), CHILDREN),
    (lambda r: linear(routing=r, in_capsules=None, expected_children=50), 50),
    (lambda r: linear(routing=r, in_capsules=5, share_positions=True, expected_children=60), 60),
    (lambda r: CapsuleConv1d(6, 20, 16, 24, 5, r), 30),
    (lambda r: CapsuleConv2d(6, 20, 16, 24, (2, 3), r), 36),
]


@pytest.mark.parametrize(("build", "children"), SIZES)
@pytest.mark.parametrize(
    "routing",
    [
        InvertedAttentionRouting(1, layer_norm=False),  # a sum of its votes
        HeinsenRouting(1),  # a mean of its votes
        DynamicRouting(1),
        VectorNormRouting(0, activation=squash),
    ],
    ids=str,
)
def test_first_parents_are_gain_times_as_long_as_children(build, children, routing):
    """The length is measured before the squash, if there is one."""
    layer = build(routing)
    x = torch.randn(256, children, *layer.in_pose)
    x = x / x.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1)) * children**0.5
    if not isinstance(layer, CapsuleLinear):
        poses = x.unflatten(1, (-1, *layer.kernel_size))
    else:
        poses = x.unflatten(1, (5, -1)) if layer.share_positions else x
    lengths = layer(poses).poses.flatten(1).unflatten(1, (20, -1)).norm(dim=2)
    if isinstance(routing, DynamicRouting) or getattr(
        routing, "activation", None
    ):  # squash makes n**2 / (1 + n**2) of n
        lengths = (lengths / (1 - lengths)).sqrt()
    assert lengths.square().mean().sqrt().item() == pytest.approx(routing.gain, rel=0.05)
