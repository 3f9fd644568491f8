"""Training with Lightning."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.training.classifier import Classifier
    from torchcaps.training.margin import SpreadMargin

__all__ = ["Classifier", "SpreadMargin"]
