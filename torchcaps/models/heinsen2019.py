"""The networks of Heinsen: An Algorithm for Routing Capsules in All Domains (2019).

Where the text leaves something out or differs, these networks follow the author's code and published weights
(github.com/glassroom/heinsen_routing):

- Coordinates of pixels are (row, column).
- The language network normalizes last; the text puts the normalization first.
- The six 3x3 convolutions are initialized by He et al., the 1x1 convolutions as in PyTorch.

`heinsen2019_weights.py` loads the published weights.
"""

from collections import OrderedDict
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.cnn import FeatureClassifier
from torchcaps.models.inputs import check_embeddings, check_images, without_padding
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleLinear, CapsuleStack
from torchcaps.nn.pose import Pose, matrix_shape
from torchcaps.ops import evenly_spaced
from torchcaps.routing import HeinsenRouting, Routing
from torchcaps.utils.arguments import Count, checked

SMALLEST_SIDE = 29  # height and width of an image that the six convolutions can take


class PartsCapsNet(nn.Module):
    """Two capsule layers: any number of children, a fixed number of parts, one capsule per class.

    The children share their weights. A subclass computes them.

    Args:
        in_pose: pose of a child.
        parts, classes: number of parts, and number of class capsules.
        pose: pose of a part and of a class.
        routing: routing of both layers; None for `HeinsenRouting(3, init="paper")`. If it gives no scores, a linear
            layer that the classes share turns the poses into logits.

    Attributes:
        capsules: stack of the two capsule layers.
    """

    @checked
    def __init__(self, in_pose: Pose, parts: Count, classes: Count, pose: Pose, routing: Routing | None):
        super().__init__()
        routing = HeinsenRouting(iterations=3, init="paper") if routing is None else routing
        rows, features = matrix_shape(pose)
        self.capsules = CapsuleStack(
            CapsuleLinear(None, parts, in_pose, pose, routing, bias=True),
            CapsuleLinear(parts, classes, pose, pose, routing, bias=True),
        )
        self.classifier = None if routing.gives_scores else nn.Linear(rows * features, 1)

    def classify(self, children: Capsules, return_coefficients: bool) -> Prediction:
        """Route the children to class capsules; the scores of the classes are logits."""
        capsules = self.capsules(children, return_coefficients=return_coefficients)
        if self.classifier is None:
            return Prediction(capsules.scores, capsules)
        return Prediction(self.classifier(capsules.poses.flatten(2)).squeeze(-1), capsules)


