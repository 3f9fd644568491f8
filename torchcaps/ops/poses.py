"""Votes that are the poses of the children themselves, the same for all parents."""

import copy
from collections.abc import Callable
from typing import Self

from torch import Tensor

from torchcaps.ops.agreement import Agreement, Dot, PoseLogits, SigmoidDot
from torchcaps.ops.backend import Backend, choose_backend
from torchcaps.ops.children import Children, Options
from torchcaps.ops.computed import Cache, ComputedVotes
from torchcaps.ops.numerics import at_least_float32, autocast_off, contract
from torchcaps.ops.operators import TILED
from torchcaps.ops.tiled.net_sum import Net, net_factors
from torchcaps.ops.votes import Activation, Beta, per_child


class PoseVotes(ComputedVotes):
    """Votes that are the poses, `V[b,i,j] = pose[b,i]`: those of a :class:`torchcaps.CapsuleShared`.

    Without weights, all reductions are products of matrices, for which PyTorch calls the fastest library of each
    device: all backends but "reference" are "tiled".

    Args:
        poses: `(batch, children, rows, d)`.
        parents: number of parents.
        pose: shape of a parent's pose.
        backend: "auto", "reference", "tiled", "native" or "triton"; see :func:`torchcaps.use_backend`.
    """

    def __init__(self, poses: Tensor, parents: int, pose: tuple[int, ...], backend: Backend = "auto"):
        self.poses, self.parents, self.pose = poses, parents, pose
        self.batch, self.children = poses.shape[:2]
        self.device, self.dtype, self.gates, self.layout = poses.device, poses.dtype, None, (self.children,)
        self.options, self.cache = Options(poses_are_votes=True), Cache()
        self.backend = choose_backend(backend, poses.device)
        self.operators = TILED

    def with_poses(self, function: Callable[[Tensor], Tensor]) -> Self:
        votes = copy.copy(self)
        votes.poses, votes.cache = function(self.poses), Cache()
        return votes

    # ------------------------------------------------------------ reductions

    def vote_sum(self) -> Tensor:
        sums = self.flat.sum(1) if self.gates is None else contract("bi,bik->bk", self.gates, self.flat)
        return sums.unsqueeze(1).expand(-1, self.parents, -1)

    def constant_sum(self, constants: Tensor) -> Tensor:
        groups, poses = len(constants), self.flat
        if not groups or self.children % groups or constants.shape[1] not in (1, self.parents):
            raise ValueError(f"expected constants of shape (groups, parents or 1), got {tuple(constants.shape)}")
        poses = poses if self.gates is None else poses * self.gates.unsqueeze(2)
        sums = poses.unflatten(1, (groups, -1)).sum(2)
        return contract("bgk,gj->bjk", sums, at_least_float32(constants).expand(-1, self.parents))

    def net_sum(
        self, agreement: Agreement | None, betas: tuple[Beta, Beta] | None = None, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.backend == "reference":
            phi = self.net_factors(agreement, betas, activation)
            return contract("bij,bik->bjk", phi, self.flat), phi.sum(1)
        sums, masses = self.reduce("net_sum", self._net(agreement, betas, activation), self.options)
        return sums, masses

    def net_factors(
        self, agreement: Agreement | None, betas: tuple[Beta, Beta] | None, activation: Activation | None
    ) -> Tensor:
        net = self._net(agreement, betas, activation).map_rows(lambda x: per_child(x.flatten(0, 2), self.children))
        net = Net(*(None if x is None else at_least_float32(x) for x in net))
        with autocast_off(self.device.type):
            return net_factors(self.flat, self.gates, net, self.parents)

    def _net(self, agreement: Agreement | None, betas: tuple[Beta, Beta] | None, activation: Activation | None) -> Net:
        """Return the tensors of a net sum."""
        if isinstance(agreement, PoseLogits):
            _, agreement = self.with_logits(agreement)
        if not isinstance(agreement, (Dot, SigmoidDot, type(None))):
            raise ValueError(f"a net sum cannot be weighted by a {type(agreement).__name__}: use Dot or SigmoidDot")
        net = Net() if agreement is None else Net(**agreement._asdict())
        for name, (rows, weight) in zip(("use", "ignore"), betas or (), strict=False):
            weight = None if weight is None else weight.expand(self.parents, -1)
            net = net._replace(**{name: rows.expand(-1, self.parents), f"{name}_weight": weight})
        if activation is not None:
            weight, bias, scale = activation
            net = net._replace(activation_weight=weight, activation_bias=bias[:, None], activation_scale=scale)
        return net.map_rows(lambda x: x[:, None, None])

    # ------------------------------------------------------------ what the reductions compute from

    @property
    def flat(self) -> Tensor:
        """The poses, `(batch, children, features)`, in float32 at least."""
        return at_least_float32(self.poses).flatten(2)

    def tensors(self, gates: Tensor | None) -> Children:
        # Operators take the number of parents from weights. These take no memory and are never read.
        d = self.poses.shape[-1]
        no_weight = self.flat.new_zeros(()).expand(1, 1, 1, self.parents, d, d)
        return Children(at_least_float32(self.poses)[:, :, None, None], no_weight, None, gates)

    def stored(self, children: slice) -> Tensor:
        return self.flat[:, children].unsqueeze(2).expand(-1, -1, self.parents, -1)

    def with_logits(self, agreement: PoseLogits) -> tuple[Self, Dot]:
        weight, offset = agreement
        if len(weight) > 1:
            raise ValueError(
                "children whose poses are their votes must share the weights of their logits: use in_capsules=None"
            )
        query = weight.flatten(2).expand(self.batch, self.parents, -1).to(self.sum_dtype)
        return self, Dot(query, None if offset is None else offset.expand(-1, self.parents))
