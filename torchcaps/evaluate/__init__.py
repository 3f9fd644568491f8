"""What capsules promise, measured on any trained network: `torchcaps evaluate`, and `evaluate` in Python.

Each protocol is a module, whose docstring has the procedure and its source.
"""

from torchcaps.utils.extras import needs

with needs("train"):
    from torchcaps.evaluate.protocols import PROTOCOLS, evaluate
    from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject

__all__ = ["PROTOCOLS", "Curve", "DoesNotApply", "Outcome", "Protocol", "Subject", "evaluate"]
