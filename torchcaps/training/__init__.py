"""Training with Lightning."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.training.classifier import Classifier
    from torchcaps.training.margin import SpreadMargin
    from torchcaps.training.mixing import mixup
    from torchcaps.training.one_cycle import OneCycle

__all__ = ["Classifier", "OneCycle", "SpreadMargin", "mixup"]
