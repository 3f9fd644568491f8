"""Trained networks at work: loading them, predictions with calibrated probabilities, files for other programs."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.inference.trained import Trained

__all__ = ["Trained"]
