"""The votes of a block, and products with them that need no votes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.ops.children import Children, Gradients, Options, count_samples
from torchcaps.ops.numerics import at_least_float32, nonzero
from torchcaps.ops.tiled import blocks as sizes
from torchcaps.ops.tiled.blocks import blocks, pose_blocks, vote_blocks
from torchcaps.ops.tiled.part import Part

LANES = 16  # shortest innermost dimension that is fast


class Layout:
    """Memory layout of the tensors of a block: `(children, samples, features, parents)`, or `(children, parents,
    features, samples)` if the parents are too few to be innermost. There are two because the innermost dimension must
    be long: with parents always last, layers of 10 classes take 1.1 to 1.7 times as long; with samples last wherever
    they are more than the parents, a convolution to 32 parents takes 1.2 times as long.

    Attributes:
        parents, samples: dimensions of the parents and the samples in a tensor without features.
    """

    def __init__(self, children: Children, options: Options):
        self.rows, self.count, self.h = children.poses.shape[4], children.parents, children.weight.shape[5]
        self.parents_last = self.count >= min(LANES, count_samples(children, options))
        self.parents, self.samples = (2, 1) if self.parents_last else (1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """Return `(samples, parents)` or `(samples, parents, features)` in this layout."""
        x = at_least_float32(x)
        if x.dim() == 2:
            return x if self.parents_last else x.T.contiguous()
        if self.parents_last:
            return x.transpose(1, 2).contiguous()
        return x.unflatten(2, (self.rows, self.h)).permute(1, 3, 2, 0).flatten(1, 2).contiguous()

    def unpack(self, x: Tensor) -> Tensor:
        """Undo `pack`."""
        if x.dim() == 2:
            return x if self.parents_last else x.T.contiguous()
        if self.parents_last:
            return x.transpose(1, 2).contiguous()
        return x.unflatten(1, (self.h, self.rows)).permute(3, 0, 2, 1).flatten(2).contiguous()

    def unpack_votes(self, votes: Tensor) -> Tensor:
        """Return a block's votes as `(samples, children, parents, features)`."""
        if self.parents_last:
            return votes.permute(1, 0, 3, 2)
        return votes.unflatten(2, (self.h, self.rows)).permute(4, 0, 1, 3, 2).flatten(3)

    def part(self, x: Tensor, samples: slice) -> Tensor:
        """Return a view of some samples."""
        return x[samples] if self.parents_last else x[..., samples]

    def over_parents(self, logits: Tensor, leaky: bool = False) -> Tensor:
        """Return the softmax of logits over the parents."""
        if not leaky:
            return logits.softmax(self.parents)
        indifferent = torch.zeros_like(logits.narrow(self.parents, 0, 1))
        return torch.cat([logits, indifferent], self.parents).softmax(self.parents).narrow(self.parents, 0, self.count)

    def over_parents_backward(self, products: Tensor, coefficients: Tensor) -> Tensor:
        """Return the gradient of the logits, given the coefficients and the products of shares and their gradients."""
        return products - coefficients * products.sum(self.parents, keepdim=True)


class Tile(ABC):
    """Products of a block's votes with vectors of the parents."""

    def __init__(self, part: Part, layout: Layout, options: Options):
        self.part, self.block, self.layout, self.unit = part, part.block, layout, options.unit

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """Return `V_ij . vector_j`."""

    @abstractmethod
    def sum(self, weights: Tensor) -> Tensor:
        """Return `sum_i weight_ij V_ij`."""

    @abstractmethod
    def lengths(self) -> Tensor:
        """Return the lengths of the votes, with 1 in place of 0."""

    def logits(self, query: Tensor) -> Tensor:
        return self.dot(query) / self.lengths() if self.unit else self.dot(query)

    def products(self, query: Tensor, grad: Tensor) -> list[Tensor]:
        """Return the logits and `V_ij . grad_j`. Backward, `query` must require gradients."""
        with torch.enable_grad():
            return [self.logits(query), self.dot(grad)]

    def add_gradients(
        self, products: list[Tensor], grad_logits: Tensor, shares: Tensor, query: Tensor, grad: Tensor
    ) -> Tensor:
        """Add what follows from `grad_V_ij = share_ij grad_j + grad_logit_ij (d logit_ij / d V_ij)` to the gradients of
        the children; return that of the query."""
        return self.part.add_gradients(products, [grad_logits, shares], query)[0]


