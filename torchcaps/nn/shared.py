"""Capsules without vote weights: the pose of a child is its vote for every parent."""

from typing import Any

from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.nn.inputs import as_capsules, check_children, flat_poses, with_children
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.nn.pose import Pose, check_rows, matrix_shape, pose_shape, show_pose
from torchcaps.ops import Backend, PoseVotes
from torchcaps.routing import LayerShape, Routing
from torchcaps.utils.arguments import Count, Device, FloatType, checked


class CapsuleShared(CapsuleLayer):
    r"""Every child shows its own pose to all parents, and a routing algorithm decides which parents use it.

    .. math:: V_{ij} = \text{pose}_i, \quad \text{parents} = \text{routing}(V)

    There are no vote weights, and the votes cost nothing: a routing by dot products takes children x parents x features
    multiplications, as products of matrices. No backend but "reference" makes a tensor with an entry for each child and
    parent. What is learned belongs to the routing, such as :class:`torchcaps.SlotAttention` and
    :class:`torchcaps.HeinsenVectorRouting`, which are made for this layer. Other algorithms run too (`SelfRouting` with
    in_capsules=None); those whose parents start equal keep them equal, as the votes for all are the same.

    Args:
        in_capsules: number of children, each with its own learned parameters of the routing; None takes any number of
            children, which share these parameters.
        out_capsules: number of parents. With None the caller of `forward` chooses it; the parents then share their
            parameters, and the routing must tell them apart, as `SlotAttention` and `HeinsenVectorRouting` do.
        in_pose: pose of the children, an int (a vector) or (rows, features) (a matrix).
        routing: routing algorithm; the layer keeps a copy with parameters of its own.
        out_pose: pose of the parents; None for that of the children. Another one needs a routing that transforms sums
            of poses, such as `HeinsenVectorRouting`.
        backend: implementation of the reductions over votes, see :func:`torchcaps.use_backend`. All but "reference" are
            the same here, where they can be used: blocks of PyTorch's own matrix products.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, in_capsules, *in_pose)`, or with places
          `(batch, types, *sides, *in_pose)`, such as `(batch, types, height, width, *in_pose)`, which are flattened in
          this order. In a volume, vectors need Capsules with pose_dims=1: the tensor alone may hold matrices on a grid.
        - Output: poses `(batch, out_capsules, *out_pose)`, and the scores and variances that the routing gives.

    To pad a batch, give the missing children a score of -inf, or all children a bool mask as scores, with True for a
    child: padding changes nothing, whatever its finite poses are (in float32 up to about 1e15, where sums of squares
    are finite).

    Example:
        >>> from torchcaps import CapsuleShared, SlotAttention
        >>> layer = CapsuleShared(None, 7, in_pose=64, routing=SlotAttention())
        >>> layer(torch.randn(8, 100, 64)).poses.shape
        torch.Size([8, 7, 64])
    """

    weight = None
    bias = None

    @checked
    def __init__(
        self,
        in_capsules: Count | None,
        out_capsules: Count | None,
        in_pose: Pose,
        routing: Routing,
        out_pose: Pose | None = None,
        backend: Backend = "auto",
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        out_pose = in_pose if out_pose is None else out_pose
        check_rows(in_pose, out_pose)
        if pose_shape(in_pose) != pose_shape(out_pose) and not routing.transforms:
            raise ValueError(
                f"{type(routing).__name__} gives parents the pose of their votes, {in_pose!r}, not out_pose="
                f"{out_pose!r}: leave out_pose out, or use HeinsenVectorRouting"
            )
        self.backend, self.in_capsules, self.out_capsules = backend, in_capsules, out_capsules
        self.in_pose, self.out_pose = pose_shape(in_pose), pose_shape(out_pose)
        rows, d = matrix_shape(in_pose)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layer_shape = LayerShape(
            groups=in_capsules or 1,
            children=in_capsules,
            parents=out_capsules or 1,
            rows=rows,
            in_features=d,
            out_features=matrix_shape(out_pose)[1],
            shared=True,
            any_children=in_capsules is None,
            any_parents=out_capsules is None,
        )
        self.routing = routing.for_layer(self.layer_shape, **factory)

    @checked
    def forward(
        self, capsules: Capsules | Tensor, *, out_capsules: Count | None = None, return_coefficients: bool = False
    ) -> Capsules:
        """Route children to parents.

        Args:
            capsules: the children, as Capsules or as a tensor of poses.
            out_capsules: number of parents, if the layer was made with out_capsules=None.
            return_coefficients: also return the coefficients, `(batch, children, out_capsules)`.
        """
        return self.route(capsules, self.votes(capsules, out_capsules), return_coefficients)

    @checked
    def votes(self, capsules: Capsules | Tensor, out_capsules: Count | None = None) -> PoseVotes:
        """Return the votes of all children for all parents."""
        if (out_capsules is None) == (self.out_capsules is None):
            raise ValueError(
                "the layer was made with out_capsules=None: give forward the number of parents"
                if out_capsules is None
                else f"the layer was made with out_capsules={self.out_capsules}: forward cannot change it"
            )
        capsules = as_capsules(capsules, next(self.parameters(), None), takes_half=True)
        check_children(capsules, self.in_pose, self.in_capsules)
        poses, parents = flat_poses(capsules, self.in_pose), self.out_capsules or out_capsules or 1
        return with_children(PoseVotes(poses, parents, self.out_pose, self.backend), capsules, self.in_pose)

    def extra_repr(self) -> str:
        out_pose = "" if self.out_pose == self.in_pose else f", out_pose={show_pose(self.out_pose)}"
        backend = "" if self.backend == "auto" else f", backend={self.backend!r}"
        return f"{self.in_capsules}, {self.out_capsules}, in_pose={show_pose(self.in_pose)}{out_pose}{backend}"
