"""Tests of every layer: precision, devices, initial values, copies, compiling and exporting."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleBlock2d,
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleFC,
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    MaskedDecoder,
    PrimaryCapsules,
    RoutingPool2d,
    SelfRouting,
    VectorNormRouting,
    squash,
)
from torchcaps.routing.shape import CHILDREN


class ToCapsules(nn.Module):
    """Wraps a layer that takes Capsules, so that it takes poses."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor):
        return self.layer(Capsules(poses))


LAYERS = {  # each with the shape of an input
    "linear": (lambda **kw: CapsuleLinear(4, 3, (2, 2), (2, 3), HeinsenRouting(2), bias=True, **kw), (2, 4, 2, 2)),
    "linear of any number": (
        lambda **kw: CapsuleLinear(
            None, None, 3, 4, InvertedAttentionRouting(activations=True, start="learned"), bias=True, **kw
        ),
        (2, 4, 3),
    ),
    "linear on a grid": (
        lambda **kw: CapsuleLinear(2, 3, (2, 3), (2, 4), EMRouting(2), share_positions=True, coordinates=True, **kw),
        (2, 2, 3, 2, 2, 3),
    ),
    "conv1d": (
        lambda **kw: CapsuleConv1d(2, 3, (2, 2), (2, 3), 3, SelfRouting(), padding=1, bias=True, **kw),
        (2, 2, 6, 2, 2),
    ),
    "conv2d": (
        lambda **kw: CapsuleConv2d(
            2, 3, 4, 4, 3, DynamicRouting(start="learned", learn_bias=True), padding=1, bias=True, **kw
        ),
        (2, 2, 4, 5, 4),
    ),
    "pool": (lambda **kw: RoutingPool2d(2, 2.0, kernel_size=2, learn_sharpness=True, **kw), (2, 4, 4, 4)),
    "primary": (lambda **kw: PrimaryCapsules(3, 2, (2, 2), 3, scores=True, **kw), (2, 3, 5, 5)),
    "block": (lambda **kw: CapsuleBlock2d(2, 2, 4, 3, 2, skip=True, **kw), (2, 2, 4, 4, 2)),
    "block without an aide": (lambda **kw: CapsuleBlock2d(2, 2, 4, coefficients=None, **kw), (2, 2, 4, 4, 2)),
    "fully connected": (lambda **kw: CapsuleFC(4, 3, 2, **kw), (2, 4, 2)),
    "decoder": (lambda **kw: ToCapsules(MaskedDecoder(3, 4, (1, 5, 5), (6,), **kw)), (2, 3, 4)),
}
layers = pytest.mark.parametrize("name", LAYERS)
# Layers beyond those on which the tests of every algorithm run.
other_layers = pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("linear", "conv2d")])


def make(name: str, **options) -> tuple[nn.Module, Tensor]:
    """A layer with random parameters, and an input."""
    build, shape = LAYERS[name]
    layer = build(**options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer, torch.rand(shape, dtype=options.get("dtype")) + 0.1


def flat(out) -> list[Tensor]:
    return [x for x in ((out,) if isinstance(out, Tensor) else out) if isinstance(x, Tensor)]


def values(module: nn.Module) -> list[Tensor]:
    return [x for x in [*module.parameters(), *module.buffers()] if x.is_floating_point()]


@layers
def test_precision(name):
    layer, x = make(name, dtype=torch.float32)
    assert {x.dtype for x in values(layer)} == {torch.float32}
    assert {x.dtype for x in flat(layer(x))} == {torch.float32}
    assert {x.dtype for x in values(LAYERS[name][0]())} == {torch.float64}  # the default, in these tests


@layers
def test_meta_tensors_have_shapes_and_can_be_given_values(name):
    layer = LAYERS[name][0](device="meta")
    usual, x = make(name)
    expected = usual(x)
    assert all(x.is_meta for x in values(layer))
    for found, real in zip(flat(layer(x.to("meta"))), flat(expected), strict=True):
        assert found.is_meta
        assert found.shape == real.shape
    layer.to_empty(device="cpu")
    for value in values(layer):
        value.data.fill_(math.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(value.isfinite().all() for value in values(layer))
    assert all(found.isfinite().all() for found in flat(layer(x)))


@other_layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    layer, x = make(name)
    half = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    for found, exact in zip(flat(half), flat(layer(x)), strict=True):
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() <= 0.05 * exact.abs().max().clamp_min(1)


@other_layers
def test_copies_and_states(name):
    layer, x = make(name)
    layer.eval()
    twin = copy.deepcopy(layer)
    assert_close(flat(twin(x)), flat(layer(x)), rtol=0, atol=0)
    for parameter in twin.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert not torch.allclose(flat(twin(x))[0], flat(layer(x))[0])
    layer.load_state_dict(twin.state_dict())
    assert_close(flat(twin(x)), flat(layer(x)), rtol=0, atol=0)


@other_layers
def test_empty_batch(name):
    layer, x = make(name)
    layer.eval()
    assert [found.shape for found in flat(layer(x[:0]))] == [(0, *full.shape[1:]) for full in flat(layer(x))]


@layers
def test_gradients_reach_all_parameters_and_the_input(name):
    layer, x = make(name)
    x.requires_grad_()
    weights = [torch.randn_like(found) for found in flat(layer(x))]
    sum((found * w).sum() for found, w in zip(flat(layer(x)), weights, strict=True)).backward()
    for key, value in [("input", x), *layer.named_parameters()]:
        assert value.grad is not None, key
        assert value.grad.isfinite().all(), key
        assert value.grad.any(), key


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@other_layers
def test_compile_with_the_default_backend(name):
    layer, x = make(name)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close(flat(torch.compile(layer.eval(), fullgraph=True)(x)), flat(layer(x)))


# Layers with a routing


@pytest.mark.parametrize("name", ["linear", "linear of any number", "conv1d", "conv2d"])
def test_reset_draws_new_weights_and_starts_the_rest_anew(name):
    layer, fresh = make(name)[0], LAYERS[name][0]()
    before = layer.weight.clone()
    layer.reset_parameters()
    assert (layer.weight != before).all()
    assert not layer.bias.any()
    fresh_parameters = dict(fresh.named_parameters())
    for key, value in layer.named_parameters():
        if key != "weight":
            assert_close(value, fresh_parameters[key], rtol=0, atol=0)


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
