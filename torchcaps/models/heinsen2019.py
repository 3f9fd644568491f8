"""The networks of Heinsen: An Algorithm for Routing Capsules in All Domains (2019), and the author's weights.

What the text leaves out or has otherwise is as in the author's code and published weights
(github.com/glassroom/heinsen_routing): of the coordinates, rows come first; the normalisation of the language network
comes last, where the text puts it first; the 1x1 convolutions start as PyTorch's do, the six before them by He et al.
"""

import os
import re
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleLinear, CapsuleStack
from torchcaps.nn.pose import Pose, matrix_shape
from torchcaps.routing import HeinsenRouting, Routing

ADVICE = "give a file of github.com/glassroom/heinsen_routing as it was published"


class PartsCapsNet(nn.Module):
    """Any number of children, which share their weights; a fixed number of parts; a capsule per class.

    A subclass makes the children.

    Args:
        in_pose: of a child.
        parts, classes: numbers of capsules.
        pose: of a part and of a class.
        routing: of both layers; None is `HeinsenRouting(3)`. Where it gives no scores, a linear layer that the classes
            share turns the poses into logits.

    Attributes:
        capsules: the two layers.
    """

    def __init__(self, in_pose: Pose, parts: int, classes: int, pose: Pose, routing: Routing | None):
        super().__init__()
        routing = HeinsenRouting(iterations=3, init="paper") if routing is None else routing
        rows, features = matrix_shape(pose)
        self.capsules = CapsuleStack(
            CapsuleLinear(None, parts, in_pose, pose, routing, bias=True),
            CapsuleLinear(parts, classes, pose, pose, routing, bias=True),
        )
        self.classifier = None if routing.gives_scores else nn.Linear(rows * features, 1)

    def classify(self, children: Capsules, return_coefficients: bool) -> Prediction:
        capsules = self.capsules(children, return_coefficients=return_coefficients)
        if self.classifier is None:
            return Prediction(capsules.scores, capsules)
        return Prediction(self.classifier(capsules.poses.flatten(2)).squeeze(-1), capsules)


class StereoCapsNet(PartsCapsNet):
    r"""Six convolutions that find parts of toys and their poses, and two layers of capsules.

    .. math::
        x = (\text{images}, \text{rows}, \text{columns}), \quad
        x \leftarrow \text{swish}(\text{conv}_{3 \times 3}(\text{BN}(x))) \text{ six times}, \\
        a = \text{conv}_{1 \times 1}(\text{BN}(x)), \quad \mu = \text{conv}_{1 \times 1}(\text{BN}(x)), \quad
        \text{classes} = \text{routing}(\text{routing}(a, \mu))

    Args:
        in_channels: channels of an image: 2 for a pair of grey ones.
        classes: number of class capsules.
        parts: types of the children, and number of larger parts.
        channels: of the convolutions.
        routing: see :class:`PartsCapsNet`.

    Shape:
        - Input: `(batch, in_channels, height, width)`, values in [0, 1], of any size from 29x29 on.
        - Output: a Prediction: scores `(batch, classes)`, logits, and the class capsules, poses
          `(batch, classes, 4, 4)`.

    Raises:
        ValueError: for images of another shape.

    Reference:
        Heinsen 2019, section 3.1 and Figure 3.
    """

    def __init__(
        self,
        in_channels: int = 2,
        classes: int = 5,
        parts: int = 64,
        channels: int = 64,
        routing: Routing | None = None,
    ):
        super().__init__((4, 4), parts, classes, (4, 4), routing)
        self.in_channels = in_channels
        self.features = stereo_convolutions(in_channels, channels)
        self.scores = nn.Sequential(nn.BatchNorm2d(channels), nn.Conv2d(channels, parts, 1))
        self.poses = nn.Sequential(nn.BatchNorm2d(channels), nn.Conv2d(channels, parts * 4 * 4, 1))

    def forward(self, images: Tensor, *, return_coefficients: bool = False) -> Prediction:
        return self.classify(self.primary_capsules(images), return_coefficients)

    def primary_capsules(self, images: Tensor) -> Capsules:
        """The parts at each place, `(batch, parts, rows, columns, 4, 4)`, with scores; 9x9 places from 96x96 pixels."""
        _check_images(images, self.in_channels)
        features = self.features(with_coordinates(images))
        poses = self.poses(features).unflatten(1, (-1, 4, 4)).movedim((2, 3), (-2, -1))
        return Capsules(poses, self.scores(features))


