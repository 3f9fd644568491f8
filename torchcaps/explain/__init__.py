"""Figures of what a capsule network has learned."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.explain.dynamics import RoutingDynamics, capsule_layers, routing_dynamics, routing_dynamics_figure
    from torchcaps.explain.figures import (
        coefficients_figure,
        has_figures,
        perturb,
        perturbations_figure,
        reconstructions_figure,
        write_figures,
    )
    from torchcaps.explain.heatmaps import entropies, heatmaps, heatmaps_figure, read_image, write_heatmaps
    from torchcaps.explain.poses import (
        PoseTrajectories,
        RelativeChanges,
        has_class_capsules,
        mds,
        pose_trajectories,
        pose_trajectories_figure,
        relative_changes,
        relative_changes_figure,
        write_pose_figures,
    )

__all__ = [
    "PoseTrajectories",
    "RelativeChanges",
    "RoutingDynamics",
    "capsule_layers",
    "coefficients_figure",
    "entropies",
    "has_class_capsules",
    "has_figures",
    "heatmaps",
    "heatmaps_figure",
    "mds",
    "perturb",
    "perturbations_figure",
    "pose_trajectories",
    "pose_trajectories_figure",
    "read_image",
    "reconstructions_figure",
    "relative_changes",
    "relative_changes_figure",
    "routing_dynamics",
    "routing_dynamics_figure",
    "write_figures",
    "write_heatmaps",
    "write_pose_figures",
]
