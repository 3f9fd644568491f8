"""A child with score -inf changes nothing in networks of several layers, and in stacks of any schedule.

`test_algorithms.py` tests single layers on all backends.
"""

import math
from collections.abc import Callable

import pytest
import torch
from algorithms import ALGORITHMS, loss_of, make, randomize
from problems import BACKENDS
from torch import Tensor
from torch.testing import assert_close

from torchcaps import (
    CapsuleLinear,
    Capsules,
    CapsuleStack,
    DynamicRouting,
    InvertedAttentionRouting,
    VBRouting,
    create_model,
    use_backend,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}
PRESENT = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1, 0, 0, 1]]).bool()
CHILDREN, PADDED = 4, 9


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_padding_is_nothing(
    run: Callable[..., Capsules], children: list[Tensor], padding: list[Tensor], parameters: list[Tensor], **tolerance
) -> None:
    """Assert that `run` gives the same results and gradients for children alone and among padding, and that padding
    gets no gradient."""
    results = []
    padded = [x.clone() for x in padding]
    for x, own in zip(padded, children, strict=True):
        x[PRESENT] = own.flatten(0, 1)
    for inputs in (children, padded):
        torch.manual_seed(1)  # for random starts
        out = run(*(x.requires_grad_() for x in inputs))
        fields = [x for x in out[:3] if x is not None]
        leaves = [*inputs, *parameters]
        results.append(
            (fields, torch.autograd.grad(loss_of(fields), leaves, allow_unused=True, materialize_grads=True))
        )
    (expected, wanted), (found, grads) = results
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, **tolerance)
    count = len(children)
    assert wanted[0].any()
    for x, y in zip(grads[:count], wanted[:count], strict=True):
        assert_close(x[PRESENT].view_as(y), y, **tolerance)
        assert not x[~PRESENT].any()
    for x, y in zip(grads[count:], wanted[count:], strict=True):
        assert_close(x, y, **tolerance)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_networks(name):
    """Masked inputs change nothing in a network of two layers, even if they are NaN."""
    sizes = {"classes": 3, "layers": 2, "width": 5, "features": 4, "pose": 3, "parts": 4}
    model = create_model("heinsen_sst", routing=make(name), **sizes).double()
    torch.manual_seed(1)  # whatever the first weights took; with 0 gradients of EM routing reach 300
    randomize(model)

    def run(embeddings: Tensor) -> Capsules:
        prediction = model(embeddings, PRESENT if embeddings.shape[1] == PADDED else None)
        return prediction.capsules._replace(scores=prediction.scores)

    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e4, math.nan], dtype=torch.float64).expand(2, PADDED, 2, 5)
    backend = BACKENDS[list(ALGORITHMS).index(name) % len(BACKENDS)]
    with use_backend(backend):
        assert_padding_is_nothing(run, [randn(2, CHILDREN, 2, 5)], [garbage], list(model.parameters()), **EXACT)


def stack_of(schedule, routings) -> CapsuleStack:
    sizes = (None, 3)
    layers = [
        CapsuleLinear(n, 3, (2, 2), (2, 2), routing, bias=True) for n, routing in zip(sizes, routings, strict=True)
    ]
    return randomize(CapsuleStack(*layers, schedule=schedule).double())


def assert_padding_is_nothing_to(stack: CapsuleStack, **tolerance) -> None:
    def run(poses: Tensor, scores: Tensor) -> Capsules:
        return stack(Capsules(poses, scores))

    nobody = torch.full((2, PADDED), -math.inf, dtype=torch.float64)
    children = [randn(2, CHILDREN, 2, 2), randn(2, CHILDREN)]
    padding = [1e4 * randn(2, PADDED, 2, 2), nobody]
    assert_padding_is_nothing(run, children, padding, list(stack.parameters()), **tolerance)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not isinstance(make(name), VBRouting)])
def test_concurrent_stacks(name):
    assert_padding_is_nothing_to(stack_of("concurrent", [make(name), make(name)]), **EXACT)


@pytest.mark.parametrize("make_one", [DynamicRouting, InvertedAttentionRouting])
@pytest.mark.parametrize("start", ["random", "learned"])
def test_starts(make_one, start):
    routings = [make_one(start=start), make_one(start=start)]
    assert_padding_is_nothing_to(stack_of("sequential", routings), **EXACT)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_sample_of_padding_alone_is_nothing_to_the_others(name):
    layer = randomize(CapsuleLinear(None, 3, (2, 2), (2, 2), make(name), bias=True).double())
    poses, scores = randn(3, CHILDREN, 2, 2), randn(3, CHILDREN)
    scores[0] = -math.inf
    results = []
    for garbage in (0.0, 1e4):
        poses[0] = garbage * randn(CHILDREN, 2, 2)
        x = poses.clone().requires_grad_()
        out = layer(Capsules(x, scores))
        results.append([*out[:3], *torch.autograd.grad(loss_of(y for y in out[:3] if y is not None), x)])
        assert not results[-1][-1][0].any()
    for first, second in zip(*results, strict=True):
        if first is not None:
            assert first.isfinite().all()
            assert_close(second, first, **EXACT)