def stereo_convolutions(in_channels: int, channels: int) -> nn.Sequential:
    """The six convolutions of Figure 3, for images with coordinates."""
    layers: list[nn.Module] = []
    before = in_channels + 2
    for stride in (1, 2, 1, 2, 1, 2):
        conv = nn.Conv2d(before, channels, 3, stride)
        nn.init.kaiming_normal_(conv.weight)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [nn.BatchNorm2d(before), conv, nn.SiLU()]
        before = channels
    return nn.Sequential(*layers)


class StereoCNN(nn.Module):
    r"""The same six convolutions, then an average over all places: what capsules are measured against.

    .. math:: \text{scores} = W \, \text{mean}_{\text{places}} (\text{BN}(x)) + b

    Args:
        in_channels, classes, channels: see :class:`StereoCapsNet`, also for the shapes of input and scores, and the
            errors.
    """

    def __init__(self, in_channels: int = 2, classes: int = 5, channels: int = 64):
        super().__init__()
        self.in_channels = in_channels
        self.features = stereo_convolutions(in_channels, channels)
        self.classifier = nn.Sequential(
            nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )

    def forward(self, images: Tensor) -> Prediction:
        _check_images(images, self.in_channels)
        return Prediction(self.classifier(self.features(with_coordinates(images))))


def _check_images(images: Tensor, in_channels: int) -> None:
    if images.dim() != 4 or images.shape[1] != in_channels or min(images.shape[2:]) < 29:
        raise ValueError(
            f"expected images of shape (batch, {in_channels}, height, width), height and width at least 29, "
            f"got {tuple(images.shape)}"
        )


def with_coordinates(images: Tensor) -> Tensor:
    """Images with two channels more: each pixel's row and column, evenly spaced from -1 to 1 (Figure 3b)."""

    def line(length: int) -> Tensor:
        # Not linspace: exporting would fix its length.
        steps = torch.arange(length, device=images.device, dtype=images.dtype)
        return 2 * steps / torch.sym_max(length - 1, 1) - 1

    grid = torch.meshgrid(line(images.shape[-2]), line(images.shape[-1]), indexing="ij")
    return torch.cat([images, torch.stack(grid).expand(images.shape[0], -1, -1, -1)], dim=1)


class EmbeddingCapsNet(PartsCapsNet):
    r"""All layers' embeddings of all tokens, made capsules by one small map, and two layers of capsules.

    With e the embedding of a token in layer l, x = 1 for a token and 0 for padding,

    .. math::
        a = \log \frac{x}{1 - x}, \quad \mu = \text{LayerNorm}(\text{swish}(W (e + \text{depth}_l) + b)), \quad
        \text{classes} = \text{routing}(\text{routing}(a, \mu))

    Args:
        layers, width: of the encoder: how many embeddings a token has, the input of the first layer among them, and
            their size.
        classes: number of class capsules.
        features: of a child.
        pose: features of a part and of a class, vectors both.
        parts: number of parts.
        routing: see :class:`PartsCapsNet`.

    Shape:
        - Input: embeddings `(batch, tokens, layers, width)`, any number of tokens; mask `(batch, tokens)`, bool or
          numbers from 0 (padding) to 1 (a token), or None: no padding. Between them a token is there in part, as
          in mixup; beyond them all is NaN. Whatever is at padded places changes nothing, be it NaN.
        - Output: a Prediction: scores `(batch, classes)`, logits, and the class capsules, poses
          `(batch, classes, pose)`.

    Raises:
        ValueError: for embeddings or a mask of another shape.

    Reference:
        Heinsen 2019, section 4.1 and Figure 5.
    """

    def __init__(
        self,
        layers: int = 37,
        width: int = 1280,
        classes: int = 5,
        features: int = 64,
        pose: int = 2,
        parts: int = 64,
        routing: Routing | None = None,
    ):
        super().__init__(features, parts, classes, pose, routing)
        self.layers, self.width = layers, width
        self.depth = nn.Parameter(torch.zeros(layers, width))
        linear = nn.Linear(width, features)
        nn.init.kaiming_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.detector = nn.Sequential(linear, nn.SiLU(), nn.LayerNorm(features))

    def forward(
        self, embeddings: Tensor, mask: Tensor | None = None, *, return_coefficients: bool = False
    ) -> Prediction:
        return self.classify(self.primary_capsules(embeddings, mask), return_coefficients)

    def primary_capsules(self, embeddings: Tensor, mask: Tensor | None = None) -> Capsules:
        """A capsule per token and layer, `(batch, tokens * layers, features)`, with scores if there is a mask."""
        _check_embeddings(embeddings, mask, self.layers, self.width)
        embeddings = embeddings.to(self.depth.dtype)
        if mask is None:
            return Capsules(self._detect(embeddings).flatten(1, 2))
        mask = mask.to(self.depth.dtype)
        embeddings = embeddings.where(mask[..., None, None] > 0, 0)  # a gate of 0 would not stop a NaN
        scores = mask.logit().unsqueeze(-1).expand(embeddings.shape[:3])
        return Capsules(self._detect(embeddings).flatten(1, 2), scores.flatten(1))

    def _detect(self, embeddings: Tensor) -> Tensor:
        linear = cast(nn.Linear, self.detector[0])
        # W (e + depth) + b without a gradient of the size of the embeddings, which are larger than all the rest.
        return self.detector[1:](F.linear(embeddings, linear.weight) + linear(self.depth))


