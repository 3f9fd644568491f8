"""Convolutions of capsules on a grid or in a sequence: each parent sees a window of children."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.inputs import SIDES, Padding, Size, as_capsules, size_of_sides
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.pose import Pose, check_rows, matrix_shape, pose_shape, show_pose, show_size
from torchcaps.ops import Backend, LinearVotes, gates_of, positions, windows
from torchcaps.routing import LayerShape, Routing
from torchcaps.utils.arguments import Count, Device, FloatType, checked


class _CapsuleConv(CapsuleLayer):
    """Convolution of capsules along one or two sides; a sequence is computed as a grid of height 1."""

    sides: tuple[str, ...]

    weight: nn.Parameter

    @checked
    def __init__(
        self,
        in_capsules: Count,
        out_capsules: Count,
        in_pose: Pose,
        out_pose: Pose,
        kernel_size: Size,
        routing: Routing,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        bias: bool = False,
        backend: Backend = "auto",
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        self.backend = backend
        check_rows(in_pose, out_pose)
        self.in_capsules, self.out_capsules = in_capsules, out_capsules
        self.in_pose, self.out_pose = pose_shape(in_pose), pose_shape(out_pose)
        sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        of_sides = (size_of_sides(name, size, len(self.sides)) for name, size in sizes.items())
        self.kernel_size, self.stride, self.padding, self.dilation = of_sides
        rows, d = matrix_shape(in_pose)
        _, h = matrix_shape(out_pose)
        window = (in_capsules, *self.kernel_size, out_capsules)
        self.weight = nn.Parameter(torch.empty(*window, d, h, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(*window, rows, h, device=device, dtype=dtype)) if bias else None
        children = self.weight.shape[:-3].numel()
        window_size = math.prod(self.kernel_size)
        self.layer_shape = LayerShape(children, children, out_capsules, rows, d, h, window=window_size)
        self.routing = routing.for_layer(self.layer_shape, device, dtype)
        self.reset_parameters()

    def votes(self, capsules: Capsules | Tensor) -> LinearVotes:
        """Return the votes of the children of each window for the parents at its position."""
        capsules = as_capsules(capsules, self.weight, takes_half=True)
        poses, scores = capsules.poses, capsules.scores
        self._check(poses, scores)
        shape = tuple(poses.shape[1 : 2 + len(self.sides)])
        line = len(self.sides) == 1
        rows, d = matrix_shape(self.in_pose)
        poses = poses.reshape(*poses.shape[: -len(self.in_pose)], rows, d)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        (kernel, stride, padding, dilation) = self.kernel_size, self.stride, self.padding, self.dilation
        if line:
            poses, weight = poses.unsqueeze(2), weight.unsqueeze(1)
            bias = None if bias is None else bias.unsqueeze(1)
            scores = None if scores is None else scores.unsqueeze(2)
            kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
        down, across = padding
        if down or across:
            if scores is None:
                scores = poses.new_full(poses.shape[:4], torch.inf)
            margin = (across, across, down, down)
            poses, scores = F.pad(poses, (0, 0, 0, 0, *margin)), F.pad(scores, margin, value=-torch.inf)
        pairs = (stride[0], stride[1]), (dilation[0], dilation[1])
        votes = LinearVotes(poses, weight, bias, self.out_pose, *pairs, line=line, backend=self.backend)
        votes.layout = shape
        return votes.gated(None if scores is None else windows(gates_of(scores), (kernel[0], kernel[1]), *pairs))

    def _check(self, poses: Tensor, scores: Tensor | None) -> None:
        shape, end = tuple(poses.shape), 2 + len(self.sides)
        if len(shape) != end + len(self.in_pose) or shape[1] != self.in_capsules or shape[end:] != self.in_pose:
            expected = ", ".join(map(str, ("batch", self.in_capsules, *self.sides, *self.in_pose)))
            raise ValueError(f"expected poses of shape ({expected}), got {shape}")
        if scores is not None and tuple(scores.shape) != shape[:end]:
            raise ValueError(f"expected scores of shape {shape[:end]}, got {tuple(scores.shape)}")
        for i, (side, kernel) in enumerate(zip(self.sides, self.kernel_size, strict=True)):
            size = shape[2 + i] + 2 * self.padding[i]
            if positions(size, kernel, self.stride[i], self.dilation[i]) < 1:
                raise ValueError(
                    f"{side} {shape[2 + i]} is too small for kernel_size={kernel} (with padding={self.padding[i]}, "
                    f"dilation={self.dilation[i]})"
                )

    def extra_repr(self) -> str:
        options = [("stride", self.stride, 1), ("padding", self.padding, 0), ("dilation", self.dilation, 1)]
        shown = [f", {name}={show_size(size)}" for name, size, default in options if set(size) != {default}]
        return (
            f"{self.in_capsules}, {self.out_capsules}, in_pose={show_pose(self.in_pose)}, "
            f"out_pose={show_pose(self.out_pose)}, kernel_size={show_size(self.kernel_size)}"
            + "".join(shown)
            + (", bias=True" if self.bias is not None else "")
            + ("" if self.backend == "auto" else f", backend={self.backend!r}")
        )


class CapsuleConv2d(_CapsuleConv):
    r"""Convolution of capsules on a grid: at each position, all children of a window vote for all parents there.

    .. math:: V_{(c,k,l),j} = \text{pose}_{c,\, s y + \delta k,\, s x + \delta l} \, W_{c,k,l,j} + B_{c,k,l,j}

    with the stride s and the dilation :math:`\delta`. Each window is routed on its own: the parents at one position
    compete for its children.

    Args:
        in_capsules: number of child types.
        out_capsules: number of parent types.
        in_pose, out_pose: poses of children and of parents, an int (a vector) or (rows, features) (a matrix) each;
            their numbers of rows must be equal.
        kernel_size, stride, dilation: size, stride and dilation of the windows, an int or a pair (down, across) each.
        routing: routing algorithm; the layer keeps a copy with parameters of its own, shared over positions.
        padding: number of positions added on each side, an int or a pair. They hold no capsule and change nothing.
        bias: learn the B of the votes, initially zero.
        backend: implementation of the reductions over votes, see :func:`torchcaps.use_backend`.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, in_capsules, height, width, *in_pose)`.
        - Output: poses `(batch, out_capsules, height_out, width_out, *out_pose)` with
          `height_out = (height + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1`. With
          `return_coefficients=True` also coefficients `(batch, height_out, width_out, in_capsules, kernel_size,
          kernel_size, out_capsules)`.
        - `weight`: `(in_capsules, kernel_size, kernel_size, out_capsules, d, h)`.
    """

    sides = SIDES[2]


class CapsuleConv1d(_CapsuleConv):
    r"""Convolution of capsules in a sequence: at each position, all children of a window vote for all parents there.

    .. math:: V_{(c,k),j} = \text{pose}_{c,\, s x + \delta k} \, W_{c,k,j} + B_{c,k,j}

    The arguments are those of :class:`CapsuleConv2d`, with one int each for kernel_size, stride, padding and dilation.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, in_capsules, length, *in_pose)`.
        - Output: poses `(batch, out_capsules, length_out, *out_pose)` with
          `length_out = (length + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1`. With
          `return_coefficients=True` also coefficients `(batch, length_out, in_capsules, kernel_size, out_capsules)`.
        - `weight`: `(in_capsules, kernel_size, out_capsules, d, h)`.
    """

    sides = SIDES[1]
