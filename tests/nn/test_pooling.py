"""Pooling by routing against plain loops, with and without windows; gradients, compiling and errors."""

import oracles
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchcaps import (
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RoutingPool2d,
    SelfRouting,
    VectorNormRouting,
    use_backend,
)
from torchcaps.functional import squash


def test_routes_each_group_of_channels():
    pool = RoutingPool2d(features=3, sharpness=2.0, iterations=2)
    x = torch.randn(2, 6, 2, 3)
    out, coefficients = pool(x, return_coefficients=True)
    assert out.shape == (2, 6, 1, 1)
    assert coefficients.shape == (2, 2, 2, 3)
    assert_close(pool(x), out)
    for group in range(2):
        votes = x[:, 3 * group : 3 * group + 3].flatten(2).transpose(1, 2).unsqueeze(2).tolist()
        expected = oracles.vector_norm_routing(votes, 2, 2.0)
        assert_close(out[:, 3 * group : 3 * group + 3, 0, 0], torch.tensor(expected["poses"]).squeeze(1))
        assert_close(coefficients[:, group].flatten(1), torch.tensor(expected["coefficients"]).squeeze(2))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, None, 0), (3, 2, 1), (3, 1, 0), (2, 3, 1), (1, 1, 0)])
def test_routes_each_window(kernel, stride, padding):
    pool = RoutingPool2d(2, 3.0, 1, kernel, stride, padding)
    x = torch.randn(2, 4, 5, 6)
    out, coefficients = pool(x, return_coefficients=True)
    assert out.shape == nn.AvgPool2d(kernel, stride, padding)(x).shape
    assert pool(x[:0]).shape == (0, *out.shape[1:])
    assert coefficients.shape == (2, 2, *out.shape[2:], kernel, kernel)
    for b in range(2):
        for group in range(2):
            for row in range(out.shape[2]):
                for column in range(out.shape[3]):
                    top, left = row * pool.stride - padding, column * pool.stride - padding
                    votes, expected_places = [], []
                    for y in range(top, top + kernel):
                        for z in range(left, left + kernel):
                            if 0 <= y < 5 and 0 <= z < 6:
                                votes.append([x[b, 2 * group : 2 * group + 2, y, z].tolist()])
                                expected_places.append((y - top, z - left))
                    expected = oracles.vector_norm_routing([votes], 1, 3.0)
                    pooled = out[b, 2 * group : 2 * group + 2, row, column]
                    assert_close(pooled, torch.tensor(expected["poses"][0][0]))
                    window = torch.zeros(kernel, kernel)
                    for place, (share,) in zip(expected_places, expected["coefficients"][0], strict=True):
                        window[place] = share
                    assert_close(coefficients[b, group, row, column], window)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_sharpness_zero_is_average_pooling(iterations):
    x = torch.randn(2, 8, 5, 4, requires_grad=True)
    pairs = [
        (RoutingPool2d(4, 0.0, iterations), nn.AdaptiveAvgPool2d(1)),
        (RoutingPool2d(4, 0.0, iterations, 2), nn.AvgPool2d(2)),
        (RoutingPool2d(4, 0.0, iterations, 3, 2, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    ]
    for pool, average in pairs:
        out, expected = pool(x), average(x)
        assert_close(out, expected, rtol=0, atol=1e-15)
        weights = torch.randn_like(expected)
        grad_pool, grad_average = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (out, expected))
        assert_close(grad_pool, grad_average, rtol=0, atol=1e-15)


@pytest.mark.parametrize("window", [{}, {"kernel_size": 3, "stride": 1, "padding": 1}], ids=str)
def test_activation(window):
    x = torch.randn(2, 4, 3, 4)
    plain, squashed = (RoutingPool2d(2, 2.0, activation=a, **window)(x) for a in (None, squash))
    assert_close(squashed, squash(plain.unflatten(1, (2, 2)), dim=2).flatten(1, 2))


def test_learned_sharpness():
    pool = RoutingPool2d(2, 3.0, learn_sharpness=True)
    (parameter,) = pool.parameters()
    assert parameter.item() == 3.0
    x = torch.randn(2, 4, 3, 3)
    assert_close(pool(x), RoutingPool2d(2, 3.0)(x))
    pool(x).square().sum().backward()
    step = 1e-6
    below, above = (float(RoutingPool2d(2, 3.0 + s)(x).square().sum()) for s in (-step, step))
    assert parameter.grad.item() == pytest.approx((above - below) / (2 * step), rel=1e-5)
    pool.load_state_dict({"routing.learned_sharpness": torch.tensor(0.0)})
    assert_close(pool(x), nn.AdaptiveAvgPool2d(1)(x))
    assert not list(RoutingPool2d(2, 3.0).parameters())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learn_sharpness": True, "activation": squash},
        {"kernel_size": 2, "activation": squash},
        {"kernel_size": 3, "stride": 2, "padding": 1, "learn_sharpness": True},
    ],
    ids=" ".join,
)
def test_reference_and_memory_format(options, channels_last):
    pool = RoutingPool2d(4, 5.0, 2, **options)
    x = torch.randn(2, 8, 6, 5)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    with use_backend("reference"):
        expected = pool(x)
    out = pool(x)
    assert_close(out, expected)
    weights, leaves = torch.randn_like(out), [x, *pool.parameters()]
    assert_close(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (out, expected)))


def test_takes_other_routings_over_children():
    x = torch.randn(2, 4, 3, 3)
    out = RoutingPool2d(features=4, routing=DynamicRouting(softmax="children"))(x)
    expected = DynamicRouting(softmax="children")(x.flatten(2).transpose(1, 2).unsqueeze(2))
    assert_close(out.flatten(), expected.poses.flatten())


def test_gradient_of_the_last_iteration_only():
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    routing = VectorNormRouting(2, 3.0, gradient="last")
    out, unrolled = RoutingPool2d(4, routing=routing)(x), RoutingPool2d(4, 3.0, 2)(x)
    assert_close(out, unrolled)
    votes = x.flatten(2).transpose(1, 2).unsqueeze(2)
    expected = routing(votes).poses
    pool_grad, function_grad, unrolled_grad = (
        torch.autograd.grad((y.flatten() * torch.arange(8)).sum(), x)[0] for y in (out, expected, unrolled)
    )
    assert_close(pool_grad, function_grad)
    assert not torch.allclose(pool_grad, unrolled_grad)


@pytest.mark.parametrize(
    "routing", [DynamicRouting(), InvertedAttentionRouting(), EMRouting(), HeinsenRouting(), SelfRouting()], ids=str
)
def test_refuses_a_softmax_over_one_parent(routing):
    with pytest.raises(ValueError, match="one parent per group.*VectorNormRouting"):
        RoutingPool2d(features=4, routing=routing)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoutingPool2d(4, 5.0, routing=VectorNormRouting()), "give sharpness, iterations"),
        (lambda: RoutingPool2d(4, iterations=0, learn_sharpness=True), "learn_sharpness=True needs"),
        (lambda: RoutingPool2d(2, kernel_size=3)(torch.randn(1, 2, 2, 5)), "a map of 2x5 has no window"),
        (
            lambda: VectorNormRouting(learn_sharpness=True)(torch.randn(1, 2, 1, 3)),
            "has no learned_sharpness yet: give it to a capsule layer",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        make()