class EmbeddingMean(nn.Module):
    r"""A linear layer on the mean of each layer's embeddings over the tokens: what capsules are measured against.

    With x = 1 for a token and 0 for padding,

    .. math:: \text{scores} = b + \sum_l W_l \frac{\sum_t x_t e_{tl}}{\sum_t x_t}

    Args:
        layers, width, classes: see :class:`EmbeddingCapsNet`, also for the shapes of input and scores, and the errors.
    """

    def __init__(self, layers: int = 37, width: int = 1280, classes: int = 5):
        super().__init__()
        self.layers, self.width = layers, width
        self.classifier = nn.Linear(layers * width, classes)

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Prediction:
        _check_embeddings(embeddings, mask, self.layers, self.width)
        embeddings = embeddings.to(self.classifier.weight.dtype)
        if mask is None:
            return Prediction(self.classifier(embeddings.mean(1).flatten(1)))
        # Shares first: the sum of half-precision embeddings might not be one.
        share = (mask.float() / mask.float().sum(1, keepdim=True).clamp_min(1e-6)).to(embeddings.dtype)[..., None, None]
        return Prediction(self.classifier((share * embeddings.where(share > 0, 0)).sum(1).flatten(1)))


def _check_embeddings(embeddings: Tensor, mask: Tensor | None, layers: int, width: int) -> None:
    if embeddings.dim() != 4 or embeddings.shape[2:] != (layers, width):
        raise ValueError(
            f"expected embeddings of shape (batch, tokens, {layers}, {width}), layers and width those of the encoder, "
            f"got {tuple(embeddings.shape)}"
        )
    if mask is not None and mask.shape != embeddings.shape[:2]:
        raise ValueError(
            f"expected a mask of shape (batch, tokens) = {tuple(embeddings.shape[:2])}, got {tuple(mask.shape)}"
        )


@register_model
def heinsen_smallnorb(
    classes: int = 5, in_channels: int = 2, parts: int = 64, channels: int = 64, routing: Routing | None = None
) -> StereoCapsNet:
    """Heinsen routing on pairs of images of any size, Figure 3: 271,688 parameters."""
    return StereoCapsNet(in_channels, classes, parts, channels, routing)


@register_model
def heinsen_sst(
    classes: int = 5,
    layers: int = 37,
    width: int = 1280,
    features: int = 64,
    pose: int = 2,
    parts: int = 64,
    routing: Routing | None = None,
) -> EmbeddingCapsNet:
    """Heinsen routing on embeddings of sentences, Figure 5: 140,480 parameters; 2 classes: 138,944."""
    return EmbeddingCapsNet(layers, width, classes, features, pose, parts, routing)


