"""Primary capsules, the first of a network: channels of a feature map, grouped into poses."""

import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.inputs import Padding, Size, check_map, size_of_sides
from torchcaps.nn.layer import gatherable
from torchcaps.nn.pose import Pose, pose_shape, show_pose
from torchcaps.routing import squash
from torchcaps.utils.arguments import Count, Device, FloatType, apply, checked

Dims = Literal[1, 2, 3]
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class PrimaryCapsules(nn.Module):
    r"""Capsules on a line, a grid or in a volume, computed from a feature map by a convolution.

    With f the number of features of a pose, the capsule of type t at position p has

    .. math:: \text{pose}_{t,p} = \text{normalization}(\text{conv}(\text{input})_{tf:(t+1)f,\, p})

    Args:
        in_channels: number of channels of the feature map.
        out_capsules: number of capsule types at each position.
        out_pose: pose of a capsule, an int (a vector) or (rows, features) (a matrix).
        kernel_size, stride, padding, groups, bias: options of the convolution, as in `nn.Conv2d`, an int or a tuple
            with a number for each dimension of the map; with as many groups as channels it is depthwise (Mazzia et al.
            2021).
        normalization: function of poses flattened to `(..., features)`: `squash` (Sabour et al. 2017),
            `nn.LayerNorm(features)` (Tsai et al. 2020), or None.
        scores: also give each capsule a score, computed by a second convolution (Hinton et al. 2018).
        dims: number of dimensions of the map: 1 for signals, 2 for images, 3 for volumes.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: `(batch, in_channels, length)`, `(batch, in_channels, height, width)` or `(batch, in_channels, depth,
          height, width)`, as `dims` says.
        - Output: poses `(batch, out_capsules, height_out, width_out, *out_pose)` and, with `scores=True`, scores
          `(batch, out_capsules, height_out, width_out)`; so for the other sides.
    """

    @checked
    def __init__(
        self,
        in_channels: Count,
        out_capsules: Count,
        out_pose: Pose,
        kernel_size: Size = 1,
        stride: Size = 1,
        padding: Padding = 0,
        groups: Count = 1,
        bias: bool = True,
        normalization: Callable[[Tensor], Tensor] | None = squash,
        scores: bool = False,
        dims: Dims = 2,
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        self.in_channels, self.out_capsules, self.out_pose = in_channels, out_capsules, pose_shape(out_pose)
        sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
        of_sides = {name: size_of_sides(name, size, dims) for name, size in sizes.items()}
        self.dims, self.padding = dims, of_sides["padding"]
        self.features = math.prod(self.out_pose)
        channels = [in_channels, out_capsules * self.features, *([out_capsules] if scores else [])]
        if any(count % groups for count in channels):
            raise ValueError(f"groups={groups} must divide the channels of input and outputs: {channels}")

        def conv(channels: int) -> Any:
            factory: dict[str, Any] = {"device": device, "dtype": dtype}
            return CONVOLUTIONS[dims](in_channels, channels, **of_sides, groups=groups, bias=bias, **factory)

        self.pose_conv = conv(out_capsules * self.features)
        self.score_conv = conv(out_capsules) if scores else None
        if isinstance(normalization, nn.Module):
            normalization.to(device=device, dtype=dtype)
        self.normalization = normalization

    def forward(self, features: Tensor) -> Capsules:
        check_map(features, self.in_channels, self.pose_conv.weight, self.dims)
        padded = (size + 2 * padding for size, padding in zip(features.shape[2:], self.padding, strict=True))
        if any(size < kernel for size, kernel in zip(padded, self.pose_conv.kernel_size, strict=True)):
            raise ValueError(
                f"a map of {'x'.join(map(str, features.shape[2:]))} is too small for "
                f"kernel_size={self.pose_conv.kernel_size} and padding={self.padding}"
            )
        poses = self.pose_conv(features).unflatten(1, (self.out_capsules, self.features)).movedim(2, -1)
        poses = apply("normalization", self.normalization, poses)
        scores = None if self.score_conv is None else self.score_conv(features)
        capsules = Capsules(poses.unflatten(-1, self.out_pose), scores, pose_dims=len(self.out_pose))
        return gatherable(self, capsules)

    def extra_repr(self) -> str:
        normalization = getattr(self.normalization, "__name__", self.normalization)
        return f"out_capsules={self.out_capsules}, out_pose={show_pose(self.out_pose)}, normalization={normalization}"