class VoteTile(Tile):
    """The votes of a block, stored.

    Attributes:
        votes: the votes in the layout, in a fresh buffer; callers may overwrite it.
    """

    def __init__(self, part: Part, layout: Layout, options: Options):
        super().__init__(part, layout, options)
        poses, parents = part.poses, layout.count
        if options.poses_are_votes and layout.parents_last:
            self.votes = poses.flatten(2).unsqueeze(3).repeat(1, 1, 1, parents)
        elif options.poses_are_votes:
            self.votes = poses.permute(0, 3, 2, 1).flatten(1, 2).unsqueeze(1).repeat(1, parents, 1, 1)
        else:
            self.votes = self._products(poses, part.weight, part.bias)
        if self.unit:
            self._lengths = nonzero(vector_norm(self.votes.detach(), dim=2))

    def _products(self, poses: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (groups, parents, _, _), (count, samples, _, d) = weight.shape, poses.shape
        if self.layout.parents_last:
            votes = torch.bmm(poses.view(groups, -1, d), weight.permute(0, 2, 3, 1).flatten(2))
            votes = votes.view(count, samples, -1, parents)
            added = None if bias is None else bias.flatten(2).transpose(1, 2).unsqueeze(1)
        else:
            weight = weight.transpose(2, 3).flatten(1, 2)
            weight = weight.unsqueeze(1).expand(-1, count // groups, -1, -1).flatten(0, 1)  # one for each child
            votes = torch.bmm(weight, poses.permute(0, 3, 2, 1).flatten(2)).view(count, parents, -1, samples)
            added = None if bias is None else bias.transpose(2, 3).flatten(2).unsqueeze(3)
        return votes if added is None else votes + added

    def dot(self, vectors: Tensor) -> Tensor:
        return (self.votes * vectors).sum(2)

    def sum(self, weights: Tensor) -> Tensor:
        return (self.votes * weights.unsqueeze(2)).sum(0)

    def lengths(self) -> Tensor:
        return self._lengths

    # By hand, in the buffer of the votes: PyTorch would make several of this size.

    def products(self, query: Tensor, grad: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [self.logits(query), self.dot(grad)]

    def add_gradients(
        self, products: list[Tensor], grad_logits: Tensor, shares: Tensor, query: Tensor, grad: Tensor
    ) -> Tensor:
        with torch.no_grad():
            votes, unit_grad = self.votes.detach(), grad_logits
            if self.unit:
                lengths = self.lengths()
                unit_grad = grad_logits / lengths
                grad_query, along = self.sum(unit_grad), unit_grad * (self.dot(query) / lengths) / lengths
                votes.mul_(-along.unsqueeze(2)).addcmul_(query, unit_grad.unsqueeze(2))
            else:
                grad_query = self.sum(grad_logits)
                torch.mul(query, grad_logits.unsqueeze(2), out=votes)
            votes.addcmul_(grad, shares.unsqueeze(2))
        self.part.add_gradients([self.votes], [votes])
        return grad_query


class PulledTile(Tile):
    """The products for children that share weights, without votes: `(pose W) . q = pose . (W q)`, where W q
    is the same for all children of a group.

    In the sums below, letters are g: groups, c: children of a group, n: samples, r: rows, d and h: columns of poses and
    of votes, j: parents.
    """

    def __init__(self, part: Part, layout: Layout, options: Options):
        super().__init__(part, layout, options)
        self.weight, self.poses = part.weight, part.poses.unflatten(0, (len(part.weight), -1))  # gjdh, gcnrd
        self.pairs = "gcnj" if layout.parents_last else "gcjn"

    def dot(self, vectors: Tensor) -> Tensor:
        vectors = self.layout.unpack(vectors).unflatten(2, (self.layout.rows, -1))
        pulled = torch.einsum("gjdh,njrh->gnrdj", self.weight, vectors)
        return torch.einsum(f"gcnrd,gnrdj->{self.pairs}", self.poses, pulled).flatten(0, 1)

    def sum(self, weights: Tensor) -> Tensor:
        sums = torch.einsum(f"gcnrd,{self.pairs}->gnrdj", self.poses, weights.unflatten(0, (len(self.weight), -1)))
        return self.layout.pack(torch.einsum("gnrdj,gjdh->njrh", sums, self.weight).flatten(2))

    def lengths(self) -> Tensor:
        raise NotImplementedError("the lengths of votes need the votes")


class PoseTile(Tile):
    """The products for votes that are the poses themselves: products of matrices."""

    def __init__(self, part: Part, layout: Layout, options: Options):
        super().__init__(part, layout, options)
        self.poses = part.poses_of_samples

    def dot(self, vectors: Tensor) -> Tensor:
        return self._packed(torch.bmm(self.poses, self.layout.unpack(vectors).transpose(1, 2)))

    def sum(self, weights: Tensor) -> Tensor:
        weights = weights.permute((1, 2, 0) if self.layout.parents_last else (2, 1, 0))
        return self.layout.pack(torch.bmm(weights, self.poses))

    def lengths(self) -> Tensor:
        return self._packed(nonzero(vector_norm(self.poses, dim=2, keepdim=True)))

    def _packed(self, x: Tensor) -> Tensor:
        """Bring `(samples, children, parents)` into the layout."""
        return x.permute((1, 0, 2) if self.layout.parents_last else (1, 2, 0))


def tiles(layout: Layout, children: Children, options: Options, into: Gradients | None = None) -> Iterator[Tile]:
    """Yield all pairs of children and samples, block by block, as tiles of the cheapest kind. `into` is that of
    `Part`."""
    poses, weight = children.poses, children.weight
    per_group = poses.shape[1] // weight.shape[0]
    kind: type[Tile] = PulledTile
    if options.poses_are_votes:
        kind, of_kind = PoseTile, pose_blocks(children, options)
    elif per_group == 1 or options.unit or children.bias is not None:
        kind, of_kind = VoteTile, vote_blocks(children, options)
    else:  # the largest tensor is the logits, or W q
        pairs = max(1, sizes.BLOCK // (children.parents * max(1, -(-poses.shape[4] * poses.shape[5] // per_group))))
        of_kind = blocks(children, options, pairs, min(pairs, sizes.SAMPLES))
    for block in of_kind:
        with torch.set_grad_enabled(into is not None):
            tile = kind(Part(block, children, into), layout, options)
        yield tile
