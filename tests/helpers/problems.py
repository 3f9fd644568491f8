"""Random children, and the reductions over their votes computed by definition: by indices and sums, without blocks,
kernels or protection against overflow."""

import itertools
import math
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchcaps.ops import (
    Agreement,
    Dot,
    Gaussian,
    LinearVotes,
    PoseLogits,
    PoseVotes,
    SigmoidDot,
    StoredVotes,
    UnitDot,
    Votes,
    backends,
)
from torchcaps.ops import votes as votes_module
from torchcaps.ops.tiled import blocks, tiles

# The backends that run on this machine's CPU. Triton's kernels have tests of their own.
BACKENDS = [name for name in ("reference", "tiled", "native") if backends()[name] is None]
UNSTORED = BACKENDS[1:]
KINDS = ["stored", *BACKENDS]  # stored votes, and those of a layer in each backend
EXACT = {"rtol": 1e-9, "atol": 1e-10}


class Geometry(NamedTuple):
    """Sizes of children and windows.

    Fields:
        poses: shape of the poses, `(images, types, height, width, rows, d)`.
        weight: shape of the weights, `(groups, kernel, kernel, parents, d, h)`.
        groups: number of groups of biases; without windows, of offsets and betas too.
        stride, dilation: stride and dilation of the windows, (down, across) each.
    """

    poses: tuple[int, ...]
    weight: tuple[int, ...]
    groups: int
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)


GEOMETRIES = {
    "per child": Geometry((5, 4, 1, 1, 2, 3), (4, 1, 1, 5, 3, 2), 4),
    "per type": Geometry((5, 6, 1, 1, 2, 3), (2, 1, 1, 3, 3, 2), 3),
    "shared by all": Geometry((3, 6, 1, 1, 1, 3), (1, 1, 1, 5, 3, 2), 3),
    "windows": Geometry((2, 3, 5, 4, 2, 1), (3, 3, 2, 3, 1, 2), 3, (2, 1), (1, 2)),
    "dilated": Geometry((2, 2, 5, 7, 1, 3), (2, 2, 3, 3, 3, 2), 2, (1, 2), (3, 2)),
    "overlapping": Geometry((2, 2, 3, 4, 2, 2), (2, 2, 2, 2, 2, 1), 2),
    "line": Geometry((2, 2, 1, 8, 2, 2), (2, 1, 3, 2, 2, 3), 2, (1, 2), (1, 1)),
    "one parent": Geometry((3, 2, 3, 3, 1, 2), (2, 2, 2, 1, 2, 3), 2),
    "one of everything": Geometry((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1), 1),
}
# (entries in a block, samples in a block, least number of parents to lie innermost). The first gives several blocks
# along every axis and parents innermost, the second samples innermost, the third one block.
SIZES = [(30, 2, 2), (300, 4, 99), (2**19, 64, 16)]
BIASES = ["none", "each", "one"]  # none, one per parent, one for all parents
SOFTMAX = ["parents", "leaky", "children"]
ROWS = ["none", "shared", "groups", "each"]  # rows of a parameter of groups: none, one for all, some, one per child
AGREEMENTS = ["uniform", "dot", "unit", "sigmoid", "gaussian", "poses"]
WAYS = [*SOFTMAX, "moments", *(f"coefficients, {softmax}" for softmax in SOFTMAX)]  # a weighted sum has no name


