"""Labelled image sets as Lightning data modules: canonical files in, batches of float images out."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.data.digits import Digits
    from torchcaps.data.images import DataError, ImageData
    from torchcaps.data.mnist import MNIST, read_idx

__all__ = ["MNIST", "DataError", "Digits", "ImageData", "read_idx"]
