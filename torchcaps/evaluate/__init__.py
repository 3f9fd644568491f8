"""What capsules promise, measured on any trained network: `torchcaps evaluate`, and `evaluate` in Python.

Each protocol is a module, whose docstring has the procedure and its source.
"""

from torchcaps.utils.lazy import accessors

# Modules of this package, in the order in which they run.
PROTOCOL_NAMES = ("affine", "overlap", "routing", "parts", "pose", "viewpoint", "corruptions", "calibration", "attack")
TRAINING_PROTOCOL_NAMES = ("few",)  # these train the network anew, so they run only if they are named

TYPE_CHECKING = False  # the name that type checkers know
if TYPE_CHECKING:
    from torchcaps.evaluate.protocols import PROTOCOLS, evaluate
    from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject

__all__ = ["PROTOCOLS", "Curve", "DoesNotApply", "Outcome", "Protocol", "Subject", "evaluate"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = accessors(__name__)
