"""ReLU and squash as one function, against the two operators one after the other."""

import pytest
import torch

from torchcaps.functional import squash
from torchcaps.models.li2018.relu_squash import relu_squash


def reference(x: torch.Tensor, features: int) -> torch.Tensor:
    return squash(x.relu().unflatten(1, (-1, features)), dim=2).flatten(1, 2)


def maps(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


@pytest.mark.parametrize("features", [1, 2, 6])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_value_and_gradient(features, scale):
    x, like = maps(2, 6, 3, 4, scale=scale), maps(2, 6, 3, 4, scale=scale)
    weights = torch.randn(2, 6, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    actual, expected = relu_squash(x, features), reference(like, features)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, like.grad, rtol=1e-9, atol=1e-15)


def test_by_hand():
    # |(3, 4)| = 5: times 5 / 26. The second capsule loses its negative entry: |(0, 1)| = 1, times 1 / 2.
    x = torch.tensor([3.0, 4.0, -7.0, 1.0]).view(1, 4, 1, 1)
    torch.testing.assert_close(relu_squash(x, 2).flatten(), torch.tensor([15 / 26, 20 / 26, 0.0, 0.5]))


def test_capsules_of_zeros_stay_zero_and_have_no_gradient():
    x = torch.tensor([-1.0, -2.0, 0.0, 0.0], dtype=torch.float32).view(1, 4, 1, 1).requires_grad_()
    y = relu_squash(x, 2)
    y.sum().backward()
    assert (y == 0).all()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e-18, 1e-12, 1e-6, 1e6, 1e15])
def test_extreme_lengths_stay_finite(size):
    x = torch.full((1, 4, 1, 1), size, dtype=torch.float32).requires_grad_()
    y = relu_squash(x, 4)
    y.sum().backward()
    wide = torch.full((1, 4, 1, 1), size, dtype=torch.float64).requires_grad_()
    expected = reference(wide, 4)
    expected.sum().backward()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_the_reference(dtype):
    x = maps(4, 8, 5, 5, dtype=dtype, scale=3.0)
    exact = reference(x.detach().double(), 4)
    error, allowed = ((f(x, 4).double() - exact).abs().max() for f in (relu_squash, reference))
    assert relu_squash(x, 4).dtype == dtype
    assert error <= 2 * allowed
    weights = maps(4, 8, 5, 5, dtype=dtype).detach()
    wide = x.detach().double().requires_grad_()
    (reference(wide, 4) * weights.double()).sum().backward()
    errors = []
    for f in (relu_squash, reference):
        (gradient,) = torch.autograd.grad((f(x, 4) * weights).sum(), x)
        errors.append((gradient.double() - wide.grad).abs().max())
    assert errors[0] <= 2 * errors[1]


def test_an_empty_batch():
    x = maps(0, 6, 3, 4)
    relu_squash(x, 2).sum().backward()
    assert x.grad.shape == (0, 6, 3, 4)
