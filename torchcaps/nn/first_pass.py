"""What a capsule layer looks at in its first pass in training mode: whether it can learn from its first weights.

A layer whose parents start dead or saturated, or whose first coefficients are nearly hard, often learns nothing, and
nothing says why: the network stays at the accuracy of chance. The layer says so in one warning, with the remedy. At
its 100th pass it looks once more, whether all lengths have gone to 1: with a learning rate that is too high they do so
in one step.

Lengths near 1 alone are no fault: what reads the directions of the poses, as a head or the next capsule layer does, can
learn from them. The gradient that comes back to these poses shows whether anything reads them. So a layer with such
lengths waits for this gradient, and warns then.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.linalg import vector_norm

from torchcaps.capsules import Capsules
from torchcaps.ops import ComputedVotes, StoredVotes, WeightedVotes, windows
from torchcaps.routing import Iteration, Routing
from torchcaps.utils.private import in_dispatch_mode, is_compiled, is_traced

DEAD = 1e-4  # mean activation of the most active parent, or length of the longest
# With init="paper" a layer begins as published. Published networks begin short, hard or saturated and learn all the
# same, slowly: class capsules of 1e-9 do, but a layer after such a layer gets nothing.
DEAD_AS_PUBLISHED = 1e-10
SATURATED, NO_SPREAD = 0.98, 0.02  # mean activation, and its standard deviation between samples
LONG = 5.0  # root mean square of the entries of a child; a LayerNorm makes it 1, and a squash makes it smaller
HARD = 0.9  # mean of the largest coefficient of a child, or of a parent where the softmax is over the children
LOOKS = (1, 100)  # passes; by the second one a learning rate that is too high has done what it does
SAME = 0.02  # largest standard deviation between samples of directions that are the same for all, of at least SAMPLES
SAMPLES = 8
# A gradient points along a pose if its part across it is so small, relative to that across the pose of another sample.
ALONG = 0.1
IMAGES, COEFFICIENTS = 8, 2**20  # limits of what one look reads: samples, or maps, and coefficients


class Passes:
    """The passes of a layer in training mode, counted until it has looked at the last one of LOOKS. Shallow copies of a
    layer share them: nn.DataParallel makes some at every call."""

    def __init__(self) -> None:
        self.count, self.is_over, self.is_held = 0, False, False


class CountedLayer(nn.Module):
    """Layer that routes, and whose passes in training mode are counted.

    Attributes:
        routing: its routing algorithm.
        passes: the count; over as soon as weights are loaded, which are not first ones.
    """

    routing: Routing

    def __init__(self) -> None:
        super().__init__()
        self.passes = Passes()
        self.register_load_state_dict_pre_hook(_has_weights)


def _has_weights(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if all(prefix + name in state for name, _ in layer.named_parameters()):  # these are not first weights
        layer.passes.is_over = True


class Seen(NamedTuple):
    """Results of a layer's last iteration, with gradients in `poses` alone, and its votes in a few samples."""

    poses: Tensor
    parents: Capsules
    lengths: Tensor
    votes: WeightedVotes | None


