"""Predictions and reconstructions of a network, and what is wrong with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction, Segmentation
from torchcaps.nn.modes import evaluating
from torchcaps.utils.arguments import checked, is_row, shown, shown_with_type
from torchcaps.utils.checks import one_line
from torchcaps.utils.processes import lost_peer

# A network's input, or all arguments of its `forward`.
Inputs = Tensor | tuple[Tensor, ...]
LIBRARIES = ("torchcaps", "torch", "torchvision", "timm", "transformers")


class NoClassCapsules(TypeError):
    """A network gives no capsule for each class."""


def inputs_of(batch: Any) -> Inputs:
    """Return the inputs of a batch: a tensor, or a tuple of tensors for networks with several arguments.

    Args:
        batch: a tensor of inputs, or a tuple that begins with inputs, as from a `DataLoader`.

    Raises:
        TypeError: the batch is something else.
    """
    inputs = batch[0] if is_row(batch) and batch else batch
    if is_row(inputs) and inputs and all(isinstance(x, Tensor) for x in inputs):
        return tuple(inputs)
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"batches must be inputs, or tuples that begin with a tensor or several in a tuple, got "
            f"{shown_with_type(batch)}"
        )
    return inputs


def inputs_for(network: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs on the device of a network and, if they are floats, in its precision."""
    like = next(network.parameters(), None)
    if like is None:
        return inputs
    if isinstance(inputs, tuple):
        return tuple(x.to(like) if x.is_floating_point() else x.to(like.device) for x in inputs)
    return inputs.to(like) if inputs.is_floating_point() else inputs.to(like.device)


def run_network(network: nn.Module, inputs: Inputs) -> Any:
    """Return what a network returns for its inputs, which may be on any device."""
    moved = inputs_for(network, inputs)
    with name_unfit_inputs(network, inputs):
        return network(*moved) if isinstance(moved, tuple) else network(moved)


@contextmanager
def name_unfit_inputs(network: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Within this context, a RuntimeError of a library's network is a ValueError that names the shapes of its inputs.
    One of a network of the user's own stays as it is, with its traceback.

    Raises:
        ValueError: the network does not fit the inputs.
    """
    try:
        yield
    except RuntimeError as error:
        # Errors of the memory and of other processes are none of the inputs'. On a CPU the memory's have no type.
        others = type(error) is not RuntimeError or lost_peer(error) or "allocate memory" in str(error)
        if others or type(network).__module__.partition(".")[0] not in LIBRARIES:
            raise
        shapes = " and ".join(str(tuple(x.shape)) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
        raise ValueError(
            f"the network does not fit the samples: of a batch of shape {shapes} it says: {one_line(error)}"
        ) from error


def check_scores(scores: Tensor) -> None:
    """Check scores `(..., classes)` that become predictions. -inf rules a class out, but not all classes of a sample.

    Raises:
        ValueError: a score is NaN or inf, or all scores of a sample are -inf.
    """
    if scores.numel() and not scores.amax(-1).isfinite().all():
        raise ValueError(
            "the network gives scores that are NaN or infinite: its weights or its inputs are not finite, or too "
            "large: look at the inputs, take an earlier checkpoint, or compute in float32 in place of float16"
        )


def as_prediction(network: nn.Module, output: Any) -> Prediction:
    """Return the output of a network, a `Prediction`, class capsules or scores `(batch, classes)`, as a prediction.

    Raises:
        TypeError: the network returned something else.
        ValueError: the scores are NaN or infinite, see `check_scores`.
    """
    if isinstance(output, Capsules):
        output = Prediction(activations=output.activations, capsules=output)
    prediction = output if isinstance(output, Prediction) else Prediction(output)
    try:
        evidence = prediction.evidence
    except ValueError:
        raise TypeError(
            f"{type(network).__name__} must return a Prediction, class capsules or scores (batch, classes), got "
            f"{shown_with_type(output)}"
        ) from None
    check_scores(evidence)
    return prediction


@torch.no_grad()
@checked
def segment(network: nn.Module, images: Tensor) -> Tensor:
    """Return the probabilities of the classes of each pixel, `(batch, classes, height, width)`.

    Args:
        network: network that returns a Segmentation; it is run in evaluation mode and left as it was.
        images: `(batch, channels, height, width)`, on any device.

    Raises:
        TypeError: the network returns something else.
        ValueError: its scores are NaN or infinite.
    """
    with evaluating(network):
        output = run_network(network, images)
    if not isinstance(output, Segmentation):
        raise TypeError(f"{type(network).__name__} must return a Segmentation, got {shown_with_type(output)}")
    check_scores(output.evidence.movedim(1, -1))
    return output.probabilities.float()


@torch.no_grad()
@checked
def predict(network: nn.Module, inputs: Inputs) -> Prediction:
    """Run a network in evaluation mode, without gradients, and leave it as it was.

    Args:
        network: network that returns a `Prediction`, class capsules or scores `(batch, classes)`.
        inputs: its input, or a tuple of the arguments of its `forward`, on any device.

    Raises:
        TypeError: the network returns something else.
        ValueError: its scores are NaN or infinite.
    """
    with evaluating(network):
        return as_prediction(network, run_network(network, inputs))


@checked
def class_poses(network: nn.Module, prediction: Prediction) -> Tensor:
    """Return the poses of the class capsules, flattened: `(batch, classes, features)`.

    Raises:
        NoClassCapsules: the prediction has no class capsules, or they lie on a grid. It is a TypeError.
    """
    capsules = prediction.capsules
    if capsules is None or capsules.poses.dim() not in (3, 4):
        got = "none" if capsules is None else f"poses that are {shown(capsules.poses)}"
        raise NoClassCapsules(f"expected one capsule for each class, and a {type(network).__name__} gives {got}")
    return capsules.poses.flatten(2)


def kind_of_scores(prediction: Prediction) -> Literal["logits", "activations"]:
    """Return what scores are: logits, or the activations of class capsules, which are in [0, 1]."""
    return "logits" if prediction.activations is None else "activations"


@checked
def has_decoder(network: nn.Module) -> bool:
    """Return whether a network can reconstruct its input from its class capsules."""
    return getattr(network, "decoder", None) is not None and hasattr(network, "reconstruct")


@torch.no_grad()
@checked
def reconstructed(network: nn.Module, capsules: Capsules, labels: Tensor) -> Tensor:
    """Reconstruct images from the class capsules `(batch, classes, *pose)` of the labels `(batch,)` alone.

    Raises:
        ValueError: the network has no decoder.
    """
    if not has_decoder(network):
        raise ValueError(f"this {type(network).__name__} has no decoder: build it with one to draw reconstructions")
    drawing: Any = network
    with evaluating(network):
        return drawing.reconstruct(Capsules(capsules.poses), labels.to(capsules.poses.device))
