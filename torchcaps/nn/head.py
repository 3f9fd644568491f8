"""A classifier of capsules for the features of any network."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.nn.inputs import check_mask
from torchcaps.nn.linear import CapsuleLinear
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.nn.shared import CapsuleShared
from torchcaps.nn.stack import CapsuleStack
from torchcaps.routing import DynamicRouting, Routing, SlotAttention
from torchcaps.utils.arguments import Count, Device, FloatType, check_input, checked, shown


class CapsuleHead(nn.Module):
    r"""Classify features by capsules: primary capsules, class capsules, and a logit for each class.

    The features :math:`f_p` of each position p, of any scale, become `types` primary capsules, which all positions
    compute by the same weights:

    .. math:: u_{tp} = \text{squash}(W_t \, \text{LayerNorm}(f_p) + b_t)

    They route to one capsule :math:`v_j` for each class. The positions share the vote weights of a type, and each
    counts 1 / positions, so that the number of positions changes neither the lengths of the first class capsules nor
    how soft the first coefficients are. If the routing gives scores, a learned score of each primary capsule is its
    gate as well. A linear map without bias, which the classes share, reads the pose of a class capsule and, if its
    activation :math:`a_j` says how present the class is (`routing.measures_presence`), the logarithm of the activation:

    .. math:: \text{logit}_j = w \cdot v_j + u \log a_j

    Args:
        in_features: number of channels of a feature map, or of features of a token or a vector.
        classes: number of classes.
        routing: routing algorithm; None for `DynamicRouting()`. Classes need slots that differ, so that slot attention
            needs start="learned".
        types: number of types of primary capsules.
        pose: number of entries of every pose.
        parts: number of capsules in a layer between primary and class capsules; None for no such layer.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: feature maps `(batch, in_features, height, width)`, tokens `(batch, tokens, in_features)`, or vectors
          `(batch, in_features)`. With tokens also a mask, `(batch, tokens)` bool: True for a token, and False for
          padding, which changes nothing, whatever its features are. A `key_padding_mask` of PyTorch is the opposite,
          which cannot be seen from the mask: give `~mask`.
        - Output: logits `(batch, classes)`, for cross-entropy or binary cross-entropy.

    Raises:
        ValueError: the routing is slot attention with random slots, there is a single feature, or features or mask have
            another shape.

    Example:
        >>> import torch
        >>> from torchcaps import CapsuleHead, EMRouting
        >>> head = CapsuleHead(64, classes=10, routing=EMRouting())
        >>> head(torch.randn(8, 64, 7, 7)).shape
        torch.Size([8, 10])
        >>> head.predict(torch.randn(8, 64, 7, 7)).capsules.poses.shape
        torch.Size([8, 10, 16])
    """

    @checked
    def __init__(
        self,
        in_features: Count,
        classes: Count,
        routing: Routing | None = None,
        types: Count = 16,
        pose: Count = 16,
        parts: Count | None = None,
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        routing = DynamicRouting() if routing is None else routing
        if in_features < 2:
            raise ValueError("in_features must be at least 2: a LayerNorm of a single feature is always 0")
        if isinstance(routing, SlotAttention) and routing.start == "random":
            raise ValueError("random slots are the same for all classes: use SlotAttention(start='learned')")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_features, self.classes = in_features, classes
        self.norm = ChannelNorm()
        self.primary = PrimaryCapsules(in_features, types, pose, scores=routing.gives_scores, **factory)
        # Classes begin alike, so that the first coefficients are soft, however few children there are.
        of_classes = copy.deepcopy(routing)
        of_classes.shared_variance = max(routing.shared_variance, 0.98)
        sizes = [(types, classes, of_classes)]
        if parts is not None:
            sizes = [(types, parts, routing), (parts, classes, of_classes)]
        layers: list[Any] = []
        for children, parents, own in sizes:
            first = not layers
            if routing.needs_poses:
                layers.append(CapsuleShared(None if first else children, parents, pose, own, **factory))
            else:
                expected = types if first else None
                layer = CapsuleLinear(
                    children, parents, pose, pose, own, share_positions=first, expected_children=expected, **factory
                )
                layers.append(layer)
        self.capsules = CapsuleStack(*layers)
        # A bias would be equal for all classes. Lengths after a LayerNorm are equal, so they are not read.
        self.reads_presence = routing.measures_presence
        self.classifier = nn.Linear(pose + self.reads_presence, 1, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the bias of the primary capsules anew; every other parameter belongs to a part with a method of this
        name. That of the primary capsules draws another bias: call it first, as `apply` does."""
        bias = self.primary.pose_conv.bias
        assert bias is not None
        # As large as what the features add (0.58): the mean of many positions is then not much shorter than one.
        nn.init.normal_(bias, std=0.7)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.predict(features, mask).evidence

    @checked
    def predict(self, features: Tensor, mask: Tensor | None = None, *, return_coefficients: bool = False) -> Prediction:
        """Return the logits and the class capsules.

        Args:
            features: feature maps, tokens or vectors.
            mask: True for each token that is present, `(batch, tokens)` bool; None for all.
            return_coefficients: also return the coefficients, `(batch, types * positions, classes)`, types before
                positions; of a layer of parts, `(batch, parts, classes)`.
        """
        capsules = self.capsules(self.primary_capsules(features, mask), return_coefficients=return_coefficients)
        read = capsules.poses
        if self.reads_presence:
            read = torch.cat([read, log_activations(capsules).unsqueeze(-1)], dim=-1)
        return Prediction(self.classifier(read).squeeze(-1), capsules)

    @checked
    def primary_capsules(self, features: Tensor, mask: Tensor | None = None) -> Capsules:
        """Return the primary capsules `(batch, types, height, width, pose)`, with the scores by which they count.
        Tokens are a map of width 1, and a vector is a map of one position."""
        capsules = self.primary(self.norm(self._map(features, mask)))
        poses = capsules.poses
        dtype = torch.promote_types(poses.dtype, torch.float32)
        present = torch.ones_like(poses[:, 0, ..., 0], dtype=torch.bool) if mask is None else mask.unsqueeze(2)
        positions = present.sum((1, 2), keepdim=True, dtype=dtype).clamp_min(1)
        log_gate = torch.where(present, -positions.log(), -torch.inf).unsqueeze(1)
        if capsules.scores is not None:
            # Below zero, where the logarithm below would have no gradient.
            log_gate = (log_gate + F.logsigmoid(capsules.scores.to(dtype))).clamp_max(-torch.finfo(dtype).tiny)
        scores = log_gate - (-torch.expm1(log_gate)).log()  # whose sigmoid is the gate
        return capsules._replace(scores=scores.expand(poses.shape[:-1]))

    def _map(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return features as a map `(batch, in_features, height, width)`."""
        check_input("features", features, self.primary.pose_conv.weight)
        dims, size = features.dim(), tuple(features.shape)
        if dims not in (2, 3, 4) or size[1 if dims == 4 else -1] != self.in_features or 0 in size[1:]:
            raise ValueError(
                f"expected feature maps (batch, {self.in_features}, height, width), tokens (batch, tokens, "
                f"{self.in_features}) or vectors (batch, {self.in_features}), got {size}{self._advice(size)}"
            )
        if mask is not None:
            if dims != 3 or mask.shape != features.shape[:2]:
                expected = f"of shape {size[:2]}" if dims == 3 else "for tokens alone"
                raise ValueError(f"a mask must be a bool tensor {expected}, got {shown(mask)} and features {size}")
            check_mask(mask)
            if mask.device != features.device:
                raise ValueError(f"the features are on {features.device} and the mask on {mask.device}: move one")
            features = torch.where(mask.unsqueeze(-1), features, 0)  # padding may be NaN
        if dims == 4:
            return features
        return features[..., None, None] if dims == 2 else features.transpose(1, 2).unsqueeze(-1)

    def _advice(self, size: tuple[int, ...]) -> str:
        if 0 in size:
            return ""
        if size == (self.in_features,):
            return ": a single vector needs features.unsqueeze(0)"
        if len(size) == 4 and size[3] == self.in_features:
            return ": the channels come last, give features.movedim(-1, 1)"
        if len(size) == 3 and size[1] == self.in_features:
            return ": the tokens come last, give features.transpose(1, 2)"
        if len(size) == 2 and size[1] % self.in_features == 0:
            return ": these may be flattened maps, give the maps themselves"
        if len(size) == 3 and size[0] == self.in_features:
            return f": a single map needs features.unsqueeze(0), tokens a head with in_features={size[-1]}"
        if len(size) == 4 and size[2] * size[3] == self.in_features:
            return ": tokens with heads of attention need features.flatten(2)"
        if len(size) == 4 and size[1] * size[3] == self.in_features:
            return ": heads of attention before the tokens need features.transpose(1, 2).flatten(2)"
        if len(size) == 4:
            return f": make the head with in_features={size[1]} if these are the channels"
        if len(size) in (2, 3):
            return f": make the head with in_features={size[-1]}"
        return ""

    def extra_repr(self) -> str:
        return f"{self.in_features}, classes={self.classes}"


class ChannelNorm(nn.Module):
    """LayerNorm over the channels at each position of a map, without parameters."""

    def forward(self, features: Tensor) -> Tensor:
        return F.layer_norm(features.movedim(1, -1), features.shape[1:2]).movedim(-1, 1)


def log_activations(capsules: Capsules) -> Tensor:
    """Return the logarithms of activations, `(batch, capsules)`. Lengths below 1e-6 count as 1e-6."""
    if capsules.scores is not None:
        return F.logsigmoid(capsules.scores)
    return capsules.activations.clamp_min(1e-6).log()
