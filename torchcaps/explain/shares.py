"""How a capsule layer's parents are made of its children: the share of each child in each parent."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.explain.recording import Recording
from torchcaps.models import CapsuleFC
from torchcaps.nn import RoutingPool2d


class Shares(NamedTuple):
    r"""Shares of a layer's children in its parents.

    A parent is a sum of contributions. Let V be the votes and :math:`f_{ij}` their factors in the sum, which are gate
    times coefficient in most algorithms (`WeightedVotes.factors`). Where the poses of the children are their votes,
    `|V|` is the length of a pose. The share of child i in parent j is

    .. math:: S_{ij} = \frac{a_{ij}}{\sum_k a_{kj}}, \quad a_{ij} = |f_{ij}| \, |V_{ij}|

    and :math:`a_{ij} = |f_{ij}|` where the routing gives scores: there a pose says where a part is, not how
    present it is, and a short vote counts as much as a long one. If all contributions to a parent are zero, its
    children that are present share it evenly, or all children if none is. With windows each window is divided on its
    own. A parent whose window holds padding alone is made of nothing: its part in a class goes to the other parents.

    Fields:
        table: `(batch, children, parents)`, or with windows `(batch, rows, columns, types, kernel, kernel, parents)`;
            shares sum to one over the children. In a routing pool each group of channels has a table of its own,
            `(batch * groups, ...)`, with one type and one parent.
        even: the same table if all children that are present contributed alike.
        children: layout of the children without the batch, `(children,)` or `(types, height, width)`.
        parents: layout of the parents, likewise.
        windows: kernel, dilation, padding and stride of the windows, a pair each; None without windows.
        groups: number of groups of a routing pool, else 0.
    """

    table: Tensor
    even: Tensor
    children: tuple[int, ...]
    parents: tuple[int, ...]
    windows: tuple[tuple[int, int], ...] | None = None
    groups: int = 0

    def down(self, credit: Tensor) -> Tensor:
        """Hand the shares of the parents in each class, `(batch, classes, *parents)`, on to the children, `(batch,
        classes, *children)`. Sums over parents and over children are equal."""
        batch, classes = credit.shape[:2]
        credit = credit.to(self.table)
        if self.groups:  # a group is a sample of its own
            credit = credit.unflatten(2, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        if self.windows is None:
            handed_on = torch.einsum("bij,bkj->bki", self.table, credit.flatten(2))
        else:
            rows, columns = self.table.shape[1:3]
            own = credit.reshape(len(self.table), classes, -1, rows, columns)
            made = (self.table.sum((3, 4, 5)) > 0).movedim(-1, 1).unsqueeze(1)  # of at least one child
            total, kept = own.flatten(2).sum(-1), (own * made).flatten(2).sum(-1)
            own = own * made * (total / torch.where(kept > 0, kept, 1))[..., None, None, None]
            in_windows = torch.einsum("byxtlmj,bkjyx->bktlmyx", self.table, own)
            patches = in_windows.flatten(5).flatten(2, 4).flatten(0, 1)
            size = self.children[-2:] if len(self.children) == 3 else (1, self.children[-1])
            kernel, dilation, padding, stride = self.windows
            handed_on = F.fold(patches, size, kernel, dilation, padding, stride).unflatten(0, (-1, classes))
        if self.groups:
            handed_on = handed_on.flatten(2).unflatten(0, (batch, self.groups)).transpose(1, 2)
        return handed_on.reshape(batch, classes, *self.children)

    def evenly(self) -> "Shares":
        """Return what the shares would be if all children that are present contributed alike."""
        return self._replace(table=self.even)


def shares_of(run: Recording) -> Shares:
    """Return the shares of the children in the parents of a layer that ran."""
    if isinstance(run.layer, CapsuleFC):
        return _of_sums(run)
    assert run.last is not None
    weighted, parents = run.last.votes, run.last.parents
    votes = weighted.votes
    with torch.no_grad():
        amounts = weighted.factors().abs()
        present = torch.ones_like(amounts) if votes.gates is None else (votes.gates > 0).to(amounts).unsqueeze(-1)
        if not run.layer.routing.gives_scores:
            amounts = amounts * votes.lengths()
        table, even = _normalized(amounts, present, bool(getattr(votes, "grid", ())))
    if isinstance(run.layer, RoutingPool2d):
        return _of_pool(run, table, even)
    grid = getattr(votes, "grid", ())
    layout = tuple(parents.poses.shape[1 : -len(votes.pose)])
    if not grid:
        return Shares(table, even, votes.layout, layout)
    layer = run.layer
    sides = [tuple(getattr(layer, name)) for name in ("kernel_size", "dilation", "padding", "stride")]
    empty = (1, 1, 0, 1)  # sizes of the missing side of a sequence
    windows = tuple(side if len(side) == 2 else (none, *side) for side, none in zip(sides, empty, strict=True))
    table, even = (x.unflatten(1, (-1, *windows[0])).unflatten(0, grid) for x in (table, even))
    return Shares(table, even, votes.layout, layout, windows)


def _normalized(amounts: Tensor, present: Tensor, in_windows: bool = False) -> tuple[Tensor, Tensor]:
    """Divide amounts `(batch, children, parents)` by their sums over the children; also return even shares of the
    children that are present."""
    total = amounts.sum(1, keepdim=True)
    largest = amounts.amax(1, keepdim=True)
    even = present.expand_as(amounts)
    empty = even.sum(1, keepdim=True) == 0
    even = torch.where(empty, 1, even)
    scaled = torch.where(largest > 0, amounts / torch.where(largest > 0, largest, 1), even)  # tiny sums would be zero
    shares = torch.where(total.isfinite(), scaled / scaled.sum(1, keepdim=True), torch.nan)
    even = even / even.sum(1, keepdim=True)
    if in_windows:
        shares, even = (torch.where(empty, 0, x) for x in (shares, even))
    return shares, even


def _of_sums(run: Recording) -> Shares:
    """Return the shares in a `CapsuleFC`: the lengths of what each child adds to a parent."""
    poses = run.children.detach()
    children = poses.flatten(1, -2)
    amounts = torch.einsum("bih,hij->bij", children.square(), run.layer.weight.detach().square()).sqrt()
    return Shares(*_normalized(amounts, torch.ones_like(amounts)), tuple(poses.shape[1:-1]), (run.parents.shape[1],))


def _of_pool(run: Recording, table: Tensor, even: Tensor) -> Shares:
    """Return the shares in a routing pool. Its groups are types of children and of parents."""
    pool, (batch, channels, height, width) = run.layer, run.children.shape
    groups = channels // pool.features
    children = (groups, height, width)
    if pool.kernel_size is None:
        return Shares(table, even, children, (groups,), None, groups)
    rows, columns = run.parents.shape[-2:]
    kernel = pool.kernel_size, pool.kernel_size
    table, even = (x.reshape(batch * groups, rows, columns, 1, *kernel, 1) for x in (table, even))
    windows: Any = kernel, (1, 1), (pool.padding, pool.padding), (pool.stride, pool.stride)
    return Shares(table, even, children, (groups, rows, columns), windows, groups)
