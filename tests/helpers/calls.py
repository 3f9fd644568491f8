"""Public functions and constructors, and values and inputs that they refuse, for the tests of wrong calls."""

import importlib
import inspect
import traceback
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import torchcaps
from torchcaps import (
    CapsNet,
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
    DynamicRouting,
    HeinsenVectorRouting,
    Prediction,
    PrimaryCapsules,
    RoutingPool2d,
    SlotAttention,
    models,
)
from torchcaps.models import convnet_mnist, registry
from torchcaps.utils.arguments import Kind, kinds_of

PACKAGE = Path(torchcaps.__file__).parent
MODULES = ("torchcaps", "torchcaps.nn", "torchcaps.routing", "torchcaps.functional", "torchcaps.models")
EXTRAS = ("torchcaps.data", "torchcaps.explain", "torchcaps.deploy", "torchcaps.training")

# Values of many types and ranges. Each argument is given those that its annotation does not allow.
ODD: list[Any] = [
    None, True, "no", "3", "", "relu", b"x", 0, -1, 1.5, 2.5, 1e400, -1e400, float("nan"), 1j, 10**30, (), (3, 3),
    (1, 0), (2.5, 2), (1, 2, 3, 4, 5, 6, 7), [], ["a"], {}, {1}, object(), int, nn.ReLU, DynamicRouting,
    nn.Linear(1, 1), torch.tensor(3), torch.tensor(2.5), torch.zeros(2, 2), np.float64("nan"), np.bool_(True),
    torch.int64, torch.complex64, "cup:9", Prediction(torch.zeros(1, 1)), Capsules(torch.zeros(1, 1, 1)), lambda: None,
    slice(3), ...
]  # fmt: skip


def public_callables(modules: tuple[str, ...] = MODULES) -> dict[str, Callable[..., Any]]:
    """All public functions and constructors by name, without those of tuples, dataclasses and abstract classes."""
    found: dict[str, Callable[..., Any]] = {}
    for module in map(importlib.import_module, modules):
        for name in module.__all__:
            thing = getattr(module, name)
            is_class = isinstance(thing, type) and not issubclass(thing, (tuple, Exception)) and not is_dataclass(thing)
            if inspect.isfunction(thing) or (is_class and not inspect.isabstract(thing)):
                found[name] = thing
    if "torchcaps.models" in modules:
        found |= {name: registry._builders[name] for name in registry.list_models() if "mine" not in name}
    return found


