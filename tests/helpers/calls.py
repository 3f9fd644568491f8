"""Public functions and constructors, and values that their arguments refuse, for the tests of wrong calls."""

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import torchcaps
from torchcaps import Capsules, DynamicRouting, Prediction
from torchcaps.arguments import Kind, kinds_of
from torchcaps.models import registry

PACKAGE = Path(torchcaps.__file__).parent
MODULES = ("torchcaps", "torchcaps.nn", "torchcaps.routing", "torchcaps.functional", "torchcaps.models")
EXTRAS = ("torchcaps.data", "torchcaps.explain", "torchcaps.training")

# Values of many types and ranges. Each argument is given those that its annotation does not allow.
ODD: list[Any] = [
    None, True, "no", "3", "", "relu", b"x", 0, -1, 1.5, 2.5, 1e400, -1e400, float("nan"), 1j, 10**30, (), (3, 3),
    (1, 0), (2.5, 2), (1, 2, 3, 4, 5, 6, 7), [], ["a"], {}, {1}, object(), int, nn.ReLU, DynamicRouting,
    nn.Linear(1, 1), torch.tensor(3), torch.tensor(2.5), torch.zeros(2, 2), np.float64("nan"), np.bool_(True),
    torch.int64, torch.complex64, "cup:9", Prediction(torch.zeros(1, 1)), Capsules(torch.zeros(1, 1, 1)), lambda: None,
    slice(3), ...
]  # fmt: skip


def public_callables(modules: tuple[str, ...] = MODULES) -> dict[str, Callable[..., Any]]:
    """All public functions and constructors by name. Plain tuples and abstract classes are left out."""
    found: dict[str, Callable[..., Any]] = {}
    for module in map(importlib.import_module, modules):
        for name in module.__all__:
            thing = getattr(module, name)
            is_class = isinstance(thing, type) and not issubclass(thing, (tuple, Exception))
            if inspect.isfunction(thing) or (is_class and not inspect.isabstract(thing)):
                found[name] = thing
    if "torchcaps.models" in modules:
        found |= {name: registry._builders[name] for name in registry.list_models() if "mine" not in name}
    return found


def constructor(thing: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a call runs: `__init__` of a class."""
    return thing.__init__ if isinstance(thing, type) else thing


def parameters(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a callable."""
    found = inspect.signature(thing).parameters.values()
    return {p.name: p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def kinds(thing: Callable[..., Any]) -> dict[str, Kind]:
    """What the parameters allow, by name."""
    return dict(kinds_of(constructor(thing)))


def refused(kind: Kind) -> Iterator[Any]:
    """Odd values that an annotation does not allow."""
    for value in ODD:
        if not kind.fits(value):
            yield value


def assert_our_error(error: BaseException, mentions: str = "") -> None:
    """Assert that an error is one line of this library and was raised by its code, not inside PyTorch or Python."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    inside = Path(frame.filename).is_relative_to(PACKAGE)
    assert inside, f"raised in {frame.filename}, line {frame.lineno}: {type(error).__name__}: {error}"
    assert isinstance(error, (TypeError, ValueError, RuntimeError, ImportError)), repr(error)
    assert "\n" not in str(error), str(error)
    assert mentions in str(error), f"{mentions} is not named: {error}"
