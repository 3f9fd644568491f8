"""Convolutions of capsules: each window against a plain oracle, gradients, sequences, options and errors."""

import functools
import itertools
import math

import algorithms
import pytest
import torch
from problems import BACKENDS
from torch import Tensor
from torch.testing import assert_close

from torchcaps import (
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
)

EXACT = {"rtol": 0, "atol": 1e-10}


def on_sides(value: int | tuple[int, ...], sides: int) -> tuple[int, ...]:
    return (value,) * sides if isinstance(value, int) else value


def case_of(
    kernel_size, stride, padding, dilation, pose, bias, scores, backend, name
) -> tuple[CapsuleConv1d | CapsuleConv2d, Capsules]:
    """A layer with random parameters, and children for about three windows along each side."""
    line = isinstance(kernel_size, list)  # a list of one number stands for a sequence
    sides, (kernel_size,) = (1, kernel_size) if line else (2, [kernel_size])
    poses = (3, 2) if pose == "vector" else ((2, 3), (2, 2))
    layer = (CapsuleConv1d if line else CapsuleConv2d)(
        2,
        3,
        *poses,
        kernel_size,
        algorithms.make(name, 2),
        stride=stride,
        padding=padding,
        dilation=dilation,
        bias=bias,
        backend=backend,
    )
    algorithms.randomize(layer)
    kernel, steps, gaps = (on_sides(x, sides) for x in (kernel_size, stride, dilation))
    size = [g * (k - 1) + 2 + s + side for side, (k, s, g) in enumerate(zip(kernel, steps, gaps, strict=True))]
    gates = torch.randn(2, 2, *size)
    gates[0, 1, 0] = -math.inf
    return layer, Capsules(torch.randn(2, 2, *size, *layer.in_pose), gates if scores else None)


