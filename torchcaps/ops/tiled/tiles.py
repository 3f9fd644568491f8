"""The votes of a block, and the gradients of poses, weights and biases from those of the votes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchcaps.ops.children import Children, Gradients, Options, count_samples
from torchcaps.ops.numerics import at_least_float32, nonzero
from torchcaps.ops.tiled.blocks import Block, blocks, limits, pose_blocks, vote_blocks

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


class Tile:
    """Poses and weights of a block; it computes the block's votes, and the gradients that follow from theirs.

    Attributes:
        poses: `(children, samples, rows, d)`.
        weight: `(groups, parents, d, h)`.
    """

    def __init__(self, block: Block, layout: Layout, children: Children):
        self.block, self.layout, self.bias = block, layout, children.bias
        self.poses = block.read(children.poses)
        self.make_factors(children)

    def make_factors(self, children: Children) -> None:
        """Arrange poses and weights as the factors of the matrix product that gives the votes; it sums over d."""
        block, layout = self.block, self.layout
        self.weight = block.of_weight(children.weight)
        groups, count = self.weight.shape[0], self.poses.shape[0]
        if layout.parents_last:
            self.left = self.poses.view(groups, -1, self.poses.shape[3])
            self.right = self.weight.permute(0, 2, 3, 1).flatten(2)
        else:
            weight = self.weight.transpose(2, 3).flatten(1, 2)
            self.left = weight.repeat_interleave(count // groups, 0) if count > groups else weight
            self.right = self.poses.permute(0, 3, 2, 1).flatten(2)

    def votes(self) -> Tensor:
        """Compute the votes into a fresh buffer; callers may overwrite it."""
        votes = torch.bmm(self.left, self.right)
        count, samples = self.poses.shape[:2]
        if self.layout.parents_last:
            votes = votes.view(count, samples, -1, self.layout.count)
            if self.bias is not None:
                votes += self.block.read_rows(self.bias).flatten(2).transpose(1, 2).unsqueeze(1)
        else:
            votes = votes.view(count, self.layout.count, -1, samples)
            if self.bias is not None:
                votes += self.block.read_rows(self.bias).transpose(2, 3).flatten(2).unsqueeze(3)
        return votes

    def add_gradients(self, grad: Tensor, into: Gradients) -> None:
        """Add the gradients of poses, weight and bias, given that of the votes."""
        count, samples, rows, d = self.poses.shape
        groups, parents, _, h = self.weight.shape
        product = grad.view(self.left.shape[0], self.left.shape[1], -1)
        if self.layout.parents_last:
            if into.poses is not None:
                self.block.add(into.poses, torch.bmm(product, self.right.transpose(1, 2)).view(self.poses.shape))
            if into.weight is not None:
                grad_weight = torch.bmm(self.left.transpose(1, 2), product).view(groups, d, h, parents)
                self.block.of_weight(into.weight).add_(grad_weight.permute(0, 3, 1, 2))
            if into.bias is not None:
                self.block.add_rows(into.bias, grad.sum(1).transpose(1, 2).unflatten(2, (rows, h)))
        else:
            if into.poses is not None:
                grad_poses = torch.bmm(self.left.transpose(1, 2), product).view(count, d, rows, samples)
                self.block.add(into.poses, grad_poses.permute(0, 3, 2, 1))
            if into.weight is not None:
                grad_weight = torch.bmm(product, self.right.transpose(1, 2)).view(groups, -1, parents, h, d).sum(1)
                self.block.of_weight(into.weight).add_(grad_weight.transpose(2, 3))
            if into.bias is not None:
                self.block.add_rows(into.bias, grad.sum(3).unflatten(2, (h, rows)).transpose(2, 3))


class PoseTile(Tile):
    """A block of votes that are the poses themselves, repeated for each parent."""

    def make_factors(self, children: Children) -> None:
        pass

    def votes(self) -> Tensor:
        if self.layout.parents_last:
            return self.poses.flatten(2).unsqueeze(3).repeat(1, 1, 1, self.layout.count)
        return self.poses.permute(0, 3, 2, 1).flatten(1, 2).unsqueeze(1).repeat(1, self.layout.count, 1, 1)

    def add_gradients(self, grad: Tensor, into: Gradients) -> None:
        if into.poses is None:
            return
        if self.layout.parents_last:
            self.block.add(into.poses, grad.sum(3).view(self.poses.shape))
        else:
            _, _, rows, d = self.poses.shape
            self.block.add(into.poses, grad.sum(1).unflatten(1, (d, rows)).permute(0, 3, 2, 1))


def vote_tile(block: Block, layout: Layout, children: Children, options: Options) -> Tile:
    """Return the tile that computes all votes of a block."""
    return (PoseTile if options.poses_are_votes else Tile)(block, layout, children)


class Dots(ABC):
    """Products of a block's votes with vectors of the parents.

    Attributes:
        lengths: lengths of the votes in the layout, if unit votes are compared; otherwise None.
    """

    block: Block
    lengths: Tensor | None = None

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """Return `V_ij . vector_j`."""

    @abstractmethod
    def sum(self, weights: Tensor) -> Tensor:
        """Return `sum_i weight_ij V_ij`."""

    @abstractmethod
    def add_child_gradients(
        self, weights: Tensor, grad: Tensor, grad_logits: Tensor, query: Tensor, into: Gradients
    ) -> None:
        """Add what follows from `grad_V_ij = weight_ij grad_j + grad_logit_ij (d logit_ij / d V_ij)`."""

    def logits(self, query: Tensor) -> Tensor:
        return self.dot(query) if self.lengths is None else self.dot(query) / self.lengths

    def grad_query(self, grad_logits: Tensor) -> Tensor:
        return self.sum(grad_logits if self.lengths is None else grad_logits / self.lengths)


class DotTile(Dots, Tile):
    """The votes of a block, stored."""

    def __init__(self, block: Block, layout: Layout, children: Children, unit: bool):
        super().__init__(block, layout, children)
        self.block_votes = self.votes()
        self.lengths = nonzero(vector_norm(self.block_votes, dim=2)) if unit else None

    def dot(self, vectors: Tensor) -> Tensor:
        return (self.block_votes * vectors).sum(2)

    def sum(self, weights: Tensor) -> Tensor:
        return (self.block_votes * weights.unsqueeze(2)).sum(0)

    def add_child_gradients(
        self, weights: Tensor, grad: Tensor, grad_logits: Tensor, query: Tensor, into: Gradients
    ) -> None:
        if self.lengths is None:
            grad_votes = torch.mul(query, grad_logits.unsqueeze(2), out=self.block_votes)
        else:
            logits = self.logits(query)
            grad_logits = grad_logits / self.lengths
            grad_votes = self.block_votes.mul_(-(grad_logits * logits / self.lengths).unsqueeze(2))
            grad_votes.addcmul_(query, grad_logits.unsqueeze(2))
        self.add_gradients(grad_votes.addcmul_(grad, weights.unsqueeze(2)), into)


class PulledTile(Dots):
    """The products for children that share weights, without votes: `(pose W) . q = pose . (W q)`, where W q
    is the same for all children of a group."""

    def __init__(self, block: Block, layout: Layout, children: Children):
        self.block, self.layout = block, layout
        weight = block.of_weight(children.weight)
        self.groups, _, self.d, self.h = weight.shape
        self.weight = weight.transpose(0, 1).flatten(1, 2)  # (parents, groups * d, h)
        poses = block.read(children.poses)
        self.samples, self.rows = poses.shape[1:3]
        # (groups, samples, children of a group, rows * d)
        self.poses = poses.view(self.groups, -1, self.samples, self.rows * self.d).transpose(1, 2)

    def dot(self, vectors: Tensor) -> Tensor:
        return self._from_groups(self.poses @ self._pull(vectors))

    def sum(self, weights: Tensor) -> Tensor:
        sums = torch.bmm(self._parents_first(self._push(weights)).transpose(1, 2), self.weight)
        sums = sums.view(-1, self.samples, self.rows * self.h).transpose(0, 1)  # (samples, parents, features)
        return self.layout.pack(sums)

    def add_child_gradients(
        self, weights: Tensor, grad: Tensor, grad_logits: Tensor, query: Tensor, into: Gradients
    ) -> None:
        for factors, vectors in ((weights, grad), (grad_logits, query)):
            if into.poses is not None:
                grad_poses = self._to_groups(factors) @ self._pull(vectors).transpose(2, 3)
                grad_poses = grad_poses.transpose(1, 2).flatten(0, 1).unflatten(2, (self.rows, self.d))
                self.block.add(into.poses, grad_poses)
            if into.weight is not None:
                product = torch.bmm(self._parents_first(self._push(factors)), self._rows(vectors))
                self.block.of_weight(into.weight).add_(product.unflatten(1, (self.groups, self.d)).transpose(0, 1))

    def _rows(self, vectors: Tensor) -> Tensor:
        """Return vectors of the parents as `(parents, samples * rows, h)`."""
        vectors = self.layout.unpack(vectors).unflatten(2, (self.rows, self.h))
        return vectors.transpose(0, 1).flatten(1, 2)

    def _pull(self, vectors: Tensor) -> Tensor:
        """Return `W q`, `(groups, samples, rows * d, parents)`."""
        pulled = torch.bmm(self.weight, self._rows(vectors).transpose(1, 2))
        pulled = pulled.view(-1, self.groups, self.d, self.samples, self.rows)
        return pulled.permute(1, 3, 4, 2, 0).flatten(2, 3)

    def _push(self, weights: Tensor) -> Tensor:
        """Return weighted sums of the poses of each group, `(groups, samples, rows * d, parents)`."""
        return self.poses.transpose(2, 3) @ self._to_groups(weights)

    def _parents_first(self, pushed: Tensor) -> Tensor:
        """Return the result of `_push` as `(parents, groups * d, samples * rows)`."""
        pushed = pushed.unflatten(2, (self.rows, self.d)).permute(4, 0, 3, 1, 2)
        return pushed.flatten(3).flatten(1, 2)

    def _from_groups(self, x: Tensor) -> Tensor:
        """Bring `(groups, samples, children of a group, parents)` into the layout."""
        order = (0, 2, 1, 3) if self.layout.parents_last else (0, 2, 3, 1)
        return x.permute(order).flatten(0, 1)

    def _to_groups(self, x: Tensor) -> Tensor:
        """Undo `_from_groups`."""
        x = x.unflatten(0, (self.groups, -1))
        return x.permute((0, 2, 1, 3) if self.layout.parents_last else (0, 3, 1, 2))


class PoseDotTile(Dots):
    """The products for votes that are the poses themselves: products of matrices."""

    def __init__(self, block: Block, layout: Layout, children: Children, unit: bool):
        self.block, self.layout = block, layout
        self.poses = block.of_samples(children.poses).flatten(2)
        if unit:
            self.lengths = self._from_samples(nonzero(vector_norm(self.poses, dim=2, keepdim=True)))

    def dot(self, vectors: Tensor) -> Tensor:
        return self._from_samples(torch.bmm(self.poses, self.layout.unpack(vectors).transpose(1, 2)))

    def sum(self, weights: Tensor) -> Tensor:
        return self.layout.pack(torch.bmm(self._to_samples(weights).transpose(1, 2), self.poses))

    def add_child_gradients(
        self, weights: Tensor, grad: Tensor, grad_logits: Tensor, query: Tensor, into: Gradients
    ) -> None:
        if into.poses is None:
            return
        if self.lengths is not None:
            grad_logits = grad_logits / self.lengths
        grad_poses = torch.bmm(self._to_samples(weights), self.layout.unpack(grad))
        grad_poses.baddbmm_(self._to_samples(grad_logits), self.layout.unpack(query))
        if self.lengths is not None:
            along = (grad_logits * self.dot(query) / self.lengths.square()).sum(self.layout.parents, keepdim=True)
            grad_poses.addcmul_(self.poses, self._to_samples(along), value=-1)
        part = self.block.of_samples(into.poses)
        part += grad_poses.unflatten(2, part.shape[2:])

    def _from_samples(self, x: Tensor) -> Tensor:
        """Bring `(samples, children, parents)` into the layout."""
        return x.permute((1, 0, 2) if self.layout.parents_last else (1, 2, 0))

    def _to_samples(self, x: Tensor) -> Tensor:
        """Undo `_from_samples`."""
        return x.permute((1, 0, 2) if self.layout.parents_last else (2, 0, 1))


def dot_tiles(layout: Layout, children: Children, options: Options) -> Iterator[Dots]:
    """Yield all pairs of children and samples, block by block, as tiles of the cheaper kind."""
    poses, weight = children.poses, children.weight
    if options.poses_are_votes:
        for block in pose_blocks(children, options):
            yield PoseDotTile(block, layout, children, options.unit)
        return
    per_group = poses.shape[1] // weight.shape[0]
    if per_group == 1 or options.unit or children.bias is not None:
        for block in vote_blocks(children, options):
            yield DotTile(block, layout, children, options.unit)
        return
    # The largest tensor is now the logits, or the result of `_pull`, which has a pose for each sample and parent.
    (entries, most), pose = limits(poses.device), poses.shape[4] * poses.shape[5]
    pairs = max(1, entries // (children.parents * max(1, -(-pose // per_group))))
    if poses.device.type != "cpu":
        most = max(1, entries // (children.parents * pose))
    for block in blocks(children, options, pairs, min(pairs, most)):
        yield PulledTile(block, layout, children)
