"""Capsules for the features of any network: a classifier, and a head for real numbers."""

import copy
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.nn.inputs import SIDES, check_mask
from torchcaps.nn.linear import CapsuleLinear
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.nn.shared import CapsuleShared
from torchcaps.nn.stack import CapsuleStack
from torchcaps.routing import DynamicRouting, HeinsenVectorRouting, Routing, SlotAttention, squash
from torchcaps.utils.arguments import Count, Device, FloatTensor, FloatType, check_input, checked, shown
from torchcaps.utils.private import is_traced

FeatureDims = Literal[0, 1, 2, 3]


class FeatureCapsules(nn.Module, ABC):
    """Capsules of features: what `CapsuleHead` and `CapsuleRegressor` share. The features of all positions become
    primary capsules, which route to one capsule for each output.

    Args:
        in_features, routing, types, pose, parts, dims, device, dtype: see `CapsuleHead`.
        outputs: number of outputs.
        squashes: whether the primary capsules are squashed.
        coordinates: whether the primary capsules are also given the place of their position on its map.
    """

    def __init__(
        self,
        in_features: int,
        outputs: int,
        routing: Routing,
        types: int,
        pose: int,
        parts: int | None,
        dims: FeatureDims | None,
        squashes: bool,
        coordinates: bool,
        **factory: Any,
    ):
        super().__init__()
        if in_features < 2:
            raise ValueError("in_features must be at least 2: a LayerNorm of a single feature is always 0")
        if isinstance(routing, SlotAttention) and routing.start == "random":
            raise ValueError("random slots are the same for all classes: use SlotAttention(start='learned')")
        self.in_features, self.dims = in_features, dims
        self.coordinates = 0 if not coordinates else 2 if dims is None else dims
        self.norm = ChannelNorm()
        scores, normalization = routing.gives_scores, squash if squashes else None
        self.primary = PrimaryCapsules(
            in_features + self.coordinates, types, pose, scores=scores, normalization=normalization, **factory
        )
        # Outputs begin alike, so that the first coefficients are soft, however few children there are.
        last = copy.deepcopy(routing)
        last.shared_variance = max(routing.shared_variance, 0.98)
        sizes = [(types, outputs, last)]
        if parts is not None:
            sizes = [(types, parts, routing), (parts, outputs, last)]
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

    def reset_parameters(self) -> None:
        """Draw the bias of the primary capsules anew; every other parameter of the capsules belongs to a part with a
        method of this name. That of the primary capsules draws another bias: call it first, as `apply` does."""
        bias = self.primary.pose_conv.bias
        assert bias is not None
        # As large as what the features add (0.58): the mean of many positions is then not much shorter than one.
        nn.init.normal_(bias, std=0.7)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.predict(features, mask).evidence

    @checked
    def predict(self, features: Tensor, mask: Tensor | None = None, *, return_coefficients: bool = False) -> Prediction:
        """Return the outputs and their capsules.

        Args:
            features: feature maps, tokens or vectors.
            mask: True for each token that is present, `(batch, tokens)` bool; None for all.
            return_coefficients: also return the coefficients, `(batch, types * positions, outputs)`, types before
                positions; of a layer of parts, `(batch, parts, outputs)`.
        """
        capsules = self.capsules(self.primary_capsules(features, mask), return_coefficients=return_coefficients)
        return Prediction(self.read(capsules), capsules)

    @abstractmethod
    def read(self, capsules: Capsules) -> Tensor:
        """Return the outputs `(batch, outputs)` of their capsules."""

    @checked
    def primary_capsules(self, features: Tensor, mask: Tensor | None = None) -> Capsules:
        """Return the primary capsules `(batch, types, height, width, pose)`, with the scores by which they count.
        Tokens and maps of one dimension are maps of width 1, a vector is a map of one position, and the planes of a
        volume lie below each other."""
        maps = self.norm(self._map(features, mask))
        if self.coordinates:
            places = self._places(features.shape[2:], maps).expand(maps.shape[0], -1, -1, -1)
            maps = torch.cat([maps, places], dim=1)
        capsules = self.primary(maps)
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

    def _places(self, sides: torch.Size, maps: Tensor) -> Tensor:
        """Return the place of each position, a map `(1, coordinates, height, width)`: its center, from -1 to 1 along
        each side. Tokens and vectors, which have no place, are at 0."""
        if len(sides) != self.coordinates:
            return maps.new_zeros(1, self.coordinates, *maps.shape[2:])
        centers = [(2 * torch.arange(n, device=maps.device, dtype=maps.dtype) + 1) / n - 1 for n in sides]
        return torch.stack(torch.meshgrid(*centers, indexing="ij")).reshape(1, self.coordinates, *maps.shape[2:])

    def _map(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return features as a map `(batch, in_features, height, width)`."""
        check_input("features", features, self.primary.pose_conv.weight)
        n, rank, size = self.in_features, features.dim(), tuple(features.shape)
        on_map = bool(self.dims) or (self.dims is None and rank == 4)
        ranks = {None: (2, 3, 4), 0: (2, 3)}.get(self.dims, (2 + (self.dims or 0),))
        if rank not in ranks or size[1 if on_map else -1] != n or 0 in size[1:]:
            tokens = f"tokens (batch, tokens, {n}) or vectors (batch, {n})"
            maps = f"feature maps (batch, {n}, {', '.join(SIDES[self.dims or 2])})"
            expected = {None: f"{maps}, {tokens}", 0: tokens}.get(self.dims, maps)
            raise ValueError(f"expected {expected}, got {size}{self._advice(size)}")
        # A trace takes tokens of any number, which this question would fix.
        if self.dims is None and mask is None and size[1:] == (n, n) and not is_traced():
            raise ValueError(
                f"features {size} may be tokens (batch, tokens, {n}) or maps (batch, {n}, length): make the head with "
                "dims=0 for tokens, or with dims=1 for maps"
            )
        if mask is not None:
            if on_map or rank != 3 or mask.shape != features.shape[:2]:
                expected = "for tokens alone" if on_map or rank != 3 else f"of shape {size[:2]}"
                raise ValueError(f"a mask must be a bool tensor {expected}, got {shown(mask)} and features {size}")
            check_mask(mask)
            if mask.device != features.device:
                raise ValueError(f"the features are on {features.device} and the mask on {mask.device}: move one")
            features = torch.where(mask.unsqueeze(-1), features, 0)  # padding may be NaN
        if on_map:
            return features.unsqueeze(-1) if rank == 3 else features.flatten(2, -2)
        return features[..., None, None] if rank == 2 else features.transpose(1, 2).unsqueeze(-1)

    def _advice(self, size: tuple[int, ...]) -> str:
        n, rank, sides = self.in_features, len(size), 2 if self.dims is None else self.dims  # 0 for tokens and vectors
        takes_tokens = not self.dims
        if 0 in size:
            return ""
        if size == (n,) and takes_tokens:
            return ": a single vector needs features.unsqueeze(0)"
        if sides and rank == 2 + sides and size[-1] == n:
            return ": the channels come last, give features.movedim(-1, 1)"
        if rank == 3 and size[1] == n and takes_tokens:
            advice = f"or make the head with dims=1 if these are maps (batch, {n}, length)"
            return f": the tokens come last, give features.transpose(1, 2), {advice}"
        if rank in (3, 4, 5) and size[1] == n:
            return f": make the head with dims={rank - 2} for such maps"
        if rank == 2 and size[1] % n == 0:
            return ": these may be flattened maps, give the maps themselves"
        if sides and rank == 1 + sides and size[0] == n:
            tokens = "" if self.dims else f", tokens a head with in_features={size[-1]}"
            return f": a single map needs features.unsqueeze(0){tokens}"
        if rank == 4 and size[2] * size[3] == n and takes_tokens:
            return ": tokens with heads of attention need features.flatten(2)"
        if rank == 4 and size[1] * size[3] == n and takes_tokens:
            return ": heads of attention before the tokens need features.transpose(1, 2).flatten(2)"
        if sides and rank == 2 + sides:
            return f": make the head with in_features={size[1]} if these are the channels"
        if rank in (2, 3) and takes_tokens:
            return f": make the head with in_features={size[-1]}"
        return ""


class CapsuleHead(FeatureCapsules):
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
        dims: number of dimensions of the map: 1 for signals, 2 for images, 3 for volumes; 0 for tokens and vectors,
            whose features come last. None chooses by the shape: vectors, tokens, or maps of images.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: feature maps `(batch, in_features, height, width)`, tokens `(batch, tokens, in_features)`, or vectors
          `(batch, in_features)`; with dims=1 maps `(batch, in_features, length)`, and with dims=3 `(batch, in_features,
          depth, height, width)`. With tokens also a mask, `(batch, tokens)` bool: True for a token, and False for
          padding, which changes nothing, whatever its features are. A `key_padding_mask` of PyTorch is the opposite,
          which cannot be seen from the mask: give `~mask`.
        - Output: logits `(batch, classes)`, for cross-entropy or binary cross-entropy.

    Raises:
        ValueError: the routing is slot attention with random slots, there is a single feature, features or mask have
            another shape, or the features are as many tokens as each has features, which may be maps: then give dims.

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
        dims: FeatureDims | None = None,
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        routing = DynamicRouting() if routing is None else routing
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(in_features, classes, routing, types, pose, parts, dims, True, False, **factory)
        self.classes = classes
        # A bias would be equal for all classes. Lengths after a LayerNorm are equal, so they are not read.
        self.reads_presence = routing.measures_presence
        self.classifier = nn.Linear(pose + self.reads_presence, 1, bias=False, **factory)
        self.reset_parameters()

    def read(self, capsules: Capsules) -> Tensor:
        poses = capsules.poses
        if self.reads_presence:
            poses = torch.cat([poses, log_activations(capsules).unsqueeze(-1)], dim=-1)
        logits: Tensor = self.classifier(poses).squeeze(-1)
        return logits

    def extra_repr(self) -> str:
        return f"{self.in_features}, classes={self.classes}"


class CapsuleRegressor(FeatureCapsules):
    r"""Read real numbers from features by capsules: an angle, an age, a size, a place.

    The features :math:`f_p` of each position p, of any scale, and its place :math:`x_p`, from -1 to 1 along each side
    of the map, become `types` primary capsules, which all positions compute by the same weights:

    .. math:: u_{tp} = W_t \, [\text{LayerNorm}(f_p), x_p] + b_t

    They route to one capsule :math:`v_k` for each number, as in a :class:`CapsuleHead`, with a learned score of each
    primary capsule as its gate if the routing gives scores. Each number is read from the pose of its capsule by weights
    and a bias of its own, and scaled by the mean m and the deviation s of the targets (see `standardize`):

    .. math:: y_k = m_k + s_k \, (w_k \cdot v_k + c_k)

    Args:
        in_features: number of channels of a feature map, or of features of a token or a vector.
        numbers: how many numbers it gives.
        routing: routing algorithm; None for `HeinsenVectorRouting()`.
        types: number of types of primary capsules.
        pose: number of entries of every pose.
        coordinates: give the primary capsules their place on the map. Without it the numbers cannot depend on places
            that the features do not know. Tokens and vectors have no place.
        dims: number of dimensions of the map, see :class:`CapsuleHead`.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: features, and with tokens a mask, as a :class:`CapsuleHead` takes them.
        - Output: numbers `(batch, numbers)`, in the units of the targets, for a squared error.
        - `mean`, `deviation`: `(numbers,)`, buffers, 0 and 1 before `standardize`.

    Raises:
        ValueError: the routing is slot attention with random slots, there is a single feature, or features, mask or
            targets have another shape; targets are not finite, or all equal.

    Example:
        >>> import torch
        >>> from torchcaps import CapsuleRegressor
        >>> head = CapsuleRegressor(64, numbers=2)
        >>> head.standardize(torch.tensor([[20.0, 1.5], [60.0, 1.9]]))  # all targets of the training samples
        >>> head(torch.randn(8, 64, 7, 7)).shape
        torch.Size([8, 2])
    """

    mean: Tensor
    deviation: Tensor

    @checked
    def __init__(
        self,
        in_features: Count,
        numbers: Count,
        routing: Routing | None = None,
        types: Count = 16,
        pose: Count = 16,
        coordinates: bool = True,
        dims: FeatureDims | None = None,
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        routing = HeinsenVectorRouting() if routing is None else routing
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(in_features, numbers, routing, types, pose, None, dims, False, coordinates, **factory)
        self.numbers = numbers
        self.weight = nn.Parameter(torch.empty(numbers, pose, **factory))
        self.bias = nn.Parameter(torch.empty(numbers, **factory))
        self.register_buffer("mean", torch.empty(numbers, **factory))
        self.register_buffer("deviation", torch.empty(numbers, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset what belongs to no part, see `CapsuleHead`; the mean and the deviation of the targets too."""
        super().reset_parameters()
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.mean)
        nn.init.ones_(self.deviation)

    @checked
    def standardize(self, targets: FloatTensor) -> None:
        """Set the mean and the deviation of the numbers from the targets of all training samples, `(samples, numbers)`.
        Call it once before training: the network then learns numbers of mean 0 and deviation 1, whatever their units
        are."""
        if targets.dim() != 2 or targets.shape[1] != self.numbers or not len(targets):
            raise ValueError(f"expected targets of shape (samples, {self.numbers}), got {tuple(targets.shape)}")
        targets = targets.detach().double()
        for k, column in enumerate(targets.unbind(1)):
            if not column.isfinite().all():
                raise ValueError(
                    f"the targets of number {k} are not all finite: leave out the samples without a number"
                )
            if column.min() == column.max():
                raise ValueError(
                    f"the targets of number {k} are all {column[0]:g}: there is nothing to learn, leave it out"
                )
        deviation, mean = torch.std_mean(targets, dim=0, correction=0)
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)

    def read(self, capsules: Capsules) -> Tensor:
        return self.mean + self.deviation * ((capsules.poses * self.weight).sum(-1) + self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, numbers={self.numbers}"


class ChannelNorm(nn.Module):
    """LayerNorm over the channels at each position of a map, without parameters."""

    def forward(self, features: Tensor) -> Tensor:
        return F.layer_norm(features.movedim(1, -1), features.shape[1:2]).movedim(-1, 1)


def log_activations(capsules: Capsules) -> Tensor:
    """Return the logarithms of activations, `(batch, capsules)`. Lengths below 1e-6 count as 1e-6."""
    if capsules.scores is not None:
        return F.logsigmoid(capsules.scores)
    return capsules.activations.clamp_min(1e-6).log()