def parameters(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a callable."""
    found = inspect.signature(thing).parameters.values()
    return {p.name: p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def kinds(thing: Callable[..., Any]) -> dict[str, Kind]:
    """What the parameters allow, by name."""
    return kinds_of(thing.__init__ if isinstance(thing, type) else thing)


def assert_our_error(error: BaseException, mentions: str = "") -> None:
    """Assert that an error is one line of this library and was raised by its code, not inside PyTorch or Python."""
    if "Expected more than 1 value per channel when training" in str(error):
        return  # PyTorch's own line about batch normalization of a single value, which says what to do
    frame = traceback.extract_tb(error.__traceback__)[-1]
    inside = Path(frame.filename).is_relative_to(PACKAGE)
    inside = inside and (frame.line or "").startswith("raise ")
    assert inside, f"raised in {frame.filename}, line {frame.lineno}: {type(error).__name__}: {error}"
    assert isinstance(error, (TypeError, ValueError, RuntimeError, ImportError)), repr(error)
    assert "\n" not in str(error), str(error)
    assert mentions in str(error), f"{mentions} is not named: {error}"


# ------------------------------------------------------------ calls of layers and networks


class Case(NamedTuple):
    """A layer, network or function: what builds it, the arguments without a default, and its first input."""

    build: Callable[..., Any]
    arguments: dict[str, Any]
    shape: tuple[int, ...]


CASES: dict[str, Case] = {
    "CapsuleLinear": Case(CapsuleLinear, {"in_capsules": 3, "out_capsules": 2, "in_pose": 4, "out_pose": 2}, (2, 3, 4)),
    "CapsuleLinear, matrices": Case(
        CapsuleLinear, {"in_capsules": None, "out_capsules": None, "in_pose": (2, 2), "out_pose": (2, 3)}, (2, 3, 2, 2)
    ),
    "CapsuleShared": Case(
        CapsuleShared, {"in_capsules": None, "out_capsules": 2, "in_pose": 4, "routing": SlotAttention(2)}, (2, 3, 4)
    ),
    "CapsuleShared, vectors": Case(
        CapsuleShared,
        {"in_capsules": 3, "out_capsules": 2, "in_pose": (2, 2), "out_pose": (2, 3), "routing": HeinsenVectorRouting()},
        (2, 3, 2, 2),
    ),
    "CapsuleConv2d": Case(
        CapsuleConv2d, {"in_capsules": 2, "out_capsules": 2, "in_pose": 4, "out_pose": 2, "kernel_size": 2},
        (2, 2, 3, 3, 4),
    ),
    "CapsuleConv1d": Case(
        CapsuleConv1d, {"in_capsules": 2, "out_capsules": 2, "in_pose": 4, "out_pose": 2, "kernel_size": 2},
        (2, 2, 4, 4),
    ),
    "CapsuleMap": Case(
        CapsuleMap,
        {"in_capsules": 2, "out_capsules": 2, "in_pose": 4, "out_pose": 2, "kernel_size": 2,
         "routing": DynamicRouting()},
        (2, 2, 3, 3, 4),
    ),
    "CapsuleFC": Case(CapsuleFC, {"in_capsules": 3, "out_capsules": 2, "pose": 4}, (2, 3, 4)),
    "CapsuleBlock2d": Case(CapsuleBlock2d, {"capsules": 2, "in_pose": 4, "out_pose": 2}, (2, 2, 4, 4, 4)),
    "PrimaryCapsules": Case(PrimaryCapsules, {"in_channels": 2, "out_capsules": 2, "out_pose": 4}, (2, 2, 4, 4)),
    "CapsuleHead": Case(CapsuleHead, {"in_features": 2, "classes": 2, "types": 2, "pose": 4}, (2, 2, 4, 4)),
    "CapsuleHead, tokens": Case(
        CapsuleHead, {"in_features": 2, "classes": 2, "types": 2, "pose": 4, "dims": 0}, (2, 3, 2)
    ),
    "CapsuleHead, signals": Case(
        CapsuleHead, {"in_features": 2, "classes": 2, "types": 2, "pose": 4, "dims": 1}, (2, 2, 4)
    ),
    "CapsuleRegressor": Case(CapsuleRegressor, {"in_features": 2, "numbers": 3, "types": 2, "pose": 4}, (2, 2, 4, 4)),
    "CapsuleRegressor, volumes": Case(
        CapsuleRegressor, {"in_features": 2, "numbers": 3, "types": 2, "pose": 4, "dims": 3}, (2, 2, 3, 4, 4)
    ),
    "PrimaryCapsules, signals": Case(
        PrimaryCapsules, {"in_channels": 2, "out_capsules": 2, "out_pose": 4, "dims": 1}, (2, 2, 4)
    ),
    "RoutingPool2d": Case(RoutingPool2d, {"features": 2}, (2, 4, 4, 4)),
    "CapsNet": Case(
        CapsNet,
        {"image_size": 8, "channels": 4, "kernel_size": 3, "primary_types": 2, "primary_pose": 2, "class_pose": 2,
         "primary_kernel_size": 3, "classes": 2, "decoder": None},
        (2, 1, 8, 8),
    ),
    "convnet_mnist": Case(convnet_mnist, {"channels": (2, 2, 2), "hidden": (4, 4)}, (2, 1, 28, 28)),
    "narrow_cifar10": Case(models.narrow_cifar10, {"types": 2, "channels": 4}, (2, 3, 32, 32)),
    "pooling_cnn": Case(models.pooling_cnn, {"channels": 4, "features": 2}, (2, 3, 18, 18)),
    "shallow_encapnet": Case(models.shallow_encapnet, {"types": 2, "image_size": 16}, (2, 3, 16, 16)),
    "capnet_em": Case(models.capnet_em, {"types": 2, "grid": 2}, (2, 3, 8, 8)),
    "heinsen_smallnorb": Case(models.heinsen_smallnorb, {"parts": 2, "channels": 4}, (2, 2, 32, 32)),
    "heinsen_sst": Case(models.heinsen_sst, {"layers": 2, "width": 4, "features": 4, "parts": 2}, (2, 3, 2, 4)),
    "efficient_capsnet": Case(models.efficient_capsnet, {}, (2, 1, 28, 28)),
    "compare": Case(models.compare, {"channels": 4, "types": 2, "parts": 2}, (2, 3, 16, 16)),
    "capsule_cnn": Case(models.capsule_cnn, {"width": 4, "types": 2, "pose": 4}, (2, 1, 9, 9)),
    "capsule_cnn, signals": Case(
        models.capsule_cnn, {"in_channels": 3, "dims": 1, "width": 4, "types": 2, "pose": 4}, (2, 3, 16)
    ),
    "capsule_cnn, volumes": Case(
        models.capsule_cnn, {"numbers": 2, "dims": 3, "width": 4, "types": 2, "pose": 4}, (2, 1, 5, 6, 7)
    ),
    "heinsen_texts": Case(
        models.heinsen_texts, {"layers": 2, "width": 4, "hidden": 3, "pose": 4}, (2, 3, 2, 4)
    ),
    "mean_pooled_sst": Case(models.mean_pooled_sst, {"layers": 2, "width": 4}, (2, 3, 2, 4)),
}  # fmt: skip


def build(case: Case, **changed: Any) -> nn.Module:
    arguments = {**case.arguments, **changed}
    if "routing" in parameters(case.build) and parameters(case.build)["routing"].default is inspect.Parameter.empty:
        arguments.setdefault("routing", DynamicRouting(2))
    return case.build(**arguments)


def tensors(output: Any) -> list[torch.Tensor]:
    """All tensors in an output."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [x for item in output for x in tensors(item)] if isinstance(output, tuple) else []


def wrong_inputs(x: torch.Tensor) -> dict[str, Any]:
    """Inputs that a layer must refuse, made from a right one."""
    return {
        "nothing": None, "text": "x", "a number": 3, "an array": x.numpy(), "a list": [x], "a class": torch.Tensor,
        "a Prediction": Prediction(x), "a module": nn.Identity(), "integers": x.long(), "bytes": x.byte(),
        "bool": x > 0, "complex": x.to(torch.complex64), "double": x.double(), "another device": x.to("meta"),
        "no batch": x[0], "one dimension more": x.unsqueeze(1), "one dimension more at the end": x.unsqueeze(-1),
        "one dimension": x.flatten(), "a number in a tensor": x.sum(), "nothing in the last dimension": x[..., :0],
    }  # fmt: skip
