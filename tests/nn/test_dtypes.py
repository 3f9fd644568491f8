"""Layers compute in the precision that they are given, whatever PyTorch's default is: here it is float64."""

import inspect

import algorithms
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torchcaps
from torchcaps import (
    CapsuleBlock2d,
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleFC,
    CapsuleHead,
    CapsuleLinear,
    CapsuleMap,
    CapsuleRegressor,
    Capsules,
    CapsuleShared,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    FeedbackAgreement,
    HeinsenRouting,
    MarginLoss,
    MaskedDecoder,
    PrimaryCapsules,
    RoutingPool2d,
    SelfRouting,
    SlotAttention,
    SpreadLoss,
    VBRouting,
)
from torchcaps.functional import feature_kl, sinkhorn_divergence, squash
from torchcaps.models.li2018.encapsulated import BNReLUSquash
from torchcaps.nn.head import FeatureCapsules

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int) -> Tensor:
    return torch.rand(shape)


def capsules(*shape: int) -> Capsules:
    """Return children that have a score each."""
    return Capsules(torch.randn(*shape, 4), torch.randn(shape))


ROUTINGS = {name: algorithm.make for name, algorithm in algorithms.ALGORITHMS.items()}
# Each layer that takes device and dtype, with every option that adds a tensor; and its inputs, made anew.
LAYERS = {
    "PrimaryCapsules": (
        lambda **to: PrimaryCapsules(3, 2, 4, 3, normalization=nn.LayerNorm(4), scores=True, **to),
        lambda: [random(2, 3, 5, 5)],
    ),
    "PrimaryCapsules, squash": (lambda **to: PrimaryCapsules(3, 2, 4, **to), lambda: [random(2, 3, 5, 5)]),
    **{
        f"CapsuleLinear, {name}": (
            lambda make=make, **to: CapsuleLinear(6, 3, 4, 5, make(), bias=True, **to),
            lambda: [capsules(4, 6)],
        )
        for name, make in ROUTINGS.items()
    },
    "CapsuleLinear, any number": (
        lambda **to: CapsuleLinear(None, None, 4, 5, HeinsenRouting(), bias=True, **to),
        lambda: [capsules(4, 6)],
    ),
    "CapsuleLinear, coordinates": (
        lambda **to: CapsuleLinear(2, 3, (4, 4), (4, 4), EMRouting(), share_positions=True, coordinates=True, **to),
        lambda: [Capsules(torch.randn(4, 2, 3, 3, 4, 4), torch.randn(4, 2, 3, 3))],
    ),
    "CapsuleConv1d": (
        lambda **to: CapsuleConv1d(2, 3, 4, 5, 3, SelfRouting(), padding=1, bias=True, **to),
        lambda: [capsules(2, 2, 5)],
    ),
    "CapsuleConv2d": (
        lambda **to: CapsuleConv2d(2, 3, 4, 5, 3, VBRouting(), padding=1, bias=True, **to),
        lambda: [capsules(2, 2, 5, 5)],
    ),
    "CapsuleConv2d, no scores": (
        lambda **to: CapsuleConv2d(2, 3, 4, 5, 3, DynamicRouting(), padding=1, **to),
        lambda: [torch.randn(2, 2, 5, 5, 4)],
    ),
    "CapsuleMap": (
        lambda **to: CapsuleMap(2, 3, 4, 5, 3, EMRouting(), padding=1, **to),
        lambda: [capsules(2, 2, 5, 5)],
    ),
    "CapsuleShared": (lambda **to: CapsuleShared(6, 3, 4, HeinsenRouting(), **to), lambda: [capsules(2, 6)]),
    **{
        f"CapsuleShared, {start} slots": (
            lambda start=start, **to: CapsuleShared(None, 3, 4, SlotAttention(start=start), **to),
            lambda: [capsules(2, 6)],
        )
        for start in ("random", "learned")
    },
    "CapsuleStack": (
        lambda **to: CapsuleStack(
            CapsuleConv2d(2, 3, 4, 4, 2, EMRouting(), **to), CapsuleLinear(None, 3, 4, 5, EMRouting(), **to)
        ),
        lambda: [capsules(2, 2, 3, 3)],
    ),
    "CapsuleBlock2d": (
        lambda **to: CapsuleBlock2d(2, 4, 3, stride=2, skip=True, **to),
        lambda: [capsules(2, 2, 6, 6)],
    ),
    "CapsuleBlock2d, one convolution": (
        lambda **to: CapsuleBlock2d(2, 4, 3, coefficients=None, **to),
        lambda: [capsules(2, 2, 6, 6)],
    ),
    "BNReLUSquash": (lambda **to: BNReLUSquash(2, 4, **to), lambda: [torch.randn(2, 8, 3, 3)]),
    "CapsuleFC": (lambda **to: CapsuleFC(6, 3, 4, **to), lambda: [capsules(2, 6)]),
    "RoutingPool2d": (
        lambda **to: RoutingPool2d(4, kernel_size=3, padding=1, learn_sharpness=True, activation=squash, **to),
        lambda: [torch.randn(2, 8, 6, 6)],
    ),
    "RoutingPool2d, dynamic": (
        lambda **to: RoutingPool2d(4, routing=DynamicRouting(softmax="children", learn_bias=True), **to),
        lambda: [torch.randn(2, 8, 6, 6)],
    ),
    "MaskedDecoder": (
        lambda **to: MaskedDecoder(3, 4, (1, 6, 6), **to),
        lambda: [capsules(2, 3), torch.tensor([0, 2])],
    ),
    **{
        f"CapsuleHead, {type(routing).__name__}": (
            lambda routing=routing, **to: CapsuleHead(8, 3, routing, types=2, pose=4, parts=3, **to),
            lambda: [random(2, 8, 3, 3)],
        )
        for routing in (DynamicRouting(), HeinsenRouting(), SlotAttention(start="learned"))
    },
    "PrimaryCapsules, volumes": (
        lambda **to: PrimaryCapsules(3, 2, 4, 2, dims=3, **to),
        lambda: [random(2, 3, 2, 3, 4)],
    ),
    "CapsuleRegressor": (lambda **to: CapsuleRegressor(8, 3, types=2, pose=4, **to), lambda: [random(2, 8, 3, 3)]),
    "CapsuleRegressor, signals": (
        lambda **to: CapsuleRegressor(8, 3, EMRouting(), types=2, pose=4, dims=1, **to),
        lambda: [random(2, 8, 5)],
    ),
}