def windows_of(layer, children: Capsules) -> tuple[tuple[int, ...], list[tuple[Tensor, Tensor]]]:
    """Return the number of windows along each side, and the poses and scores of each, gathered place by place."""
    sides, pose = len(layer.sides), layer.in_pose
    kernel, stride, padding, dilation = (
        on_sides(x, sides) for x in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    size = children.poses.shape[2 : 2 + sides]
    grid = tuple(
        len([y for y in range(-p, n + p, s) if y + d * (k - 1) < n + p])
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    found = []
    for position in itertools.product(*map(range, grid)):
        poses = torch.zeros(2, 2, *kernel, *pose)
        scores = torch.full((2, 2, *kernel), -math.inf)
        for place in itertools.product(*map(range, kernel)):
            at = tuple(
                p * s + k * d - before
                for p, s, k, d, before in zip(position, stride, place, dilation, padding, strict=True)
            )
            if all(0 <= y < n for y, n in zip(at, size, strict=True)):
                poses[:, :, *place] = children.poses[:, :, *at]
                scores[:, :, *place] = math.inf if children.scores is None else children.scores[:, :, *at]
        last = 1 + sides
        found.append((poses.flatten(1, last), scores.flatten(1, last)))
    return grid, found


def on_a_list(layer) -> CapsuleLinear:
    """Return a linear layer that routes the children of one window, in the order of the convolution's weights."""
    children = layer.layer_shape.children
    linear = CapsuleLinear(children, 3, layer.in_pose, layer.out_pose, layer.routing, bias=layer.bias is not None)
    own = dict(layer.named_parameters())
    for key, value in linear.named_parameters():
        value.data = own[key].data.reshape(value.shape)
    return linear


# Kernel size, stride, padding, dilation, pose, bias, scores, backend, routing; a list as kernel size is of a sequence.
CASES = [
    (1, 2, (0, 2), (3, 1), "vector", True, False, "tiled", "self_routing"),
    (3, 1, 0, 1, "matrix", False, False, "native", "heinsen"),
    (3, (3, 2), (2, 1), 2, "vector", False, True, "reference", "dynamic_over_children"),
    (3, (1, 3), 1, (1, 2), "matrix", True, True, "tiled", "self_routing"),
    ((2, 3), 2, 1, 1, "matrix", True, True, "tiled", "heinsen"),
    ((2, 3), (1, 3), (2, 1), (3, 1), "vector", False, True, "native", "self_routing"),
    ((2, 3), (3, 2), 0, (1, 2), "vector", True, False, "native", "dynamic_over_children"),
    ((3, 1), 2, 0, 2, "matrix", False, True, "reference", "self_routing"),
    ((3, 1), 1, (0, 2), (1, 2), "vector", False, True, "tiled", "heinsen"),
    ((3, 1), (1, 3), (2, 1), 1, "matrix", True, True, "native", "dynamic_over_children"),
    ([1], 2, 2, 3, "matrix", True, True, "native", "dynamic_over_children"),
    ([2], 1, 1, 2, "vector", True, False, "reference", "self_routing"),
    ([2], 3, 2, 1, "matrix", False, True, "native", "heinsen"),
    ([3], 1, 2, 3, "vector", False, True, "tiled", "self_routing"),
    ([3], 2, 0, 2, "matrix", True, False, "tiled", "heinsen"),
    ([3], 3, 1, 1, "vector", True, True, "tiled", "dynamic_over_children"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_every_window_in_plain_loops(case):
    layer, children = case_of(*case)
    name = case[-1]
    grid, windows = windows_of(layer, children)
    out = layer(children, return_coefficients=True)
    kernel = layer.kernel_size
    assert out.poses.shape == (2, 3, *grid, *layer.out_pose)
    assert out.coefficients.shape == (2, *grid, 2, *kernel, 3)
    linear = on_a_list(layer)
    for position, (poses, scores) in zip(itertools.product(*map(range, grid)), windows, strict=True):
        at = (slice(None), slice(None), *position)
        if name == "self_routing" and scores.isneginf().all():  # its formula divides 0 by 0
            assert not out.poses[at].any()
            continue
        expected = algorithms.expected_of(name, linear, poses, scores)
        assert_close(out.poses[at].flatten(2), torch.tensor(expected["poses"]), **EXACT)
        for field in ("scores", "variances"):
            found = getattr(out, field)
            assert (found is None) == (expected[field] is None)
            if found is not None:
                assert found.shape == (out.poses.shape if field == "variances" else out.poses.shape[: 2 + len(grid)])
                assert_close(found[at].reshape(2, 3, -1).squeeze(2), torch.tensor(expected[field]), **EXACT)
        coefficients = out.coefficients[:, *position].flatten(1, -2)
        assert_close(coefficients, torch.tensor(expected["coefficients"]), **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel_size", [(2, 3), [3]])
def test_gradients_are_those_of_the_windows(kernel_size, backend):
    sizes = ((2, 1), (1, 2), (1, 2)) if isinstance(kernel_size, tuple) else (2, 1, 2)
    layer, children = case_of(kernel_size, *sizes, "matrix", True, True, backend, "em")
    leaves = [x.requires_grad_() for x in children[:2]]
    _, windows = windows_of(layer, children)
    linear = on_a_list(layer)
    names = [name for name, _ in layer.named_parameters()]
    shaped = {name: layer.get_parameter(name).reshape(p.shape) for name, p in linear.named_parameters()}
    alone = [torch.func.functional_call(linear, shaped, (Capsules(*window),)) for window in windows]
    out = layer(children)
    results = []
    for poses, scores in (
        (out.poses, out.scores),
        (torch.stack([x.poses for x in alone], 2), torch.stack([x.scores for x in alone], 2)),
    ):
        loss = algorithms.loss_of((poses.flatten(), scores.flatten()))
        results.append(torch.autograd.grad(loss, [*leaves, *(layer.get_parameter(name) for name in names)]))
    assert_close(results[0], results[1], rtol=1e-8, atol=1e-10)
    assert all(g.any() for g in results[0])


# Sequences


@pytest.mark.parametrize("pose", [(3, 2, 4), ((2, 3), (2, 2), (2, 1))], ids=str)
def test_sequences_feed_other_layers(pose):
    """The next layer is another convolution, or a linear layer with or without shared weights over positions."""
    one, two, three = pose
    first = CapsuleConv1d(2, 3, one, two, 2, HeinsenRouting(2))
    second = CapsuleConv1d(3, 2, two, two, 3, HeinsenRouting(2), padding=1)
    shared = CapsuleLinear(2, 4, two, three, HeinsenRouting(2), share_positions=True)
    own = CapsuleLinear(2 * 5, 4, two, three, HeinsenRouting(2))
    free = CapsuleLinear(None, 4, two, three, HeinsenRouting(2))
    algorithms.randomize(shared)
    for key, value in own.named_parameters():
        value.data = shared.get_parameter(key).data.repeat_interleave(5, 0)
    between = second(first(Capsules(torch.randn(2, 2, 6, *first.in_pose), torch.randn(2, 2, 6))))
    assert between.scores.shape == (2, 2, 5)
    expected = own(between.flatten_grid())
    for out in (own(between), shared(between)):
        assert_close(out.poses, expected.poses, **EXACT)
        assert_close(out.scores, expected.scores, **EXACT)
    assert out.pose_dims == (None if isinstance(three, int) else 2)
    assert_close(free(between).poses, free(between.flatten_grid()).poses, **EXACT)
    longer = first(torch.randn(2, 2, 11, *first.in_pose))
    assert shared(second(longer)).poses.shape == (2, 4, *own.out_pose)  # of any length


# Repr and errors


def test_repr():
    sizes = {"stride": (1, 2), "padding": 1, "dilation": (2, 2)}
    conv = CapsuleConv2d(2, 3, 4, (1, 5), (3, 2), DynamicRouting(), **sizes, bias=True, backend="tiled")
    assert conv.extra_repr() == (
        "2, 3, in_pose=4, out_pose=(1, 5), kernel_size=(3, 2), stride=(1, 2), padding=1, dilation=2, bias=True, "
        "backend='tiled'"
    )
    assert CapsuleConv1d(2, 3, 4, 5, 3, DynamicRouting()).extra_repr() == "2, 3, in_pose=4, out_pose=5, kernel_size=3"
    assert CapsuleConv1d(2, 3, 4, 5, 3, DynamicRouting(), 2, 1).extra_repr().endswith("3, stride=2, padding=1")
    assert "(routing): DynamicRouting(iterations=3)" in repr(conv)


def conv2d(kind=CapsuleConv2d, **options):
    return kind(2, 2, **{"in_pose": 4, "out_pose": 4, "kernel_size": 3, "routing": DynamicRouting()} | options)


conv1d = functools.partial(conv2d, CapsuleConv1d)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: conv2d()(torch.randn(2, 3, 5, 5, 4)), r"\(batch, 2, height, width, 4\), got \(2, 3, 5, 5, 4\)"),
        (lambda: conv1d()(torch.randn(2, 2, 5, 5, 4)), r"\(batch, 2, length, 4\), got \(2, 2, 5, 5, 4\)"),
        (lambda: conv2d()(torch.randn(2, 2, 5, 2, 4)), "width 2 is too small for kernel_size=3"),
        (
            lambda: conv2d(kernel_size=(1, 3), dilation=(1, 3), padding=(0, 1))(torch.randn(2, 2, 5, 4, 4)),
            r"width 4 is too small for kernel_size=3 \(with padding=1, dilation=3\)",
        ),
        (lambda: conv1d()(torch.randn(2, 2, 2, 4)), "length 2 is too small for kernel_size=3"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_the_smallest_grid_has_one_window():
    """A grid that is smaller by one is an error, see above."""
    assert conv2d()(torch.randn(2, 2, 3, 3, 4)).poses.shape == (2, 2, 1, 1, 4)
    dilated = conv2d(kernel_size=(1, 3), dilation=(1, 3), padding=(0, 1))
    assert dilated(torch.randn(2, 2, 5, 5, 4)).poses.shape == (2, 2, 5, 1, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_gradients_of_a_convolution_that_several_threads_share(backend):
    torch._dynamo.reset()
    layer = CapsuleConv2d(16, 8, (4, 4), (4, 4), 3, InvertedAttentionRouting(), stride=2, backend=backend)
    poses = torch.randn(4, 16, 16, 16, 4, 4, requires_grad=True)
    scores = torch.randn(4, 16, 16, 16, requires_grad=True)
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        loss = run(Capsules(poses, scores)).poses.square().sum()
        found.append(torch.autograd.grad(loss, (poses, scores, layer.weight)))
    assert_close(*found, rtol=1e-4, atol=1e-4)
