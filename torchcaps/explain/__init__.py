"""Figures of what a capsule network has learned."""

try:
    from torchcaps.explain.figures import (
        coefficients_figure,
        perturb,
        perturbations_figure,
        reconstructions_figure,
        write_figures,
    )
except ModuleNotFoundError as error:
    raise ImportError(
        f'torchcaps.explain needs {error.name}: install it with pip install "torchcaps[train]"'
    ) from error

__all__ = [
    "coefficients_figure",
    "perturb",
    "perturbations_figure",
    "reconstructions_figure",
    "write_figures",
]
