"""Trained networks at work: loading them, predictions with calibrated probabilities, files for other programs."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.inference.hub import from_pretrained, push_to_hub, save_pretrained
    from torchcaps.inference.trained import Trained

__all__ = ["Trained", "from_pretrained", "push_to_hub", "save_pretrained"]
