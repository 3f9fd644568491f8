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
    from torchcaps.explain.heatmaps import entropies, heatmaps, heatmaps_figure, read_image, write_heatmaps

__all__ = [
    "coefficients_figure",
    "entropies",
    "heatmaps",
    "heatmaps_figure",
    "perturb",
    "perturbations_figure",
    "read_image",
    "reconstructions_figure",
    "write_figures",
    "write_heatmaps",
]