@register_model
def average_pooled_smallnorb(classes: int = 5, in_channels: int = 2, channels: int = 64) -> StereoCNN:
    """The convolutions of heinsen_smallnorb, averaged, and a linear layer."""
    return StereoCNN(in_channels, classes, channels)


@register_model
def mean_pooled_sst(classes: int = 5, layers: int = 37, width: int = 1280) -> EmbeddingMean:
    """The mean of a sentence's embeddings, and a linear layer."""
    return EmbeddingMean(layers, width, classes)


def load_authors_weights(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Read the weights that the author trained and published in 2019, of smallNORB, SST-2 or SST-5.

    Args:
        path: of smallNORB_pretrained_model_state_dict.pt, SST2R_... or SST5R_...
        model: the network to fill; None builds the one whose keys and number of classes the file has.

    Returns:
        The network, in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no state dict, or its keys and shapes are not exactly those of the network, which
            then stays as it was.
    """
    published = _read(path)
    model = _network_of(published, path) if model is None else model
    own = model.state_dict()
    names = {_authors_name(name): name for name in own}
    expected = {name: tuple(own[ours].shape) for name, ours in names.items()}
    expected |= {f"routings.{k}.CONST_one": () for k in range(2)}
    if missing := expected.keys() - published.keys():
        raise _not_the_authors(path, model, f"it has no {_some(missing)}")
    if unknown := published.keys() - expected.keys():
        raise _not_the_authors(path, model, f"it has {_some(unknown)}, which that does not")
    for name, shape in expected.items():
        if published[name].shape != shape:
            raise _not_the_authors(path, model, f"{name} has shape {tuple(published[name].shape)}, expected {shape}")
        if name.endswith("CONST_one") and published[name] != 1:
            raise _not_the_authors(path, model, f"{name} is {published[name].item()}, expected 1")
    model.load_state_dict({ours: published[name] for name, ours in names.items()})
    return model.eval()


def _read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}: the weights are at github.com/glassroom/heinsen_routing")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # there are many ways for bytes not to be a pickle
        raise ValueError(f"{path} cannot be read safely as a state dict ({type(error).__name__}): {ADVICE}") from error
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(x, Tensor) for key, x in state.items()
    ):
        raise ValueError(f"{path} is not a state dict, keys and tensors: {ADVICE}")
    return state


def _network_of(published: dict[str, Tensor], path: str | os.PathLike[str]) -> nn.Module:
    weight = published.get("routings.1.W")
    if weight is not None and weight.dim() == 4 and "convolve.0.weight" in published:
        return heinsen_smallnorb(classes=weight.shape[1])
    if weight is not None and weight.dim() == 4 and "depth_emb" in published:
        return heinsen_sst(classes=weight.shape[1])
    raise ValueError(
        f"{path} is of no network of the author's, which have routings.1.W and convolve.0.weight or depth_emb: {ADVICE}"
    )


def _authors_name(name: str) -> str:
    """What the author's code calls a parameter or a buffer of ours."""
    for ours, theirs in (
        (r"^features\.", "convolve."),
        (r"^scores\.", "compute_a."),
        (r"^poses\.", "compute_mu."),
        (r"^depth$", "depth_emb"),
        (r"^detector\.", "detect_parts."),
        (r"^capsules\.layers\.(\d)\.weight$", r"routings.\1.W"),
        (r"^capsules\.layers\.(\d)\.bias$", r"routings.\1.B"),
        (r"^capsules\.layers\.(\d)\.routing\.beta_use$", r"routings.\1.beta_use"),
        (r"^capsules\.layers\.(\d)\.routing\.beta_ignore$", r"routings.\1.beta_ign"),
    ):
        name = re.sub(ours, theirs, name)
    return name


def _not_the_authors(path: str | os.PathLike[str], model: nn.Module, problem: str) -> ValueError:
    return ValueError(f"{path} does not fit {type(model).__name__}: {problem}; {ADVICE}")


def _some(keys: set[str]) -> str:
    first, *rest = sorted(keys)
    return f"{first} and {len(rest)} more" if rest else first
