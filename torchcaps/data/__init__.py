"""Labelled image sets as Lightning data modules: canonical files in, batches of float images out."""

try:
    from torchcaps.data.digits import Digits
    from torchcaps.data.images import DataError, ImageData
    from torchcaps.data.mnist import MNIST, read_idx
except ModuleNotFoundError as error:
    raise ImportError(f'torchcaps.data needs {error.name}: install it with pip install "torchcaps[train]"') from error

__all__ = ["MNIST", "DataError", "Digits", "ImageData", "read_idx"]
