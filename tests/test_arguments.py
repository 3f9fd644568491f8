"""Wrong calls of the public API: every one must end in one line of ours, and none may compute something in silence.

The calls are made from the signatures of all public functions and constructors, so that a new argument is tested as
soon as it exists.
"""

import math
import pickle

import calls
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchcaps.arguments import (
    Count,
    CountOrZero,
    Device,
    FloatTensor,
    FloatType,
    Fraction,
    NotNegative,
    Positive,
    checked,
    kind_of,
)
from torchcaps.routing import DynamicRouting, Routing, Softmax

PUBLIC = calls.public_callables(calls.MODULES + calls.EXTRAS)
# Building blocks of new algorithms, called in every iteration by code of this library.
BLOCKS = {"iterate", "presence", "check_equilibrium", "Convergence", "register_model"}


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - BLOCKS))
def test_every_argument_of_the_public_api_is_checked(name):
    thing = PUBLIC[name]
    unchecked = set(calls.parameters(thing)) - set(calls.kinds(thing))
    assert not unchecked, f"{name} has arguments without an annotation that can be checked"
    for argument, kind in calls.kinds(thing).items():
        if argument not in calls.parameters(thing):
            continue  # *layers
        for value in calls.refused(kind):
            with pytest.raises((TypeError, ValueError)) as error:
                thing(**{argument: value})
            calls.assert_our_error(error.value, f"{argument} must be ")


nan, inf = math.nan, math.inf
FITS_AND_DOES_NOT = [
    (Count, [1, 3, np.int64(2)], [0, -1, 2.5, "3", True, None, nan, inf, (3, 3), torch.tensor(3), 3.0]),
    (Count | None, [None, 1], [0, "3", False]),
    (CountOrZero, [0, 2], [-1, 0.0, None, False]),
    (float, [1, -2.5, np.float32(1)], [nan, inf, -inf, "1", True, None, 1j, torch.tensor(1.0)]),
    (Positive, [1e-9, 1], [0, -1, nan, inf, "1", True]),
    (NotNegative, [0, 1.5], [-0.1, nan, inf]),
    (Fraction, [0, 0.5, 1], [-0.1, 1.1, nan, "0.5"]),
    (bool, [True, False], ["no", 0, 1, None, np.bool_(True)]),
    (str, ["a"], [3, None, b"a"]),
    (Softmax, ["parents", "children"], ["Parents", "", None, 0, ["parents"]]),
    (Softmax | None, ["parents", None], ["none"]),
    (tuple[Count, Count], [(1, 2), [3, 4]], [(1,), (1, 2, 3), (0, 1), 3, "12", (1, "2"), torch.Size([1])]),
    (tuple[Count, ...], [(), (1,), [1, 2]], [(1, 0), 3, (2.5,), "1"]),
    (Count | tuple[Count, Count], [3, (1, 2)], [0, (0, 1), (1, 2, 3), 2.5]),
    (FloatType, [torch.float32, torch.bfloat16], [torch.int64, torch.bool, torch.complex64, "float32", float]),
    (Device | None, ["cpu", "cuda:1", torch.device("meta"), None], ["cup", 0, "", True]),
    (FloatTensor, [torch.zeros(1)], [torch.zeros(1, dtype=torch.long), torch.zeros(1) > 0, [1.0], np.zeros(1)]),
    (Routing, [DynamicRouting()], [DynamicRouting, "dynamic", None, nn.Identity()]),
]


@pytest.mark.parametrize(("annotation", "fits", "does_not"), FITS_AND_DOES_NOT, ids=lambda x: str(x)[:40])
def test_annotations(annotation, fits, does_not):
    kind = kind_of(annotation)
    assert [x for x in fits if not kind.fits(x)] == []
    assert [x for x in does_not if kind.fits(x)] == []


@checked
def layer(features: Count, *sizes: CountOrZero, scale: Positive | None = None, routing: Routing | None = None) -> str:
    """A docstring."""
    return f"{features} {sizes} {scale}"


def test_messages():
    assert layer(2, 0, 1, scale=0.5) == "2 (0, 1) 0.5"
    for call, error, message in [
        (lambda: layer(0), ValueError, "features must be an int of at least 1, got 0"),
        (lambda: layer("3"), TypeError, "features must be an int of at least 1, got '3' (str)"),
        (lambda: layer(features=2.5), TypeError, "features must be an int of at least 1, got 2.5 (float)"),
        (lambda: layer(1, 2, -1), ValueError, "sizes must be an int of at least 0, got -1"),
        (lambda: layer(1, scale=nan), ValueError, "scale must be a finite number above 0, or None, got nan"),
        (
            lambda: layer(torch.zeros(2, 3)),
            TypeError,
            "features must be an int of at least 1, got a tensor of shape (2, 3) and type torch.float32",
        ),
        (
            lambda: layer(1, routing=DynamicRouting),
            TypeError,
            "routing must be a Routing, or None, got the class DynamicRouting: create an instance, DynamicRouting(...)",
        ),
    ]:
        with pytest.raises(error) as found:
            call()
        assert str(found.value) == message
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'features'"):
        layer()
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        layer(1, size=2)


def test_a_checked_function_is_the_same_otherwise():
    assert layer.__doc__ == "A docstring."
    assert pickle.loads(pickle.dumps(layer)) is layer
    compiled = torch.compile(lambda x: squash_all(x, 1), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).shape == (2,)


@checked
def squash_all(x: Tensor, times: Count) -> Tensor:
    return x * times