def look_at(layers: Sequence[CountedLayer], children: Capsules | Tensor, route: Callable[[], Capsules]) -> Capsules:
    """Return what `route` makes of these children in these layers. Count it as a pass of each layer in training mode,
    if there are gradients, and if it is one of LOOKS, warn of the first layer that cannot learn: what comes after it
    follows from it."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return route()
    counted = [
        layer
        for layer in dict.fromkeys(layers)
        if layer.training and not (layer.passes.is_over or layer.passes.is_held)
    ]
    if not counted or is_traced() or in_dispatch_mode():
        return route()
    if getattr(getattr(children, "poses", children), "torchcaps_warned", False):
        for layer in counted:
            layer.passes.is_over = True
        return _marked(route())
    due = [layer for layer in counted if layer.passes.count + 1 in LOOKS and not is_compiled(layer)]
    last: dict[CountedLayer, Seen] = {}
    with contextlib.ExitStack() as stack:
        for layer in counted:
            layer.passes.is_held = True
            stack.callback(setattr, layer.passes, "is_held", False)
        for layer in due:
            stack.enter_context(layer.routing.watched(partial(_keep, last, layer)))
        parents = route()
    for layer in counted:
        if layer in last or layer not in due:
            layer.passes.count += 1
            layer.passes.is_over = layer.passes.count >= max(LOOKS)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return parents
    with torch.no_grad():
        for layer in (layer for layer in due if layer in last):
            look = problem_of if layer.passes.count == 1 else later_problem_of
            problem = look(layer.routing, last[layer])
            if problem is not None:
                for each in last:
                    each.passes.is_over = True
                _warn(f"{type(layer).__name__}({layer.extra_repr()}) {problem}", *_caller())
                return _marked(parents)
        for layer, seen in last.items():
            saturation = saturation_of(layer.routing, seen, is_first=layer.passes.count == 1)
            if saturation is not None and seen.poses.requires_grad:
                text = f"{type(layer).__name__}({layer.extra_repr()}) {saturation}"
                _when_nothing_passes(seen, partial(_warn, text, *_caller()))
    return parents


def _when_nothing_passes(seen: Seen, warn: Callable[[], None]) -> None:
    """Call `warn` in the backward pass, if nothing can learn from these poses, whose lengths are all near 1."""
    poses, dims = seen.poses.detach(), seen.poses.dim() - seen.lengths.dim()  # the tensor itself would be in a cycle

    @torch.no_grad()
    def look(gradient: Tensor) -> None:
        handle.remove()
        if type(gradient) is not Tensor or torch.compiler.is_compiling() or _is_captured(gradient):
            return
        if _nothing_passes(poses.float().flatten(-dims), gradient.float().flatten(-dims)):
            warn()

    handle = seen.poses.register_hook(look)


def _nothing_passes(poses: Tensor, gradient: Tensor) -> bool:
    """Return whether poses `(batch, ..., features)` of about the same length have the same direction in all samples, or
    are read by their lengths alone, by most of the gradients."""
    directions = F.normalize(poses, dim=-1)
    if len(poses) >= SAMPLES and directions.std(0).norm(dim=-1).amax() < SAME:
        return True
    # The gradient of a length points along the pose. A weight that is the same for all samples may also do so, but then
    # it points along the poses of other samples as well.
    across, across_others = (
        (gradient - (gradient * unit).sum(-1, keepdim=True) * unit).norm(dim=-1)
        for unit in (directions, directions.roll(1, 0))
    )
    along = (across < ALONG * across_others)[across_others > 0]
    return bool(along.numel()) and along.float().mean().item() > 0.4  # a decoder may read those of the true class


def _warn(text: str, *place: Any) -> None:
    warnings.warn_explicit(text, UserWarning, *place)


def _marked(parents: Capsules) -> Capsules:
    """Mark parents that follow from a warning, so that the layers after them need not say it again."""
    parents.poses.torchcaps_warned = True  # type: ignore[attr-defined]
    return parents


def _keep(last: dict[CountedLayer, Seen], layer: CountedLayer, iteration: Iteration) -> None:
    """Keep what is looked at of an iteration that has values. Later iterations take the place of earlier ones."""
    weighted, parents = iteration.votes, iteration.parents
    votes, agreement, poses = weighted.votes, weighted.agreement, parents.poses
    if type(poses) is not Tensor or poses.device.type == "meta" or not poses.numel() or _is_captured(poses):
        return
    if isinstance(votes, StoredVotes) and not votes.votes.any():
        return  # zeros say nothing
    with torch.no_grad():
        lengths = vector_norm(poses.float(), dim=tuple(range(-len(votes.pose), 0)))
        weighted_few = None
        if isinstance(votes, ComputedVotes):
            per_map = votes.children * votes.parents * votes.batch // len(votes.poses)
            few = votes.first(max(1, min(IMAGES, COEFFICIENTS // per_map)))
            if agreement is not None:
                values = {name: getattr(agreement, name, None) for name in ("query", "mean", "precision", "prior")}
                taken = {name: x[: few.batch].clone() for name, x in values.items() if x is not None}
                agreement = agreement._replace(**taken)
            weighted_few = WeightedVotes(few, agreement, weighted.softmax, weighted.leaky)
    last[layer] = Seen(poses, parents.detach(), lengths, weighted_few)


def _is_captured(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _caller() -> tuple[str, int, str, dict[Any, Any]]:
    """Return the place of the code that called the network, the first outside of torchcaps and PyTorch, as
    `warnings.warn_explicit` takes it."""
    folders = Path(__file__).parents[1], Path(torch.__file__).parent
    inside = (*(f"{folder}{os.sep}" for folder in folders), contextlib.__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"), registry


def problem_of(routing: Routing, seen: Seen) -> str | None:
    """Return why a layer cannot learn from what it does in its first pass, or None."""
    as_published = routing.init == "paper"
    activations, least = seen.parents.activations.float(), DEAD_AS_PUBLISHED if as_published else DEAD
    size = _size_of_children(seen)
    if size == 0:
        return None  # zeros say nothing
    for what, sizes in (("activation", activations), ("length", seen.lengths)):
        largest = sizes.amax(1).mean().item()
        if largest < least and (what == "length" or routing.measures_presence):
            remedy = "Use a routing with init='fan_in'" if as_published else "Set a larger routing.gain"
            return (
                f"starts dead: the largest {what} of its parents is {largest:.1g} on average. {remedy}, or use fewer "
                "layers or longer poses of the children"
            )
    if size is not None and size > LONG:
        return (
            f"has children much longer than its first weights assume: their entries have a root mean square of "
            f"{size:.3g}, not of about 1. Squash or normalize the children, or scale the inputs of the network"
        )
    if as_published:
        return None
    if routing.gives_scores and (saturation := saturation_of(routing, seen, is_first=True)) is not None:
        return saturation
    largest = _largest_coefficient(seen)
    if largest > HARD:
        of = "child" if routing.softmax == "parents" else "parent"
        return (
            f"starts with hard coefficients: the largest of a {of} is {largest:.3f} on average, so that the others "
            "hardly learn. Squash or normalize the children, or set a smaller routing.gain or a larger "
            "routing.shared_variance"
        )
    return None


def later_problem_of(routing: Routing, seen: Seen) -> str | None:
    """Return why a layer has stopped to learn since its first pass, or None."""
    has_lengths = routing.measures_presence and not routing.gives_scores
    if has_lengths and seen.lengths.amax(1).mean() < DEAD_AS_PUBLISHED:
        return "has died since training began: its parents have no length. Lower the learning rate"
    return None


def saturation_of(routing: Routing, seen: Seen, is_first: bool) -> str | None:
    """Return how saturated the activations of the parents are, or None if they are not, or if one sample or one parent
    cannot tell. Scores do not saturate for good, and a layer may begin as published."""
    if not routing.measures_presence or (routing.init == "paper" if is_first else routing.gives_scores):
        return None
    activations = seen.parents.activations.float() if is_first else seen.lengths
    if activations.shape[0] < 2 or activations.shape[1] < 2:
        return None
    mean, spread = activations.mean().item(), activations.std(0).mean().item()
    if not (mean > SATURATED and spread < NO_SPREAD):
        return None
    how = f"{mean:.4f} on average and differ by {spread:.1g} between samples, so that hardly any gradient passes"
    if is_first:
        return (
            f"starts saturated: the activations of its parents are {how}. Squash the children (torchcaps.squash, "
            "PrimaryCapsules, CapsuleHead), or set a smaller routing.gain"
        )
    return (
        f"has saturated since training began: the lengths of its parents are {how}. Lower the learning rate, and begin "
        "with new weights"
    )


def _size_of_children(seen: Seen) -> float | None:
    """Return the root mean square of the entries of a child, the median over the children that are present; 0 if all
    are zero, and None if that is unknown."""
    if seen.votes is None:
        return None
    votes: Any = seen.votes.votes
    sizes = votes.poses.float().square().mean((-2, -1)).sqrt()
    if votes.grid:
        sizes = windows(sizes, votes.window, votes.options.stride, votes.options.dilation)
    sizes = sizes.flatten(1)
    sizes = sizes[sizes > 0 if votes.gates is None else (sizes > 0) & (votes.gates > 0)]
    return sizes.median().item() if len(sizes) else 0.0


def _largest_coefficient(seen: Seen) -> float:
    """Return the mean of the largest coefficient of a child that is present, or of a parent; 0 if there are no
    alternatives, or too many coefficients."""
    votes = seen.votes
    if votes is None or votes.votes.batch * votes.children * votes.parents > COEFFICIENTS:
        return 0.0
    coefficients = votes.coefficients().float()
    present = torch.ones_like(coefficients[..., 0], dtype=torch.bool) if votes.gates is None else votes.gates > 0
    if votes.softmax == "parents":
        largest = coefficients.amax(2)[present] if votes.parents > 1 else coefficients[:0, 0, 0]
    else:
        largest = coefficients.amax(1)[present.sum(1) > 1]
    return largest.mean().item() if largest.numel() else 0.0
