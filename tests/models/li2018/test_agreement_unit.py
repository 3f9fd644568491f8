"""Agreement units: which maps they compare, and which sizes they can generate."""

import pytest
import torch
from torch.testing import assert_close

from torchcaps.functional import feature_kl, sinkhorn_divergence
from torchcaps.models.li2018 import AgreementUnit, MapShape


def test_the_divergence_is_of_the_generated_and_the_lower_maps():
    """The unit passes the generated map first, which matters for KL, and all options on."""
    lower, higher = torch.rand(5, 8, 8, 8), torch.rand(5, 6, 4, 4)
    shapes = MapShape(8, 8, 8), MapShape(6, 4, 4)
    unit = AgreementUnit(*shapes, divergence="kl", critic=False)
    assert_close(unit(lower, higher), feature_kl(unit.generate(higher), lower))
    unit = AgreementUnit(*shapes, critic=False, eps=0.2, iterations=1, cost="l2")
    assert_close(unit(lower, higher), sinkhorn_divergence(unit.generate(higher), lower, 0.2, 1, "l2"))
    assert not torch.isclose(unit(lower, higher), sinkhorn_divergence(unit.generate(higher), lower, 0.2, 2, "l2"))
    unit = AgreementUnit(*shapes, critic=False, debias=False, plan_gradient=True)
    expected = sinkhorn_divergence(unit.generate(higher), lower, debias=False, plan_gradient=True)
    gradients = (torch.autograd.grad(x, unit.generator[0].weight) for x in (unit(lower, higher), expected))
    assert_close(*gradients)


@pytest.mark.parametrize(
    ("low", "high", "kernel", "stride", "padding"),
    [
        ((8, 8), (8, 8), 3, 1, 1),
        ((8, 8), (4, 4), 3, 2, 1),
        ((7, 8), (4, 4), 3, 2, 1),
        ((1, 1), (1, 1), 3, 1, 1),
        ((9, 8), (3, 3), 3, 3, (0, 1)),
        ((7, 7), (3, 3), 3, 3, 1),
        ((12, 6), (3, 3), (5, 3), (4, 2), 1),
        ((13, 16), (4, 16), (5, 3), (4, 1), (2, 1)),
        ((8, 5), (1, 1), (9, 5), (8, 5), (1, 0)),
    ],
)
def test_sizes(low, high, kernel, stride, padding):
    unit = AgreementUnit(MapShape(4, *low), MapShape(2, *high), critic=False)
    conv, pairs = unit.generator[0], lambda x: x if isinstance(x, tuple) else (x, x)
    assert (conv.kernel_size, conv.stride, conv.padding) == (pairs(kernel), pairs(stride), pairs(padding))
    generated = conv(torch.ones(2, 2, *high))
    assert generated.shape == (2, 4, *low)
    assert generated.all()  # no position stays empty
    lower = torch.rand(3, 4, *low)
    assert unit(lower, torch.rand(3, 2, *high)).shape == ()


@pytest.mark.parametrize(("low", "high"), [((5, 5), (4, 4)), ((8, 5), (4, 4)), ((4, 4), (8, 8)), ((4, 4), (4, 5))])
def test_sizes_that_cannot_match(low, high):
    message = f"4x{low[0]}x{low[1]} cannot be generated from 2x{high[0]}x{high[1]}: each side of the higher map must be"
    with pytest.raises(ValueError, match=message):
        AgreementUnit(MapShape(4, *low), MapShape(2, *high))


def test_kl_has_no_options_of_transport():
    with pytest.raises(ValueError, match="divergence='kl' has no cost, eps, iterations, debias or plan_gradient"):
        AgreementUnit(MapShape(4, 8, 8), MapShape(8, 4, 4), divergence="kl", eps=0.1)


def test_types_must_divide_the_channels():
    message = r"8x4x4 \(3 types of capsules\) must have a multiple of 3 as channels"
    for shapes in ((MapShape(8, 4, 4, 3), MapShape(6, 2, 2, 3)), (MapShape(6, 8, 8, 3), MapShape(8, 4, 4, 3))):
        with pytest.raises(ValueError, match=message):
            AgreementUnit(*shapes)


@pytest.mark.parametrize("critic", [False, True])
def test_maps_of_other_shapes_are_one_line(critic):
    """The critic makes 2x2 of maps of 6x6 as of 8x8, so that nothing else would notice the smaller map."""
    unit = AgreementUnit(MapShape(8, 8, 8), MapShape(6, 4, 4), critic=critic)
    lower, higher = torch.rand(5, 8, 8, 8), torch.rand(5, 6, 4, 4)
    for maps, name, shape in (
        ((lower, higher[:, :, :3, :3]), "higher", "6, 4, 4"),
        ((lower, higher[:, :5]), "higher", "6, 4, 4"),
        ((lower[:, :, :7, :7], higher), "lower", "8, 8, 8"),
        ((lower[:, :7], higher), "lower", "8, 8, 8"),
    ):
        with pytest.raises(ValueError, match=rf"^expected the {name} layer's map of shape \(batch, {shape}\), got"):
            unit(*maps)
    with pytest.raises(ValueError, match="^the maps must be those of one batch, got 5 lower and 4 higher maps$"):
        unit(lower, higher[:4])
