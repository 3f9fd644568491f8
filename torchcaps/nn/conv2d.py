"""Capsules on a grid, each parent seeing a window of children."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.pose import Pose, as_capsules, check_rows, matrix_shape, pose_shape, show_pose
from torchcaps.ops import Backend, LazyVotes, check_backend, windows
from torchcaps.routing import Routing, presence


class CapsuleConv2d(CapsuleLayer):
    r"""A convolution of capsules: at each position, all children of a window vote for all parents there.

    .. math:: V_{(c,k,l),j} = \text{pose}_{c, s y + k, s x + l} \, W_{c,k,l,j} + B_{c,k,l,j}

    Each window is routed on its own: the parents at one position compete for its children.

    Args:
        in_capsules: child types.
        out_capsules: parent types.
        in_pose, out_pose: an int (a vector) or (rows, features) (a matrix); their rows must be equal.
        kernel_size, stride: of the window, square.
        padding: positions added on each side. They hold no capsule and change nothing.
        routing: the algorithm; the layer keeps a copy with parameters of its own, shared over positions.
        bias: learn the B of the votes, starting at zero.
        backend: what computes the reductions over votes, see :func:`torchcaps.use_backend`.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, in_capsules, height, width, *in_pose)`.
        - Output: poses `(batch, out_capsules, height_out, width_out, *out_pose)` with
          `height_out = (height + 2 padding - kernel_size) // stride + 1`; coefficients, if asked for,
          `(batch, height_out, width_out, in_capsules, kernel_size, kernel_size, out_capsules)`.
        - `weight`: `(in_capsules, kernel_size, kernel_size, out_capsules, d, h)`.
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_pose: Pose,
        out_pose: Pose,
        kernel_size: int,
        routing: Routing,
        stride: int = 1,
        padding: int = 0,
        bias: bool = False,
        backend: Backend = "auto",
    ):
        super().__init__()
        self.backend = check_backend(backend)
        check_rows(in_pose, out_pose)
        self.in_capsules, self.out_capsules = in_capsules, out_capsules
        self.in_pose, self.out_pose = pose_shape(in_pose), pose_shape(out_pose)
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        rows, d = matrix_shape(in_pose)
        _, h = matrix_shape(out_pose)
        window = (in_capsules, kernel_size, kernel_size, out_capsules)
        self.weight = nn.Parameter(torch.empty(*window, d, h))
        self.bias = nn.Parameter(torch.empty(*window, rows, h)) if bias else None
        self.window_children = in_capsules * kernel_size * kernel_size
        self.routing = routing.for_layer(self.window_children, out_capsules, rows * h)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vote weights in the way of the routing's paper; all else starts anew too."""
        self.routing.reset_weight(self.weight.data, self.window_children)
        self.routing.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def votes(self, capsules: Capsules | Tensor) -> LazyVotes:
        """The votes of the children of each window for the parents at its position."""
        capsules = as_capsules(capsules)
        poses, scores = capsules.poses, capsules.scores
        self._check(poses, scores)
        rows, d = matrix_shape(self.in_pose)
        poses = poses.reshape(*poses.shape[:4], rows, d)
        if self.padding:
            if scores is None:
                scores = poses.new_full(poses.shape[:4], torch.inf)
            margin = (self.padding,) * 4
            poses, scores = F.pad(poses, (0, 0, 0, 0, *margin)), F.pad(scores, margin, value=-torch.inf)
        votes = LazyVotes(poses, self.weight, self.bias, self.out_pose, self.stride, self.backend)
        scores = None if scores is None else windows(scores, self.kernel_size, self.stride)
        return votes.gated(presence(scores))

    def _check(self, poses: Tensor, scores: Tensor | None) -> None:
        shape = tuple(poses.shape)
        if len(shape) != 4 + len(self.in_pose) or shape[1] != self.in_capsules or shape[4:] != self.in_pose:
            pose = ", ".join(map(str, self.in_pose))
            raise ValueError(f"expected poses of shape (batch, {self.in_capsules}, height, width, {pose}), got {shape}")
        if scores is not None and tuple(scores.shape) != shape[:4]:
            raise ValueError(f"expected scores of shape {shape[:4]}, got {tuple(scores.shape)}")
        if min(shape[2:4]) + 2 * self.padding < self.kernel_size:
            raise ValueError(
                f"a grid of {shape[2]}x{shape[3]} is smaller than kernel_size={self.kernel_size} "
                f"(with padding={self.padding})"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.in_capsules}, {self.out_capsules}, in_pose={show_pose(self.in_pose)}, "
            f"out_pose={show_pose(self.out_pose)}, kernel_size={self.kernel_size}, stride={self.stride}"
            + (f", padding={self.padding}" if self.padding else "")
            + (", bias=True" if self.bias is not None else "")
            + ("" if self.backend == "auto" else f", backend={self.backend!r}")
        )
