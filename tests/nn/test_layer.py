"""Networks of layers, compiled and exported; the initial weights of layers with a routing."""


import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleBlock2d,
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleFC,
    CapsuleLinear,
    DynamicRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    MaskedDecoder,
    PrimaryCapsules,
    VectorNormRouting,
    squash,
)
from torchcaps.routing.shape import CHILDREN


class Images(nn.Module):
    """A network of all layers without routing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            PrimaryCapsules(1, 2, 2, 3, scores=True), CapsuleBlock2d(2, 2, 4, 3, 2, skip=True), CapsuleFC(8, 3, 4)
        )
        self.decoder = MaskedDecoder(3, 4, (1, 3, 3), (5,))

    def forward(self, x):
        capsules = self.layers(x)
        return capsules.poses, self.decoder(capsules)


class Sequences(nn.Module):
    """A network of convolutions of a sequence and a layer with as many parents as children."""

    def __init__(self):
        super().__init__()
        self.conv = CapsuleConv1d(2, 2, (2, 2), (2, 3), 3, HeinsenRouting(2), stride=2, padding=1)
        self.linear = CapsuleLinear(None, None, (2, 3), (2, 2), DynamicRouting(2))

    def forward(self, x):
        between = self.conv(x)
        return between.activations, self.linear(between).poses


@pytest.mark.parametrize(
    ("network", "shape"),
    [(Images, (2, 1, 6, 6)), pytest.param(Sequences, (2, 2, 7, 2, 2), marks=pytest.mark.slow)],
)
def test_compile_and_export(network, shape):
    network = network().eval()
    x = torch.randn(shape, requires_grad=True)
    torch._dynamo.reset()
    out, expected = torch.compile(network, fullgraph=True, backend="aot_eager")(x), network(x)
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    ours, theirs = (torch.autograd.grad(sum(y.square().sum() for y in ys), x) for ys in (out, expected))
    assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        sizes = ({0: torch.export.Dim("batch")},)
        exported = torch.export.export(network, (x,), dynamic_shapes=sizes).module()
        more = torch.randn(5, *shape[1:])
        assert_close(exported(more), network(more), rtol=1e-10, atol=1e-10)


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
