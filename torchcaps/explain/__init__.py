"""Figures of what a capsule network has learned."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.explain.figures import (
        coefficients_figure,
        perturb,
        perturbations_figure,
        reconstructions_figure,
        write_figures,
    )

__all__ = [
    "coefficients_figure",
    "perturb",
    "perturbations_figure",
    "reconstructions_figure",
    "write_figures",
]
