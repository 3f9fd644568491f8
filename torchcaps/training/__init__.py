"""Training with Lightning."""

try:
    from torchcaps.training.classifier import Classifier
except ModuleNotFoundError as error:
    raise ImportError(
        f'torchcaps.training needs {error.name}: install it with pip install "torchcaps[train]"'
    ) from error

__all__ = ["Classifier"]
