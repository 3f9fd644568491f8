"""What a capsule network has learned, as numbers and as figures: used by `torchcaps explain`, and from Python.

A module computes something and draws its figure; `figures` writes all figures that fit a network, and `page` makes one
HTML page.
"""

from torchcaps.utils.extras import check_installed
from torchcaps.utils.lazy import accessors

TYPE_CHECKING = False  # the name that type checkers know
if TYPE_CHECKING:
    from torchcaps.explain.capsnet import perturb, perturbations_figure, reconstructions_figure
    from torchcaps.explain.coefficients import Sharpening, sharpening
    from torchcaps.explain.credits import Credit, LayerCredit, Strand, credit, parse_tree
    from torchcaps.explain.dynamics import RoutingDynamics, capsule_layers, routing_dynamics, routing_dynamics_figure
    from torchcaps.explain.figures import write_figures
    from torchcaps.explain.pixels import Places, credit_figure, heat, places
    from torchcaps.explain.pool_heatmaps import heatmaps, heatmaps_figure
    from torchcaps.explain.poses import (
        PoseTrajectories,
        RelativeChanges,
        pose_trajectories,
        pose_trajectories_figure,
        relative_changes,
        relative_changes_figure,
    )
    from torchcaps.explain.recording import Recording, record, routing_layers, watching
    from torchcaps.explain.shares import Shares

__all__ = [
    "Credit",
    "LayerCredit",
    "Places",
    "PoseTrajectories",
    "Recording",
    "RelativeChanges",
    "RoutingDynamics",
    "Shares",
    "Sharpening",
    "Strand",
    "capsule_layers",
    "credit",
    "credit_figure",
    "heat",
    "heatmaps",
    "heatmaps_figure",
    "parse_tree",
    "perturb",
    "perturbations_figure",
    "places",
    "pose_trajectories",
    "pose_trajectories_figure",
    "reconstructions_figure",
    "record",
    "relative_changes",
    "relative_changes_figure",
    "routing_dynamics",
    "routing_dynamics_figure",
    "routing_layers",
    "sharpening",
    "watching",
    "write_figures",
]

check_installed("train", "PIL", "lightning", "matplotlib", "scipy", "sklearn")

if not TYPE_CHECKING:
    __getattr__, __dir__ = accessors(__name__)
