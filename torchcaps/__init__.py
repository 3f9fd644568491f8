"""Capsule networks in PyTorch: routing algorithms as plug-in layers."""

# The modules are imported when a name is first used: `torchcaps --help` need not wait for PyTorch. So is `find`:
# `torchcaps.__main__` must be quick to handle Ctrl-C.
TYPE_CHECKING = False  # the name that type checkers know
if TYPE_CHECKING:
    from torchcaps import functional
    from torchcaps import testing as testing
    from torchcaps._version import __version__ as __version__
    from torchcaps.capsules import Capsules, Prediction, Segmentation
    from torchcaps.models import (
        CapsNet,
        CapsuleBlock2d,
        CapsuleFC,
        FeedbackAgreement,
        add_capsules,
        create_model,
        list_models,
        register_model,
    )
    from torchcaps.nn import (
        CapsuleConv1d,
        CapsuleConv2d,
        CapsuleHead,
        CapsuleLayer,
        CapsuleLinear,
        CapsuleMap,
        CapsuleRegressor,
        CapsuleShared,
        CapsuleStack,
        MarginLoss,
        MaskedDecoder,
        PrimaryCapsules,
        RoutingPool2d,
        SegmentationLoss,
        SpreadLoss,
        replace_pooling,
    )
    from torchcaps.ops import use_backend
    from torchcaps.routing import (
        DynamicRouting,
        EfficientRouting,
        EMRouting,
        HeinsenRouting,
        HeinsenVectorRouting,
        InvertedAttentionRouting,
        RandomRouting,
        Routing,
        SelfRouting,
        SlotAttention,
        UniformRouting,
        VBRouting,
        VectorNormRouting,
        list_routings,
        squash,
    )

__all__ = [
    "CapsNet",
    "CapsuleBlock2d",
    "CapsuleConv1d",
    "CapsuleConv2d",
    "CapsuleFC",
    "CapsuleHead",
    "CapsuleLayer",
    "CapsuleLinear",
    "CapsuleMap",
    "CapsuleRegressor",
    "CapsuleShared",
    "CapsuleStack",
    "Capsules",
    "DynamicRouting",
    "EMRouting",
    "EfficientRouting",
    "FeedbackAgreement",
    "HeinsenRouting",
    "HeinsenVectorRouting",
    "InvertedAttentionRouting",
    "MarginLoss",
    "MaskedDecoder",
    "Prediction",
    "PrimaryCapsules",
    "RandomRouting",
    "Routing",
    "RoutingPool2d",
    "Segmentation",
    "SegmentationLoss",
    "SelfRouting",
    "SlotAttention",
    "SpreadLoss",
    "UniformRouting",
    "VBRouting",
    "VectorNormRouting",
    "add_capsules",
    "create_model",
    "functional",
    "list_models",
    "list_routings",
    "register_model",
    "replace_pooling",
    "squash",
    "use_backend",
]

if not TYPE_CHECKING:

    def __getattr__(name):
        from torchcaps.utils.lazy import find  # see above

        return find(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