def given_to(x, dtype: torch.dtype):
    """Return an input in a precision."""
    if isinstance(x, Capsules):
        return Capsules(x.poses.to(dtype), x.scores.to(dtype))
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def floats(values) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]


def results_of(layer: nn.Module, inputs: list) -> list[Tensor]:
    """Return what a layer gives; a head also as a Prediction, and its first capsules."""
    options = {"out_capsules": 3} if getattr(layer, "out_capsules", 3) is None else {}
    more = [layer.predict(*inputs), layer.primary_capsules(*inputs)] if isinstance(layer, FeatureCapsules) else []
    if "return_coefficients" in inspect.signature(layer.forward).parameters:
        more.append(layer(*inputs, return_coefficients=True, **options))
    return floats([layer(*inputs, **options), more])


def test_every_layer_is_here():
    takes = {
        name
        for module in (torchcaps.nn, torchcaps.models)
        for name, x in vars(module).items()
        if inspect.isclass(x) and issubclass(x, nn.Module) and "dtype" in inspect.signature(x).parameters
    }
    assert takes == {name.partition(",")[0] for name in LAYERS} - {"BNReLUSquash", "CapsuleStack"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_precision_that_it_is_given(name, dtype):
    make, inputs = LAYERS[name]
    layer = make(dtype=dtype)
    assert {x.dtype for x in floats(layer.state_dict())} <= {dtype}
    for training in (True, False):
        results = results_of(layer.train(training), [given_to(x, dtype) for x in inputs()])
        # Scores, coefficients and logits of values in half precision are float32.
        assert results[0].dtype == dtype
        assert {x.dtype for x in results} <= {dtype, torch.float32}
        assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_values_yet(name):
    layer = LAYERS[name][0](device="meta", dtype=torch.bfloat16)
    assert {(x.is_meta, x.dtype) for x in floats(layer.state_dict())} <= {(True, torch.bfloat16)}
    assert all(x.is_meta for x in layer.state_dict().values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_divergences(dtype):
    scores, labels = torch.randn(4, 3, dtype=dtype), torch.tensor([0, 2, 1, 1])
    maps = torch.rand(2, 4, 3, 2, 2, dtype=dtype).unbind()
    results = [MarginLoss()(scores.sigmoid(), labels), SpreadLoss()(scores.sigmoid(), labels)]
    results += [feature_kl(*maps), sinkhorn_divergence(*maps)]
    assert all(x.dtype in (dtype, torch.float32) for x in results), [x.dtype for x in results]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feedback_has_the_precision_of_its_network(dtype):
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)).to(dtype)
    feedback = FeedbackAgreement(network, [("0", "1")], (3, 8, 8))
    assert {x.dtype for x in floats(feedback.state_dict())} == {dtype}
    for training in (True, False):
        prediction, divergence = feedback.train(training)(torch.rand(4, 3, 8, 8, dtype=dtype))
        assert prediction.dtype == dtype
        assert divergence.dtype == torch.float32
