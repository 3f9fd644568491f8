"""Fully connected capsules: every child votes for every parent."""

from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn.inputs import as_capsules, check_children, flat_poses, with_children
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.pose import Pose, check_rows, matrix_shape, pose_shape, show_pose
from torchcaps.ops import Backend, LinearVotes, at_least_float32, evenly_spaced
from torchcaps.routing import LayerShape, Routing
from torchcaps.utils.arguments import Count, Device, FloatType, checked


class CapsuleLinear(CapsuleLayer):
    r"""Every child votes for every parent, and a routing algorithm decides which votes count.

    .. math:: V_{ij} = \text{pose}_i \, W_{ij} + B_{ij}, \quad \text{parents} = \text{routing}(V)

    Args:
        in_capsules: number of children; None takes any number of children, which share their weights. With
            `share_positions`, the number of child types.
        out_capsules: number of parents. With None the caller of `forward` chooses it, and by default there are as many
            parents as children. These parents share their weights too. A learned offset, times a number that runs from
            -1 for the first to 1 for the last parent, tells them apart (Heinsen 2019, section 2.1.1).
        in_pose, out_pose: poses of children and of parents, an int (a vector) or (rows, features) (a matrix) each;
            their numbers of rows must be equal.
        routing: routing algorithm; the layer keeps a copy with parameters of its own.
        bias: learn the B of the votes (Heinsen 2019), initially zero.
        share_positions: share the weights of children on a grid over positions, one set per type. The grid can then
            have any size (the last layer of Hinton et al. 2018).
        coordinates: coordinate addition (Hinton et al. 2018, section 4): add each child's row and column,
            scaled to [0, 1], to the first two entries of the right-hand column of its votes.
        expected_children: usual number of children where the layer takes any number (in_capsules=None or
            share_positions=True); the initial vote weights depend on it. None assumes 16.
        backend: implementation of the reductions over votes, see :func:`torchcaps.use_backend`.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, in_capsules, *in_pose)`, or with places
          `(batch, types, *sides, *in_pose)`, such as `(batch, types, height, width, *in_pose)`, which are flattened in
          this order. In a volume, vectors need Capsules with pose_dims=1: the tensor alone may hold matrices on a grid.
        - Output: poses `(batch, out_capsules, *out_pose)`, and the scores and variances that the routing gives.
        - `weight`: `(in_capsules or 1, out_capsules or 1, d, h)`; `bias`: `(in_capsules or 1, out_capsules or 1,
          rows, h)`.

    To pad a batch, give the missing children a score of -inf, or all children a bool mask as scores, with True for a
    child: padding changes nothing, whatever its finite poses are (in float32 up to about 1e15, where sums of squared
    votes are finite). If there are as many parents as children, padding adds parents: pass `out_capsules` to `forward`
    in this case.

    Example:
        >>> from torchcaps import CapsuleLinear, Capsules, HeinsenRouting
        >>> layer = CapsuleLinear(None, None, in_pose=64, out_pose=2, routing=HeinsenRouting())
        >>> poses, scores = torch.randn(8, 5, 64), torch.zeros(8, 5)
        >>> layer(Capsules(poses, scores)).poses.shape  # as many parents as children
        torch.Size([8, 5, 2])
        >>> scores[:, 3:] = -torch.inf  # padding
        >>> layer(Capsules(poses, scores), out_capsules=3).poses.shape  # as many as asked for
        torch.Size([8, 3, 2])
    """

    weight: nn.Parameter

    @checked
    def __init__(
        self,
        in_capsules: Count | None,
        out_capsules: Count | None,
        in_pose: Pose,
        out_pose: Pose,
        routing: Routing,
        bias: bool = False,
        share_positions: bool = False,
        coordinates: bool = False,
        expected_children: Count | None = None,
        backend: Backend = "auto",
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        self.backend = backend
        check_rows(in_pose, out_pose)
        self.in_capsules, self.out_capsules = in_capsules, out_capsules
        self.in_pose, self.out_pose = pose_shape(in_pose), pose_shape(out_pose)
        self.share_positions, self.coordinates = share_positions, coordinates
        rows, d = matrix_shape(in_pose)
        _, h = matrix_shape(out_pose)
        if share_positions and in_capsules is None:
            raise ValueError("share_positions=True needs in_capsules: the number of types, each with its own weights")
        if coordinates and not share_positions:
            raise ValueError("coordinates=True adds the positions on a grid: it needs share_positions=True")
        if coordinates and rows < 2:
            raise ValueError(f"coordinates=True adds to two rows of a pose: out_pose={out_pose!r} has {rows}")
        if coordinates and out_capsules is None:
            raise ValueError("coordinates=True needs a number of parents: with out_capsules=None the bias is in use")
        if coordinates and bias:
            raise ValueError("coordinates=True replaces the bias: it needs bias=False")

        fixed = in_capsules is not None and not share_positions
        if fixed and expected_children not in (None, in_capsules):
            raise ValueError(
                f"expected_children={expected_children} is for layers that take any number of children: this layer "
                f"has in_capsules={in_capsules}"
            )
        groups, parents = in_capsules or 1, out_capsules or 1
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(groups, parents, d, h, **factory))
        self.bias = nn.Parameter(torch.empty(groups, parents, rows, h, **factory)) if bias else None
        self.symmetry_breaking = nn.Parameter(torch.empty(rows, h, **factory)) if out_capsules is None else None
        children = in_capsules if fixed else expected_children
        self.layer_shape = LayerShape(
            groups, children, parents, rows, d, h, any_children=not fixed, any_parents=out_capsules is None
        )
        self.routing = routing.for_layer(self.layer_shape, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.symmetry_breaking is not None:
            # Not zeros: identical parents would get identical gradients forever. Signs alternate because the LayerNorm
            # of inverted attention removes an offset that is the same in all entries of a pose.
            nn.init.ones_(self.symmetry_breaking)
            self.symmetry_breaking.data.flatten()[1::2] *= -1

    @checked
    def forward(
        self, capsules: Capsules | Tensor, *, out_capsules: Count | None = None, return_coefficients: bool = False
    ) -> Capsules:
        """Route children to parents.

        Args:
            capsules: the children, as Capsules or as a tensor of poses.
            out_capsules: number of parents, if the layer was made with out_capsules=None; None for as many as children.
            return_coefficients: also return the coefficients, `(batch, children, out_capsules)`.
        """
        return self.route(capsules, self.votes(capsules, out_capsules), return_coefficients)

    @checked
    def votes(self, capsules: Capsules | Tensor, out_capsules: Count | None = None) -> LinearVotes:
        """Return the votes of all children for all parents."""
        capsules = as_capsules(capsules, self.weight, takes_half=True)
        check_children(capsules, self.in_pose, self.in_capsules, self.share_positions, self.coordinates)
        poses = flat_poses(capsules, self.in_pose)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.symmetry_breaking is not None:
            parents = poses.shape[1] if out_capsules is None else out_capsules
            offset = evenly_spaced(parents, at_least_float32(weight))[:, None, None] * self.symmetry_breaking
            weight = weight.expand(-1, parents, -1, -1)
            bias = offset.unsqueeze(0) if bias is None else bias + offset
        elif out_capsules is not None:
            raise ValueError(f"the layer was made with out_capsules={self.out_capsules}: forward cannot change it")
        if self.coordinates:
            bias = self._coordinates(capsules.poses.shape[2:-2], like=weight)
        votes = LinearVotes(poses, weight, bias, self.out_pose, backend=self.backend)
        return with_children(votes, capsules, self.in_pose)

    def _coordinates(self, grid: torch.Size, like: Tensor) -> Tensor:
        """Return a bias `(types * positions, 1, rows, h)` with the center of each position in its last column."""
        rows, h = matrix_shape(self.out_pose)
        height, width = grid
        y = (torch.arange(height, device=like.device, dtype=like.dtype) + 0.5) / height
        x = (torch.arange(width, device=like.device, dtype=like.dtype) + 0.5) / width
        centers = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)
        offset = like.new_zeros(height * width, 1, rows, h)
        offset[:, 0, :2, -1] = centers
        return offset.repeat(self.weight.shape[0], 1, 1, 1)

    def extra_repr(self) -> str:
        options = "".join(
            f", {name}=True"
            for name, on in [
                ("bias", self.bias is not None),
                ("share_positions", self.share_positions),
                ("coordinates", self.coordinates),
            ]
            if on
        )
        options += "" if self.backend == "auto" else f", backend={self.backend!r}"
        return (
            f"{self.in_capsules}, {self.out_capsules}, in_pose={show_pose(self.in_pose)}, "
            f"out_pose={show_pose(self.out_pose)}{options}"
        )
