"""Trained networks at work: predictions with calibrated probabilities, model pages, files for other programs."""

from torchcaps.utils.extras import needs

with needs("train"):
    from torchcaps.deploy.files import TARGETS, Target, export
    from torchcaps.deploy.hub import from_pretrained, push_to_hub, save_pretrained

__all__ = ["TARGETS", "Target", "export", "from_pretrained", "push_to_hub", "save_pretrained"]