class StereoCapsNet(PartsCapsNet):
    r"""Network for smallNORB: six convolutions find parts of toys and their poses, two capsule layers classify.

    .. math::
        x = (\text{images}, \text{rows}, \text{columns}), \quad
        x \leftarrow \text{swish}(\text{conv}_{3 \times 3}(\text{BN}(x))) \text{ six times}, \\
        a = \text{conv}_{1 \times 1}(\text{BN}(x)), \quad \mu = \text{conv}_{1 \times 1}(\text{BN}(x)), \quad
        \text{classes} = \text{routing}(\text{routing}(a, \mu))

    Args:
        in_channels: number of channels of an image; 2 for a stereo pair of gray images.
        classes: number of class capsules.
        parts: number of child types, and number of parts.
        channels: number of channels of the convolutions.
        routing: routing of both capsule layers, see :class:`PartsCapsNet`.

    Shape:
        - Input: `(batch, in_channels, height, width)`, values in [0, 1], at least 29x29 pixels.
        - Output: a Prediction: scores `(batch, classes)`, which are logits, and the class capsules, poses
          `(batch, classes, 4, 4)`.

    Raises:
        ValueError: if the images have another shape.

    Reference:
        Heinsen 2019, section 3.1 and Figure 3.
    """

    @checked
    def __init__(
        self,
        in_channels: Count = 2,
        classes: Count = 5,
        parts: Count = 64,
        channels: Count = 64,
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
        """Return the children on a grid, `(batch, parts, rows, columns, 4, 4)`, with scores; 9x9 for 96x96 pixels."""
        check_images(images, (self.in_channels, None, None), next(self.parameters(), None), SMALLEST_SIDE)
        features = self.features(with_coordinates(images))
        poses = self.poses(features).unflatten(1, (-1, 4, 4)).movedim((2, 3), (-2, -1))
        return Capsules(poses, self.scores(features))


def stereo_convolutions(in_channels: int, channels: int) -> nn.Sequential:
    """Build the six convolutions of Figure 3, for images with coordinates."""
    layers: list[nn.Module] = []
    before = in_channels + 2
    for stride in (1, 2, 1, 2, 1, 2):
        conv = nn.Conv2d(before, channels, 3, stride)
        nn.init.kaiming_normal_(conv.weight)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [nn.BatchNorm2d(before), conv, nn.SiLU()]
        before = channels
    return nn.Sequential(*layers)


def with_coordinates(images: Tensor) -> Tensor:
    """Add two channels to images: each pixel's row and column, evenly spaced from -1 to 1 (Figure 3b)."""
    grid = torch.meshgrid(*(evenly_spaced(length, images) for length in images.shape[-2:]), indexing="ij")
    return torch.cat([images, torch.stack(grid).expand(images.shape[0], -1, -1, -1)], dim=1)


class Coordinates(nn.Module):
    """Add coordinates to images, as :func:`with_coordinates` does."""

    def forward(self, images: Tensor) -> Tensor:
        return with_coordinates(images)


class EmbeddingCapsNet(PartsCapsNet):
    r"""Network for embedded sentences: one capsule per token and encoder layer, and two capsule layers that classify.

    Let e be the embedding of a token in layer l of the encoder, and x the mask, 1 for a token and 0 for padding. Then

    .. math::
        a = \log \frac{x}{1 - x}, \quad \mu = \text{LayerNorm}(\text{swish}(W (e + \text{depth}_l) + b)), \quad
        \text{classes} = \text{routing}(\text{routing}(a, \mu))

    Args:
        layers: number of embeddings per token, one for each layer of the encoder and one for its input.
        width: size of an embedding.
        classes: number of class capsules.
        features: number of features of a child.
        pose: number of features of a part and of a class; both are vectors.
        parts: number of parts.
        routing: routing of both capsule layers, see :class:`PartsCapsNet`.

    Shape:
        - Input: embeddings `(batch, tokens, layers, width)` with any number of tokens, and a mask `(batch, tokens)`,
          bool (True for a token) or numbers from 0 (padding) to 1 (a token), or None without padding. A
          `key_padding_mask` of PyTorch is the opposite: give `~mask`. A number between 0 and 1 gates a token, as in
          mixup, and has a gradient; a 0 or 1 has none. On the CPU, numbers outside of [0, 1] raise an error; on other
          devices, where reading them would take time, they make the output NaN. Embeddings of padding change nothing,
          even if they are NaN.
        - Output: a Prediction: scores `(batch, classes)`, which are logits, and the class capsules, poses
          `(batch, classes, pose)`.

    Raises:
        ValueError: if the embeddings or the mask have another shape.

    Reference:
        Heinsen 2019, section 4.1 and Figure 5.
    """

    @checked
    def __init__(
        self,
        layers: Count = 37,
        width: Count = 1280,
        classes: Count = 5,
        features: Count = 64,
        pose: Count = 2,
        parts: Count = 64,
        routing: Routing | None = None,
    ):
        super().__init__(features, parts, classes, pose, routing)
        self.layers, self.width = layers, width
        self.depth = nn.Parameter(torch.zeros(layers, width))
        linear = nn.Linear(width, features)
        nn.init.kaiming_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.detector = nn.Sequential(linear, nn.SiLU(), nn.LayerNorm(features))

    def reset_parameters(self) -> None:
        """Set the embeddings of the layers to zero, as at the beginning."""
        nn.init.zeros_(self.depth)

    @checked
    def forward(
        self, embeddings: Tensor, mask: Tensor | None = None, *, return_coefficients: bool = False
    ) -> Prediction:
        return self.classify(self.primary_capsules(embeddings, mask), return_coefficients)

    def primary_capsules(self, embeddings: Tensor, mask: Tensor | None = None) -> Capsules:
        """Return one child per token and layer, `(batch, tokens * layers, features)`, with scores if there is a
        mask."""
        check_embeddings(embeddings, mask, self.depth)
        embeddings, scores = without_padding(embeddings.to(self.depth.dtype), mask)
        return Capsules(self._detect(embeddings).flatten(1, 2), scores)

    def _detect(self, embeddings: Tensor) -> Tensor:
        linear = cast(nn.Linear, self.detector[0])
        # W e + (W depth + b) in place of W (e + depth) + b saves a gradient of the size of the embeddings, which are
        # larger than everything else.
        return self.detector[1:](F.linear(embeddings, linear.weight) + linear(self.depth))


class EmbeddingMean(nn.Module):
    r"""Baseline for :class:`EmbeddingCapsNet`: a linear layer on the mean of each layer's embeddings over the tokens.

    With x = 1 for a token and 0 for padding,

    .. math:: \text{scores} = b + \sum_l W_l \frac{\sum_t x_t e_{tl}}{\sum_t x_t}

    Shapes of input and scores, and errors, are those of :class:`EmbeddingCapsNet`.

    Args:
        layers: number of embeddings per token.
        width: size of an embedding.
        classes: number of classes.
    """

    @checked
    def __init__(self, layers: Count = 37, width: Count = 1280, classes: Count = 5):
        super().__init__()
        self.layers, self.width = layers, width
        self.classifier = nn.Linear(layers * width, classes)

    @checked
    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Prediction:
        check_embeddings(embeddings, mask, self.classifier.weight.view(-1, self.layers, self.width)[0])
        embeddings = embeddings.to(self.classifier.weight.dtype)
        if mask is None:
            return Prediction(self.classifier(embeddings.mean(1).flatten(1)))
        # The mask is normalized before the sum, because a sum of half-precision embeddings may overflow.
        mask = mask.to(torch.promote_types(embeddings.dtype, torch.float32))
        weights = (mask / mask.sum(1, keepdim=True).clamp_min(1e-6)).to(embeddings.dtype)[..., None, None]
        return Prediction(self.classifier((weights * embeddings.where(weights > 0, 0)).sum(1).flatten(1)))


@register_model
def heinsen_smallnorb(
    classes: Count = 5, in_channels: Count = 2, parts: Count = 64, channels: Count = 64, routing: Routing | None = None
) -> StereoCapsNet:
    """Heinsen routing on pairs of images of any size, Figure 3: 271,688 parameters."""
    return StereoCapsNet(in_channels, classes, parts, channels, routing)


@register_model
def heinsen_sst(
    classes: Count = 5,
    layers: Count = 37,
    width: Count = 1280,
    features: Count = 64,
    pose: Count = 2,
    parts: Count = 64,
    routing: Routing | None = None,
) -> EmbeddingCapsNet:
    """Heinsen routing on embeddings of sentences, Figure 5: 140,480 parameters; 2 classes: 138,944."""
    return EmbeddingCapsNet(layers, width, classes, features, pose, parts, routing)


@register_model
def average_pooled_smallnorb(classes: Count = 5, in_channels: Count = 2, channels: Count = 64) -> FeatureClassifier:
    """Baseline: the convolutions of heinsen_smallnorb, an average over positions and a linear layer."""
    convolutions = stereo_convolutions(in_channels, channels).named_children()
    features = nn.Sequential(OrderedDict([("coordinates", Coordinates()), *convolutions]))
    classifier = nn.Sequential(
        nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )
    return FeatureClassifier(features, classifier, (in_channels, None, None), SMALLEST_SIDE)


@register_model
def mean_pooled_sst(classes: Count = 5, layers: Count = 37, width: Count = 1280) -> EmbeddingMean:
    """Baseline: the mean of a sentence's embeddings and a linear layer."""
    return EmbeddingMean(layers, width, classes)
