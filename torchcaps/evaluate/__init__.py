"""What capsules promise, measured on any trained network: `torchcaps evaluate`, and `evaluate` in Python.

Each protocol is a module, whose docstring has the procedure and its source.
"""

from typing import TYPE_CHECKING

from torchcaps.utils.extras import needs

# Modules of this package, in the order in which they run. The help of `torchcaps evaluate` names them, and must be
# quick: what else is public here is imported when it is used.
PROTOCOL_NAMES = ("affine", "overlap", "routing", "parts", "pose", "viewpoint", "corruptions", "calibration", "attack")
TRAINING_PROTOCOL_NAMES = ("few",)  # these train the network anew, so they run only if they are named

if TYPE_CHECKING:
    from torchcaps.evaluate.protocols import PROTOCOLS, evaluate
    from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'torchcaps.evaluate' has no attribute {name!r}")
        with needs("train"):
            from torchcaps.evaluate import protocols, subject
        return getattr(protocols if hasattr(protocols, name) else subject, name)


__all__ = ["PROTOCOLS", "Curve", "DoesNotApply", "Outcome", "Protocol", "Subject", "evaluate"]