def mixed(count: int, **parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Return `count` random combinations in which the values of each parameter occur equally often."""
    generator, columns = random.Random(0), []
    for choices in map(list, parameters.values()):
        columns.append([choices[i % len(choices)] for i in range(count)])
        generator.shuffle(columns[-1])
    return [dict(zip(parameters, row, strict=True)) for row in zip(*columns, strict=True)]


def every(count: int, **parameters: Iterable[Any]) -> list[Any]:
    """Return all combinations. The fast tests have those of `mixed`, the slow ones the others."""
    fast = mixed(count, **parameters)
    all_of_them = (dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values()))
    return fast + [pytest.param(case, marks=pytest.mark.slow) for case in all_of_them if case not in fast]


def label(case: Any) -> str | None:
    """Return the test id of a combination."""
    return ", ".join(map(str, case.values())) if isinstance(case, dict) else None


def draw(*shape: int, low: float | None = None) -> Tensor:
    """Draw normal numbers, or uniform ones in [low, low + 1]."""
    x = torch.randn(shape, dtype=torch.float64) if low is None else torch.rand(shape, dtype=torch.float64) + low
    return x.requires_grad_()


def set_sizes(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]) -> None:
    """Set the block sizes to an entry of SIZES."""
    for module in (blocks, votes_module):
        monkeypatch.setattr(module, "BLOCK", sizes[0])
    monkeypatch.setattr(blocks, "SAMPLES", sizes[1])
    monkeypatch.setattr(tiles, "LANES", sizes[2])


class Problem:
    """Random children of a geometry, with gradients.

    Attributes:
        leaves: all tensors that were drawn.
        all_votes: votes `(samples, children, parents, features)`.
    """

    def __init__(self, geometry: str, bias: str = "none", gates: bool = False, device: str = "cpu"):
        self.geometry = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
        self.device, self.leaves = device, list[Tensor]()
        poses, weight, groups = self.geometry[:3]
        (images, self.types, *_, self.rows, self.d), (self.groups, *self.kernel, self.parents, _, self.h) = (
            poses,
            weight,
        )
        self.features = self.rows * self.h
        self.grid = [
            len(range(0, size - apart * (kernel - 1), stride))
            for size, kernel, stride, apart in zip(poses[2:4], self.kernel, *self.geometry[3:], strict=True)
        ]
        self.samples, self.children = images * math.prod(self.grid), self.types * math.prod(self.kernel)
        self.poses, self.weight = self.draw(*poses), self.draw(*weight)
        shared = 1 if bias == "one" else self.parents
        self.bias = None if bias == "none" else self.draw(groups, *self.kernel, shared, self.rows, self.h)
        self.gates = None
        if gates:
            present = torch.rand(self.samples, self.children, dtype=torch.float64)
            present[present < 0.3] = 0
            present[0] = 0  # a sample without children
            self.gates = present.to(device).requires_grad_()
            self.leaves.append(self.gates)
        self.all_votes = self._all_votes()

    def draw(self, *shape: int, low: float | None = None) -> Tensor:
        x = draw(*shape, low=low).detach().to(self.device).requires_grad_()
        self.leaves.append(x)
        return x

    def count(self, rows: str) -> int:
        """Return the number of rows of a parameter of groups, see ROWS."""
        some = self.geometry.groups if math.prod(self.kernel) == 1 else self.children
        return {"shared": 1, "groups": some, "each": self.children}[rows]

    def draw_rows(self, rows: str, parents: int | None = None) -> Tensor | None:
        return None if rows == "none" else self.draw(self.count(rows), parents or self.parents)

    def dot(self, offset: str = "none") -> Dot:
        return Dot(self.draw(self.samples, self.parents, self.features), self.draw_rows(offset))

    def gaussian(self) -> Gaussian:
        shape = self.samples, self.parents, self.features
        return Gaussian(self.draw(*shape), self.draw(*shape, low=0.0), self.draw(*shape[:2]))

    def pose_logits(self, offset: str = "none") -> PoseLogits:
        """Draw logits of the poses; parents share the offset if it is "shared", and the weight if it is "groups"."""
        count = self.groups * math.prod(self.kernel)
        weight = self.draw(count, 1 if offset == "groups" else self.parents, self.rows, self.d)
        return PoseLogits(
            weight, None if offset == "none" else self.draw(count, 1 if offset == "shared" else self.parents)
        )

    def agreement(self, kind: str, offset: str = "none") -> Agreement | None:
        """Draw an agreement of one of the kinds in AGREEMENTS; only "dot", "sigmoid" and "poses" have offsets."""
        if kind == "sigmoid":
            query, offset_rows = self.dot("shared" if offset == "none" else offset)
            return SigmoidDot(query, self.draw(*offset_rows.shape), offset_rows)
        return {
            "uniform": lambda: None,
            "dot": lambda: self.dot(offset),
            "unit": lambda: UnitDot(self.dot().query),
            "gaussian": self.gaussian,
            "poses": lambda: self.pose_logits(offset),
        }[kind]()

    def votes(self, kind: str, line: bool = False) -> Votes:
        """Return the votes of a layer in a backend, or stored votes if the kind is "stored"."""
        if kind == "stored":
            return StoredVotes(self.all_votes.unflatten(3, (self.rows, self.h))).gated(self.gates)
        return self.computed(kind, line).gated(self.gates)

    def computed(self, backend: str, line: bool) -> LinearVotes | PoseVotes:
        _, _, _, stride, dilation = self.geometry
        return LinearVotes(
            self.poses, self.weight, self.bias, (self.rows, self.h), stride, dilation, line, backend=backend
        )

    # ------------------------------------------------------------ by definition

    def child_poses(self) -> Tensor:
        """Return the poses of each sample's children, `(samples, children, rows, d)`."""
        images, _, _, stride, dilation = self.poses.shape[0], *self.geometry[1:]
        sizes = images, *self.grid, self.types, *self.kernel
        image, row, column, kind, down, across = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        here = self.poses[image, kind, row * stride[0] + down * dilation[0], column * stride[1] + across * dilation[1]]
        return here.flatten(3, 5).flatten(0, 2)

    def per_child(self, x: Tensor) -> Tensor:
        """Expand `(groups, kernel, kernel, ...)` to `(children, ...)`."""
        return x.repeat_interleave(self.types // x.shape[0], 0).flatten(0, 2)

    def per_row(self, x: Tensor) -> Tensor:
        """Expand `(groups, parents or 1)` to `(children, parents or 1)`."""
        return x.repeat_interleave(self.children // x.shape[0], 0)

    def per_place(self, x: Tensor) -> Tensor:
        """Expand `(groups * kernel * kernel, ...)`, as the votes' weights have, to `(children, ...)`."""
        return self.per_child(x.unflatten(0, (-1, *self.kernel)))

    def _all_votes(self) -> Tensor:
        votes = torch.einsum("bird,ijdh->bijrh", self.child_poses(), self.per_child(self.weight))
        return (votes if self.bias is None else votes + self.per_child(self.bias)).flatten(3)

    def logits(self, agreement: Agreement | None) -> Tensor:
        votes = self.all_votes
        if agreement is None:
            return torch.zeros(votes.shape[:3], dtype=votes.dtype, device=self.device)
        if isinstance(agreement, PoseLogits):
            logits = torch.einsum("bird,ijrd->bij", self.child_poses(), self.per_place(agreement.weight))
            logits = logits.expand(votes.shape[:3])
            return logits if agreement.offset is None else logits + self.per_place(agreement.offset)
        if isinstance(agreement, Gaussian):
            squares = (votes - agreement.mean.unsqueeze(1)) ** 2 * agreement.precision.unsqueeze(1)
            return agreement.prior.unsqueeze(1) - squares.sum(-1) / 2
        if isinstance(agreement, UnitDot):
            votes = votes / votes.pow(2).sum(-1, keepdim=True).sqrt()
        logits = (votes * agreement.query.unsqueeze(1)).sum(-1)
        if isinstance(agreement, SigmoidDot):
            return (self.per_row(agreement.slope) * logits + self.per_row(agreement.offset)).sigmoid().log()
        offset = getattr(agreement, "offset", None)
        return logits if offset is None else logits + self.per_row(offset)

    def coefficients(self, logits: Tensor, softmax: str) -> Tensor:
        """Return the coefficients; `softmax` is an entry of SOFTMAX."""
        weights = logits.exp()
        if softmax != "children":
            return weights / (weights.sum(2, keepdim=True) + (softmax == "leaky"))
        if self.gates is not None:  # absent children get no gradient
            weights = torch.where(self.gates.unsqueeze(2) == 0, 0, self.gates.unsqueeze(2) * weights)
        total = weights.sum(1, keepdim=True)
        return weights / torch.where(total == 0, 1, total)

    def gated(self, x: Tensor) -> Tensor:
        """Multiply `(samples, children, ...)` by the gates."""
        return x if self.gates is None else x * self.gates[(..., *(None,) * (x.dim() - 2))]

    def weighted_sum(self, logits: Tensor, softmax: str) -> Tensor:
        shares = self.coefficients(logits, softmax)
        return ((shares if softmax == "children" else self.gated(shares)).unsqueeze(3) * self.all_votes).sum(1)

    def moments(self, logits: Tensor, betas: Tensor | None, eps: float) -> list[Tensor]:
        shares = self.gated(self.coefficients(logits, "parents")).unsqueeze(3)
        mass = shares.sum(1)
        divisor = torch.where(mass + eps == 0, 1, mass + eps)
        mean = (shares * self.all_votes).sum(1) / divisor
        variance = (shares * (self.all_votes - mean.unsqueeze(1)) ** 2).sum(1) / divisor
        benefit = [] if betas is None else [(shares.squeeze(3) * self.per_row(betas)).sum(1)]
        return [mass.squeeze(2), mean, variance, *benefit]

    def reduced(
        self, agreement: Agreement | None, way: str, betas: Tensor | None = None, eps: float = 0.0
    ) -> list[Tensor]:
        """Return the results of a reduction, an entry of WAYS."""
        if agreement is None and way == "children" and self.gates is not None:  # here a gate of 0 has a gradient
            count = self.gates.sum(1)
            return [self.gated(self.all_votes).sum(1) / torch.where(count == 0, 1, count)[:, None, None]]
        logits = self.logits(agreement)
        if way == "moments":
            return self.moments(logits, betas, eps)
        what, _, softmax = way.rpartition(", ")
        return [self.coefficients(logits, softmax) if what else self.weighted_sum(logits, softmax)]


class PoseProblem(Problem):
    """Random children whose poses are their votes.

    Args:
        poses: `(samples, children, rows, d)`.
    """

    def __init__(self, poses: tuple[int, ...], parents: int, groups: int = 1, gates: bool = False):
        samples, children, rows, d = poses
        geometry = Geometry((samples, children, 1, 1, rows, d), (1, 1, 1, parents, d, d), groups)
        super().__init__(geometry, gates=gates)
        self.leaves = [x for x in self.leaves if x is not self.weight]
        self.weight = torch.eye(d, dtype=torch.float64).expand(geometry.weight)
        self.all_votes = self._all_votes()

    def computed(self, backend: str, line: bool = False) -> PoseVotes:
        return PoseVotes(self.poses.flatten(1, 3), self.parents, (self.rows, self.d), backend)


def options_of(softmax: str) -> dict[str, Any]:
    """Return the arguments of a weighted sum for an entry of SOFTMAX."""
    return {"softmax": "parents", "leaky": True} if softmax == "leaky" else {"softmax": softmax}


def assert_same(expected: list[Tensor], actual: list[Tensor], leaves: Iterable[Tensor], **tolerance: float) -> None:
    """Assert that values are the same, and the gradients of a random function of them too."""
    tolerance, leaves = tolerance or EXACT, list(leaves)
    assert len(expected) == len(actual)
    for e, a in zip(expected, actual, strict=True):
        assert a.shape == e.shape
        assert_close(a, e, **tolerance)
    if not leaves:
        return
    weights = [torch.randn(e.shape, dtype=torch.float64).to(e.device) for e in expected]
    zero = sum(0 * x.sum() for x in leaves)
    wanted, found = (
        torch.autograd.grad(
            zero + sum((w * r).sum() for w, r in zip(weights, results, strict=True)), leaves, retain_graph=True
        )
        for results in (expected, actual)
    )
    for w, f in zip(wanted, found, strict=True):
        scale = max(1, w.abs().max().item())
        assert_close(f / scale, w / scale, **tolerance)


def results_of(
    votes: Votes, agreement: Agreement | None, way: str, betas: Tensor | None = None, eps: float = 0.0
) -> list[Tensor]:
    """Return the results of a reduction, an entry of WAYS, as `Problem.reduced` does."""
    if way == "moments":
        found = votes.moments(agreement, betas, eps)
        assert (found.benefit is None) == (betas is None)
        return [x for x in found if x is not None]
    what, _, softmax = way.rpartition(", ")
    return [(votes.coefficients if what else votes.weighted_sum)(agreement, **options_of(softmax))]


def is_refused(kind: str, agreement: Agreement | None, way: str) -> bool:
    """Return whether votes of a kind in KINDS have no such reduction."""
    if kind in ("stored", "reference"):
        return kind == "stored" and isinstance(agreement, PoseLogits)
    return (
        (isinstance(agreement, Gaussian) and way in ("leaky", "children"))
        or (isinstance(agreement, UnitDot) and way == "moments")
        or (isinstance(agreement, SigmoidDot) and "coefficients" not in way)
    )


def compare(p: Problem, kinds: Iterable[str], agreement: Agreement | None, way: str, *options: Any, **tolerance: float):
    """Compare a reduction, an entry of WAYS, with its definition, for votes of each kind. Where votes have none, check
    that they say in one line what to use instead.

    Args:
        options: betas and eps of moments.
    """
    expected = p.reduced(agreement, way, *options)
    for kind in kinds:
        if is_refused(kind, agreement, way):
            with pytest.raises(ValueError, match=r"^.*: use .*$") as refusal:
                results_of(p.votes(kind), agreement, way, *options)
            assert "\n" not in str(refusal.value)
        else:
            assert_same(expected, results_of(p.votes(kind), agreement, way, *options), p.leaves, **tolerance)
