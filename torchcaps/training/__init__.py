"""Training with Lightning."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.training.classifier import Classifier

__all__ = ["Classifier"]
