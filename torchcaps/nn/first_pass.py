"""What a capsule layer looks at in its first pass in training mode: whether it can learn from its first weights.

A layer whose parents start dead or saturated, or whose first coefficients are nearly hard, often learns nothing, and
nobody says why: the network stays at the accuracy of chance. The layer says so in one warning, with the remedy. At its
100th pass it looks once more, whether all lengths have gone to 1: with a learning rate that is too high they do so in
one step.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.capsules import Capsules
from torchcaps.ops import LazyVotes
from torchcaps.private import is_traced
from torchcaps.routing import Iteration, Routing

if TYPE_CHECKING:
    from torchcaps.nn.layer import CapsuleLayer

DEAD = 1e-4  # mean activation of the most active parent, or length of the longest
# With init="paper" a layer begins as published. Published networks begin short, hard or saturated and learn all the
# same, slowly: class capsules of 1e-9 do, but a layer after such a layer gets nothing.
DEAD_AS_PUBLISHED = 1e-10
SATURATED, NO_SPREAD = 0.98, 0.02  # mean activation, and its standard deviation between samples
LONG = 5.0  # root mean square of the entries of a child; a LayerNorm makes it 1, and a squash makes it smaller
HARD = 0.9  # mean of the largest coefficient of a child, or of a parent where the softmax is over the children
LOOKS = (1, 100)  # passes; by the second one a learning rate that is too high has done what it does
IMAGES, COEFFICIENTS = 8, 2**20  # at most so many samples, or maps, and so many coefficients are looked at


class FirstPass:
    """The passes in training mode of a layer, counted until it has looked at the last one of LOOKS. Shallow copies of a
    layer share them: nn.DataParallel makes some at every call."""

    def __init__(self) -> None:
        self.passes, self.is_over, self.is_held = 0, False, False


@contextlib.contextmanager
def looking(*layers: "CapsuleLayer") -> Iterator[None]:
    """Count a pass of these layers within this context. If it is one of LOOKS, warn of the first layer that cannot
    learn: what comes after it follows from it."""
    counted = [
        layer for layer in layers if layer.training and not (layer.first_pass.is_over or layer.first_pass.is_held)
    ]
    if not counted or is_traced():
        yield
        return
    due: list[CapsuleLayer] = []
    last: dict[int, Iteration] = {}
    with contextlib.ExitStack() as stack:
        for layer in counted:
            state = layer.first_pass
            state.passes, state.is_held = state.passes + 1, True
            stack.callback(setattr, state, "is_held", False)
            if state.passes in LOOKS:
                state.is_over = state.passes == max(LOOKS)
                stack.enter_context(layer.routing.watched(partial(last.__setitem__, len(due))))
                due.append(layer)
        yield
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    with torch.no_grad():
        for k, layer in enumerate(due):
            if k not in last or not _has_values(last[k].parents.poses):
                continue
            look = problem_of if layer.first_pass.passes == 1 else later_problem_of
            problem = look(layer.routing, last[k])
            if problem is not None:
                mark(last[k].parents)
                for each in due:
                    each.first_pass.is_over = True
                warnings.warn(f"{type(layer).__name__}({layer.extra_repr()}) {problem}", stacklevel=_caller())
                return


def _caller() -> int:
    """Return the stack level of the code that called the network: the first outside of torchcaps and PyTorch."""
    inside = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def mark(parents: Capsules) -> None:
    """Mark the parents of a layer that has warned, so that the layers after it need not say it again."""
    parents.poses.torchcaps_warned = True  # type: ignore[attr-defined]


def follows_a_warning(children: object) -> bool:
    """Return whether these children come from a layer that has warned in this pass."""
    return getattr(getattr(children, "poses", children), "torchcaps_warned", False)


def problem_of(routing: Routing, iteration: Iteration) -> str | None:
    """Return why a layer cannot learn from what it does in this iteration, its last one, or None."""
    parents, as_published = iteration.parents, routing.init == "paper"
    activations, least = parents.activations.float(), DEAD_AS_PUBLISHED if as_published else DEAD
    for what, sizes in (("activation", activations), ("length", _lengths(iteration))):
        size = sizes.amax(1).mean().item()
        if size < least and (what == "length" or routing.measures_presence):
            return (
                f"starts dead: the largest {what} of its parents is {size:.1g} on average. Use a routing with "
                "init='fan_in', fewer layers, or longer poses of the children"
            )
    size = _size_of_children(iteration)
    if size > LONG:
        return (
            f"has children much longer than its first weights assume: their entries have a root mean square of "
            f"{size:.3g}, not of about 1. Squash or normalize the children, or scale the inputs of the network"
        )
    if as_published:
        return None
    if routing.measures_presence:
        found = _saturation(activations)
        if found is not None:
            return (
                f"starts saturated: the activations of its parents are {found}. Squash the children (torchcaps.squash, "
                "PrimaryCapsules, CapsuleHead), or use a routing with init='fan_in' or a smaller gain"
            )
    largest = _largest_coefficient(routing, iteration)
    if largest > HARD:
        of = "child" if routing.softmax == "parents" else "parent"
        return (
            f"starts with hard coefficients: the largest of a {of} is {largest:.3f} on average, so that the others "
            "hardly learn. Squash or normalize the children, or use a routing with init='fan_in', a smaller gain or "
            "more alike"
        )
    return None


def later_problem_of(routing: Routing, iteration: Iteration) -> str | None:
    """Return why a layer has stopped to learn since its first pass, or None. Only lengths can saturate for good."""
    if not routing.measures_presence or routing.gives_scores:
        return None
    lengths = iteration.parents.activations.float()
    found = _saturation(lengths)
    if found is not None:
        return (
            f"has saturated since training began: the lengths of its parents are {found}. Lower the learning rate, "
            "and begin with new weights"
        )
    if lengths.amax(1).mean() < DEAD_AS_PUBLISHED:
        return "has died since training began: its parents have no length. Lower the learning rate"
    return None


def _saturation(activations: Tensor) -> str | None:
    """Return how saturated activations are, or None if they are not, or if one sample or one parent cannot tell."""
    if activations.shape[0] < 2 or activations.shape[1] < 2:
        return None
    mean, spread = activations.mean().item(), activations.std(0).mean().item()
    if mean <= SATURATED or spread >= NO_SPREAD:
        return None
    return f"{mean:.4f} on average and differ by {spread:.1g} between samples, so that hardly any gradient passes"


def _has_values(x: Tensor) -> bool:
    captured = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return type(x) is Tensor and x.device.type != "meta" and x.numel() > 0 and not captured


def _lengths(iteration: Iteration) -> Tensor:
    poses = iteration.parents.poses.float()
    return vector_norm(poses, dim=tuple(range(-len(iteration.votes.pose), 0)))


def _size_of_children(iteration: Iteration) -> float:
    """Return the root mean square of the entries of a child, the median over the children that are present."""
    votes = iteration.votes
    if not isinstance(votes, LazyVotes):
        return 0.0
    some = votes.first_maps(IMAGES)
    sizes = some.poses.float().square().mean((-2, -1)).sqrt().flatten(1)
    present = sizes > 0 if some.gates is None or some.grid else some.gates > 0
    sizes = sizes[present]
    return sizes.median().item() if len(sizes) else 0.0


def _largest_coefficient(routing: Routing, iteration: Iteration) -> float:
    """Return the mean of the largest coefficient of a child that is present, or of a parent; 0 if there are no
    alternatives."""
    votes, agreement = iteration.votes, iteration.agreement
    over_parents = routing.softmax == "parents"
    if agreement is None and not isinstance(votes, LazyVotes):
        return 0.0
    assert isinstance(votes, LazyVotes)
    if (votes.parents if over_parents else votes.children) < 2:
        return 0.0
    per_map = votes.children * votes.parents * votes.batch // len(votes.poses)
    if per_map > COEFFICIENTS:
        return 0.0
    some = votes.first_maps(min(IMAGES, COEFFICIENTS // per_map))
    if agreement is not None:
        of_samples = ("query", "parents", "mean", "precision", "prior")
        taken = {x: getattr(agreement, x) for x in of_samples if getattr(agreement, x, None) is not None}
        agreement = agreement._replace(**{name: x[: some.batch] for name, x in taken.items()})
    coefficients = routing.coefficients(some, agreement)
    largest = coefficients.float().amax(2 if over_parents else 1)
    if over_parents and some.gates is not None:
        largest = largest[some.gates > 0]
    return largest.mean().item() if largest.numel() else 0.0
