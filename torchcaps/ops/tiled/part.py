"""The part of the children that a block reads, and what is added to their gradients."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Gradients
from torchcaps.ops.numerics import at_least_float32
from torchcaps.ops.tiled.blocks import Block


class Part:
    """The part of the children that a block reads. In the backward pass PyTorch differentiates what a reduction
    computes from it in the forward pass.

    Args:
        into: tensors to which the gradients of the children are added; None in the forward pass.
    """

    def __init__(self, block: Block, children: Children, into: Gradients | None = None):
        self.block = block
        self._children, self._into = children, into
        self._leaves: list[tuple[Tensor, Callable[[Tensor], object]]] = []

    @functools.cached_property
    def poses(self) -> Tensor:
        """Poses, `(children, samples, rows, d)`."""
        return self._leaf("poses", self.block.window_of).contiguous().flatten(1, 3)

    @functools.cached_property
    def poses_of_samples(self) -> Tensor:
        """Poses without windows, `(samples, children, features)`."""
        return self._leaf("poses", self.block.samples_of)

    @functools.cached_property
    def weight(self) -> Tensor:
        """Weights, `(groups, parents, d, h)`."""
        return self._leaf("weight", self.block.weight_of)

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """Biases, `(children or 1, parents or 1, rows, h)`."""
        return None if self._children.bias is None else self._leaf("bias", self.block.read_rows, self.block.add_rows)

    @functools.cached_property
    def gates(self) -> Tensor | None:
        """Gates, `(children, samples)`."""
        return None if self._children.gates is None else self._leaf("gates", self.block.gates_of).contiguous()

    def _leaf(
        self, name: str, read: Callable[[Tensor], Tensor], add: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """Return the part of a tensor that `read` returns. Where that is a view, no `add` is needed."""
        part = at_least_float32(read(getattr(self._children, name))).detach()
        total = None if self._into is None else getattr(self._into, name)
        if total is not None:
            to_total = functools.partial(add, total) if add else read(total).add_
            self._leaves.append((part.requires_grad_(), to_total))
        return part

    def add_gradients(self, results: Sequence[Tensor], grads: Sequence[Tensor], *others: Tensor) -> tuple[Tensor, ...]:
        """Add what follows from the gradients of results to those of the children; return those of other tensors."""
        leaves = [*(x for x, _ in self._leaves), *others]
        known = [(x, grad) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
        given = torch.autograd.grad([x for x, _ in known], leaves, [grad for _, grad in known]) if known else ()
        for (_, add), grad in zip(self._leaves, given, strict=False):
            add(grad)
        return given[len(self._leaves) :]
