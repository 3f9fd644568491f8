"""Capsule networks in PyTorch: routing algorithms as plug-in layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchcaps import functional
    from torchcaps.capsules import Capsules, Prediction
    from torchcaps.models import CapsNet, create_model, list_models, register_model
    from torchcaps.nn import (
        CapsuleBlock2d,
        CapsuleConv1d,
        CapsuleConv2d,
        CapsuleFC,
        CapsuleLayer,
        CapsuleLinear,
        CapsuleStack,
        FeedbackAgreement,
        MarginLoss,
        MaskedDecoder,
        PrimaryCapsules,
        RoutingPool2d,
        SpreadLoss,
        replace_pooling,
    )
    from torchcaps.ops import use_backend
    from torchcaps.routing import (
        DynamicRouting,
        EMRouting,
        Equilibrium,
        HeinsenRouting,
        InvertedAttentionRouting,
        Routing,
        SelfRouting,
        VectorNormRouting,
        list_routings,
        squash,
    )

__version__ = "0.1.0"

__all__ = [
    "CapsNet",
    "CapsuleBlock2d",
    "CapsuleConv1d",
    "CapsuleConv2d",
    "CapsuleFC",
    "CapsuleLayer",
    "CapsuleLinear",
    "CapsuleStack",
    "Capsules",
    "DynamicRouting",
    "EMRouting",
    "Equilibrium",
    "FeedbackAgreement",
    "HeinsenRouting",
    "InvertedAttentionRouting",
    "MarginLoss",
    "MaskedDecoder",
    "Prediction",
    "PrimaryCapsules",
    "Routing",
    "RoutingPool2d",
    "SelfRouting",
    "SpreadLoss",
    "VectorNormRouting",
    "create_model",
    "functional",
    "list_models",
    "list_routings",
    "register_model",
    "replace_pooling",
    "squash",
    "use_backend",
]

# Modules are imported when one of their names is first used, so that `torchcaps --help` need not wait for PyTorch.
_HOMES = {
    "capsules": ("Capsules", "Prediction"),
    "models": ("CapsNet", "create_model", "list_models", "register_model"),
    "nn": (
        "CapsuleBlock2d",
        "CapsuleConv1d",
        "CapsuleConv2d",
        "CapsuleFC",
        "CapsuleLayer",
        "CapsuleLinear",
        "CapsuleStack",
        "FeedbackAgreement",
        "MarginLoss",
        "MaskedDecoder",
        "PrimaryCapsules",
        "RoutingPool2d",
        "SpreadLoss",
        "replace_pooling",
    ),
    "ops": ("use_backend",),
    "routing": (
        "DynamicRouting",
        "EMRouting",
        "Equilibrium",
        "HeinsenRouting",
        "InvertedAttentionRouting",
        "Routing",
        "SelfRouting",
        "VectorNormRouting",
        "list_routings",
        "squash",
    ),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "functional":
            return import_module("torchcaps.functional")
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = value = getattr(import_module(f"torchcaps.{home}"), name)
                return value
        raise AttributeError(f"module 'torchcaps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
