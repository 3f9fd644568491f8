"""Figures of what a capsule network has learned."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.explain.dynamics import RoutingDynamics, capsule_layers, routing_dynamics, routing_dynamics_figure
    from torchcaps.explain.figures import (
        coefficients_figure,
        perturb,
        perturbations_figure,
        reconstructions_figure,
        write_figures,
    )
    from torchcaps.explain.heatmaps import entropies, heatmaps, heatmaps_figure, read_image, write_heatmaps

__all__ = [
    "RoutingDynamics",
    "capsule_layers",
    "coefficients_figure",
    "entropies",
    "heatmaps",
    "heatmaps_figure",
    "perturb",
    "perturbations_figure",
    "read_image",
    "reconstructions_figure",
    "routing_dynamics",
    "routing_dynamics_figure",
    "write_figures",
    "write_heatmaps",
]
