"""Maps of capsules that vote by a convolution, the layer of capsule networks for segmentation.

LaLonde, Bagci: Capsules for Object Segmentation (2018). A window is summed before routing, so that few children are
routed at each position. All votes of a map together take gigabytes. They are made for some rows at a time, routed and
dropped, and made again for the gradients.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.capsules import Capsules
from torchcaps.nn.first_pass import Passes, look_at
from torchcaps.nn.inputs import SIDES, Padding, Size, as_capsules, size_of_sides
from torchcaps.nn.layer import CapsuleLayer, gatherable
from torchcaps.nn.pose import show_size
from torchcaps.nn.primary import Dims
from torchcaps.ops import Agreement, Backend, PoseLogits, Softmax, StoredVotes, WeightedVotes, choose_backend, gates_of
from torchcaps.ops.children import ON_DEVICE
from torchcaps.routing import Iteration, LayerShape, Routing
from torchcaps.utils.arguments import Count, Device, FloatType, checked
from torchcaps.utils.private import has_plain_values, is_batched, is_traced

BLOCK = 2**20  # entries of the votes that are made at a time on a CPU: with their gradients they fit its cache
CONVOLUTIONS: dict[bool, dict[int, Any]] = {
    False: {1: F.conv1d, 2: F.conv2d, 3: F.conv3d},
    True: {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d},
}


class MapVotes(StoredVotes):
    """Votes at the positions of a map. Each position is a sample of the routing, whose children are the child types.

    Args:
        votes: `(batch, types, *sides, parents, features)`.

    Attributes:
        held: tensor to which sums add the gradient of the votes, or None.
    """

    held: Tensor | None = None

    def __init__(self, votes: Tensor):
        self.positions = votes.shape[:1] + votes.shape[2:-2]  # batch, *sides
        super().__init__(votes.movedim(1, -3).flatten(0, -4))

    def with_coefficients(self, parents: Capsules, coefficients: Tensor) -> Capsules:
        return super().with_coefficients(parents, coefficients.unflatten(0, self.positions).movedim((-2, -1), (1, 2)))

    def _shaped(self, x: Tensor, pose: tuple[int, ...]) -> Tensor:
        return super()._shaped(x, pose).unflatten(0, self.positions).movedim(len(self.positions), 1)

    def logits(self, agreement: Agreement | None) -> Tensor:
        if isinstance(agreement, PoseLogits):
            raise ValueError(
                "this routing computes logits from the poses of the children, and a child of a CapsuleMap has a window "
                "of them: use a routing by votes, such as DynamicRouting"
            )
        return super().logits(agreement)

    def coefficients(self, agreement: Agreement | None, softmax: Softmax = "parents", leaky: bool = False) -> Tensor:
        if softmax == "parents" and not leaky:  # PyTorch's softmax of rows that are short is slow
            return self.logits(agreement).movedim(-1, 0).softmax(0).movedim(0, -1)
        return super().coefficients(agreement, softmax, leaky)

    def _over_children(self, weights: Tensor, votes: Tensor) -> Tensor:
        if is_traced():
            return (weights.unsqueeze(-1) * votes).sum(1)
        return cast(Tensor, _Sum.apply(votes, weights, True, self.held if votes is self.votes else None))

    def _over_features(self, votes: Tensor, query: Tensor) -> Tensor:
        if is_traced():
            return (votes * query.unsqueeze(1)).sum(-1)
        return cast(Tensor, _Sum.apply(votes, query, False, self.held if votes is self.votes else None))


class _Sum(torch.autograd.Function):
    """Sums of votes over the children, times weights `(positions, children, parents)`, or over the features, times a
    query `(positions, parents, features)`. With few children and many positions, an einsum, a product of small
    matrices, takes ten times as long, and a product of all votes does not fit a cache: it goes child by child.

    `held` takes the gradient of the votes, if there is one. Autograd would make one for each sum, and add them.
    """

    @staticmethod
    def forward(ctx: Any, votes: Tensor, other: Tensor, over_children: bool, held: Tensor | None) -> Tensor:
        ctx.save_for_backward(votes, other)
        ctx.over_children, ctx.held = over_children, held
        if not over_children:
            return torch.stack([(votes[:, i] * other).sum(-1) for i in range(votes.shape[1])], dim=1)
        total = votes[:, 0] * other[:, 0].unsqueeze(-1)
        for i in range(1, votes.shape[1]):
            total.addcmul_(votes[:, i], other[:, i].unsqueeze(-1))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        votes, other = ctx.saved_tensors
        weights, query = (other, grad) if ctx.over_children else (grad, other)
        grad_other = _Sum.apply(votes, grad, not ctx.over_children, None) if ctx.needs_input_grad[1] else None
        if ctx.held is None:
            return weights.unsqueeze(-1) * query.unsqueeze(1), grad_other, None, None
        ctx.held.addcmul_(weights.unsqueeze(-1), query.unsqueeze(1))
        return None, grad_other, None, None


class Block(NamedTuple):
    """Samples, and rows of parents, whose votes are made at a time, and the rows of the padded children that they see.
    Rows lie along the first side of a map."""

    samples: slice
    rows: slice
    seen: slice


class CapsuleMap(CapsuleLayer):
    r"""Capsules on a map, whose votes come from a convolution: the layer of SegCaps, also in its transposed form.

    .. math:: V_{i,p} = \text{conv}(\text{pose}_i)_p, \quad \text{parents}_p = \text{routing}(V_{1,p}, V_{2,p}, \dots)

    The convolution takes the features of one child type as channels, and all types share its weights. It sums over the
    window, so that a position routes one vote of each child type for each parent. In :class:`CapsuleConv2d`, every
    capsule of a window votes for itself.

    Only some rows of votes exist at a time, in the backward pass as well, where they are made again: memory grows with
    the capsules, not with the votes. In three dimensions a row is a slice, the positions of one depth.

    Args:
        in_capsules: number of child types.
        out_capsules: number of parent types.
        in_pose, out_pose: number of features of a child, and of a parent; poses are vectors.
        kernel_size, stride: options of the convolution, an int or a tuple with a number for each dimension of the map.
        routing: routing algorithm; the layer keeps a copy with parameters of its own, shared over positions. SegCaps
            has `DynamicRouting(3, learn_bias=True)`. A routing of your own may draw random numbers.
        padding: number of positions added on each side, an int or a tuple, or "same": a map of n positions on a side
            becomes one of `ceil(n / stride)`, or `n * stride` if transposed, with the odd position at the end, as in
            Keras and TensorFlow.
        transposed: use a transposed convolution, which enlarges the map by its stride; padding then cuts positions off.
        dims: number of dimensions of the map: 1 for signals, 2 for images, 3 for volumes.
        backend: "reference" stores all votes, and has second derivatives; the others are the same here. See
            :func:`torchcaps.use_backend`. With `return_coefficients=True`, and in code that PyTorch compiles, traces or
            transforms, all votes are stored, too.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, in_capsules, *sides, in_pose)`. A child's score counts by its
          sigmoid, which multiplies the pose: a child of score -inf votes 0.
        - Output: poses `(batch, out_capsules, *sides_out, out_pose)`, with the sides of `nn.Conv2d` or
          `nn.ConvTranspose2d`. With `return_coefficients=True` also coefficients `(batch, in_capsules, out_capsules,
          *sides_out)`.
        - `weight`: as of these two, with out_capsules * out_pose channels: `(out_channels, in_pose, *kernel_size)`, or
          `(in_pose, out_channels, *kernel_size)` if transposed.

    Example:
        >>> import torch
        >>> from torchcaps import CapsuleMap, DynamicRouting
        >>> layer = CapsuleMap(2, 4, 16, 16, 5, DynamicRouting(3, learn_bias=True), padding="same")
        >>> layer(torch.randn(1, 2, 64, 64, 16)).poses.shape
        torch.Size([1, 4, 64, 64, 16])

    Reference:
        LaLonde & Bagci 2018, section 3.
    """

    weight: nn.Parameter
    bias = None

    @checked
    def __init__(
        self,
        in_capsules: Count,
        out_capsules: Count,
        in_pose: Count,
        out_pose: Count,
        kernel_size: Size,
        routing: Routing,
        stride: Size = 1,
        padding: Padding | Literal["same"] = 0,
        transposed: bool = False,
        dims: Dims = 2,
        backend: Backend = "auto",
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        self.in_capsules, self.out_capsules, self.in_pose, self.out_pose = in_capsules, out_capsules, in_pose, out_pose
        self.transposed, self.dims, self.backend = transposed, dims, backend
        self.kernel_size, self.stride = (
            size_of_sides(name, size, dims) for name, size in (("kernel_size", kernel_size), ("stride", stride))
        )
        self.padding = padding if isinstance(padding, str) else size_of_sides("padding", padding, dims)
        if transposed and any(k < s for k, s in zip(self.kernel_size, self.stride, strict=True)):
            raise ValueError(
                f"a transposed convolution of kernel_size={kernel_size} and stride={stride} leaves positions without "
                "votes: use a kernel_size of at least the stride"
            )
        channels = (in_pose, out_capsules * out_pose) if transposed else (out_capsules * out_pose, in_pose)
        self.weight = nn.Parameter(torch.empty(*channels, *self.kernel_size, device=device, dtype=dtype))
        self.layer_shape = LayerShape(in_capsules, in_capsules, out_capsules, 1, in_pose, out_pose)
        self.routing = routing.for_layer(self.layer_shape, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights as the routing does for as many children as the window has, and reset all parameters of the
        routing."""
        self.passes = Passes()
        places = math.prod(self.kernel_size) // (math.prod(self.stride) if self.transposed else 1)
        shape = self.layer_shape._replace(children=self.in_capsules * places, window=places)
        drawn = self.weight.new_empty(*self.kernel_size, self.out_capsules, self.in_pose, self.out_pose)
        self.routing.reset_weight(drawn, shape)
        channels = drawn.movedim(-2, -3).flatten(-2) if self.transposed else drawn.transpose(-2, -1).flatten(-3, -2)
        self.weight.data.copy_(channels.movedim((-2, -1), (0, 1)))
        self.routing.reset_parameters()

    @checked
    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        """Route the child types at each position to the parents there.

        Args:
            capsules: the children, as Capsules or as a tensor of poses.
            return_coefficients: also return the coefficients of the last iteration.
        """
        poses = self._poses(capsules)
        if return_coefficients or self._stores_votes(poses):
            return self.route(capsules, self._all_votes(poses), return_coefficients)
        return gatherable(self, look_at([self], capsules, partial(self._route_blocks, poses)))

    def votes(self, capsules: Capsules | Tensor) -> MapVotes:
        """Return the votes of all child types at all positions, as a tensor."""
        return self._all_votes(self._poses(capsules))

    def _all_votes(self, poses: Tensor) -> MapVotes:
        padded, rows = self._padded(poses), slice(0, self._sides_out(tuple(poses.shape[2:-1]))[0])
        block = Block(slice(None), rows, self._seen(rows, padded.shape[2]))  # len() would fix the batch of an export
        return self._votes(padded[:, :, block.seen], self.weight, block)

    # ------------------------------------------------------------ the convolution

    def _poses(self, capsules: Capsules | Tensor) -> Tensor:
        """Return the poses of checked children times their gates."""
        capsules = as_capsules(capsules, self.weight)
        poses, scores, shape = capsules.poses, capsules.scores, tuple(capsules.poses.shape)
        if len(shape) != self.dims + 3 or (shape[1], shape[-1]) != (self.in_capsules, self.in_pose):
            expected = ", ".join(map(str, ("batch", self.in_capsules, *SIDES[self.dims], self.in_pose)))
            raise ValueError(f"expected poses of shape ({expected}), got {shape}")
        if scores is not None and tuple(scores.shape) != shape[:-1]:
            raise ValueError(f"expected scores of shape {shape[:-1]}, got {tuple(scores.shape)}")
        if min(self._sides_out(shape[2:-1])) < 1:
            raise ValueError(
                f"a map of {'x'.join(map(str, shape[2:-1]))} is too small for kernel_size={self.kernel_size} and "
                f"padding={self.padding!r}: give a larger map, or use padding='same'"
            )
        return poses if scores is None else poses * gates_of(scores).to(poses.dtype).unsqueeze(-1)

    def _margins(self, sides: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return how many positions are added before and after a map of these sides, or cut off if transposed."""
        if not isinstance(self.padding, str):
            return [(padding, padding) for padding in self.padding]
        totals = (
            kernel - stride if self.transposed else max(0, (-(-size // stride) - 1) * stride + kernel - size)
            for size, kernel, stride in zip(sides, self.kernel_size, self.stride, strict=False)
        )
        return [(total // 2, total - total // 2) for total in totals]

    def _sides_out(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sides of the parents' map; one below 1 means that the children's map is too small."""
        each = zip(sides, map(sum, self._margins(sides)), self.kernel_size, self.stride, strict=True)
        if self.transposed:
            return tuple((size - 1) * stride + kernel - margin for size, margin, kernel, stride in each)
        return tuple((size + margin - kernel) // stride + 1 for size, margin, kernel, stride in each)

    def _padded(self, poses: Tensor) -> Tensor:
        """Return the poses that the convolution takes, with zeros around them."""
        margins = self._margins(poses.shape[2:-1])
        if self.transposed or not any(map(any, margins)):
            return poses
        return F.pad(poses, (0, 0, *(margin for side in reversed(margins) for margin in side)))

    def _seen(self, rows: slice, padded: int) -> slice:
        """Return which of the `padded` rows of children some rows of parents see."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        if not self.transposed:
            return slice(rows.start * stride, (rows.stop - 1) * stride + kernel)
        before = self._margins((padded,))[0][0]
        first = max(0, -((kernel - 1 - rows.start - before) // stride))
        return slice(first, min(padded, (rows.stop - 1 + before) // stride + 1))

    def _votes(self, poses: Tensor, weight: Tensor, block: Block) -> MapVotes:
        """Return the votes of a block from the poses that it sees."""
        x = poses.flatten(0, 1).movedim(-1, 1)
        votes = CONVOLUTIONS[self.transposed][self.dims](x, weight, stride=self.stride)
        votes = votes.unflatten(0, poses.shape[:2]).movedim(2, -1).unflatten(-1, (self.out_capsules, self.out_pose))
        if self.transposed:
            (before, _), *margins = self._margins(poses.shape[2:-1])
            first = block.rows.start + before - block.seen.start * self.stride[0]
            kept = [slice(first, first + block.rows.stop - block.rows.start)]
            kept += [slice(x, side - y) for side, (x, y) in zip(votes.shape[3:-2], margins, strict=True)]
            votes = votes[(slice(None), slice(None), *kept)]
        return MapVotes(votes)

    # ------------------------------------------------------------ blocks of rows

    def _stores_votes(self, poses: Tensor) -> bool:
        """Return whether all votes are stored: they are few, or blocks could not be routed again as they were."""
        routing = self.routing
        if routing.is_watched or routing.is_uniform or getattr(routing, "start", None) == "random":
            return True
        if routing.training and any(hasattr(module, "running_mean") for module in routing.modules()):
            return True  # batch normalization, of all positions together
        if torch.compiler.is_compiling() or choose_backend(self.backend, poses.device) == "reference":
            return True
        is_replica = getattr(self, "_is_replica", False)  # of nn.DataParallel: its routing names no parameters
        return is_replica or not has_plain_values(poses, self.weight) or len(self._blocks(poses)) < 2

    def _blocks(self, poses: Tensor) -> list[Block]:
        """Return the blocks of the parents' map whose votes are made at a time."""
        batch, sides = poses.shape[0], tuple(poses.shape[2:-1])
        rows, *others = self._sides_out(sides)
        padded = sides[0] + (0 if self.transposed else sum(self._margins(sides)[0]))
        of_row = self.in_capsules * self.out_capsules * self.out_pose * math.prod(others)
        entries = BLOCK if poses.device.type == "cpu" else ON_DEVICE * BLOCK
        samples, step = max(1, entries // (of_row * rows)), max(1, entries // of_row)
        return [
            Block(slice(i, min(i + samples, batch)), block := slice(k, min(k + step, rows)), self._seen(block, padded))
            for i in range(0, batch, samples)
            for k in range(0, rows, step)
        ]

    def _route_blocks(self, poses: Tensor) -> Capsules:
        """Route each block by itself."""
        blocks, padded = self._blocks(poses), self._padded(poses)
        routing = copy.copy(self.routing)  # with the options that it has now, and not watched
        values = dict(routing.named_parameters())

        def route(votes: MapVotes, *given: Tensor) -> Capsules:
            parents: Capsules = functional_call(routing, dict(zip(values, given, strict=True)), (votes,))
            return parents

        results = _Blocks.apply(self._votes, route, blocks, padded, self.weight, *values.values())
        parents = Capsules(results[0], results[1], results[2], pose_dims=None if self.dims == 2 else 1)
        if self.routing.is_watched:  # by the look at a first pass, which needs no more than some votes
            block = blocks[len(blocks) // 2]
            with torch.no_grad():
                votes = self._votes(padded[block.samples, :, block.seen], self.weight, block)
            weighted = WeightedVotes(votes, None, routing.softmax, routing.leaky)
            self.routing.show(Iteration(weighted, parents, routing.steps - 1))
        return parents

    def extra_repr(self) -> str:
        defaults = {"stride": (1,) * self.dims, "padding": (0,) * self.dims, "transposed": False, "dims": 2}
        options = [(name, getattr(self, name), x) for name, x in (defaults | {"backend": "auto"}).items()]
        shown = [f", {name}={show_size(value)!r}" for name, value, default in options if value != default]
        return (
            f"{self.in_capsules}, {self.out_capsules}, in_pose={self.in_pose}, out_pose={self.out_pose}, "
            f"kernel_size={show_size(self.kernel_size)}" + "".join(shown)
        )


class _Blocks(torch.autograd.Function):
    """Routes block by block, and again for the gradients, so that nothing of the votes' size is kept.

    Its inputs are a function from poses, weight and a block to votes, one from votes and the parameters of the routing
    to parents, the blocks, the padded poses, the weight and these parameters.
    """

    @staticmethod
    def forward(ctx: Any, vote: Any, route: Any, blocks: list[Block], poses: Tensor, *others: Tensor) -> Any:
        ctx.vote, ctx.route, ctx.blocks = vote, route, blocks
        ctx.save_for_backward(poses, *others)
        ctx.set_materialize_grads(False)
        ctx.autocast = _autocast_of_now(poses.device.type)
        before = _random_states(poses.device)
        results: list[Tensor | None] = []
        for block in blocks:
            parts = route(vote(poses[block.samples, :, block.seen], others[0], block), *others[1:])[:3]
            if not results:
                batch, rows = len(poses), blocks[-1].rows.stop
                results = [x if x is None else x.new_empty(batch, x.shape[1], rows, *x.shape[3:]) for x in parts]
            for result, part in zip(results, parts, strict=True):
                if result is not None and part is not None:
                    result[block.samples, :, block.rows] = part
        # A routing that draws random numbers, such as those of a dropout, has the same ones in the backward pass.
        drew = not all(map(torch.equal, before, _random_states(poses.device)))
        ctx.random = partial(_random_as, poses.device, before) if drew else contextlib.nullcontext
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or any(grad is not None and is_batched(grad) for grad in grads):
            what = "second derivatives (create_graph=True)" if torch.is_grad_enabled() else "batched gradients"
            raise RuntimeError(f"a CapsuleMap that stores no votes has no {what}: use backend='reference'")
        needed = ctx.needs_input_grad[3:]
        poses, *others = (x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True))
        totals = [torch.zeros_like(x) if x.requires_grad else None for x in (poses, *others)]
        with ctx.random():
            _Blocks.route_again(ctx, grads, poses, others, totals)
        return None, None, None, *totals

    @staticmethod
    def route_again(
        ctx: Any, grads: tuple[Tensor | None, ...], poses: Tensor, others: list[Tensor], totals: list[Tensor | None]
    ) -> None:
        """Add the gradients of the poses, and of the others, to the tensors for them."""
        for block in ctx.blocks:
            seen = poses.detach()[block.samples, :, block.seen].requires_grad_(poses.requires_grad)
            with torch.enable_grad(), ctx.autocast():
                made = ctx.vote(seen, others[0], block)
                votes = made.detach()
                votes.votes.requires_grad_()
                votes.held = torch.zeros_like(votes.votes)
                parts = ctx.route(votes, *others[1:])[:3]
            places = totals if totals[0] is None else [totals[0][block.samples, :, block.seen], *totals[1:]]
            pairs = [
                (x, grad[block.samples, :, block.rows])
                for x, grad in zip(parts, grads, strict=True)
                if x is not None and grad is not None
            ]
            _add_gradients(pairs, [votes.votes, *others[1:]], [votes.held, *places[2:]])
            _add_gradients([(made.votes, votes.held)], [seen, others[0]], places[:2])


def _add_gradients(pairs: list[tuple[Tensor, Tensor]], of: list[Tensor], to: list[Tensor | None]) -> None:
    """Add gradients to the tensors for them, from pairs of a result and its gradient."""
    pairs = [(x, grad) for x, grad in pairs if x.requires_grad]
    wanted = [(x, total) for x, total in zip(of, to, strict=True) if x.requires_grad and total is not None]
    if pairs and wanted:
        results, grads = zip(*pairs, strict=True)
        own = torch.autograd.grad(results, [x for x, _ in wanted], grads, allow_unused=True)
        for (_, total), grad in zip(wanted, own, strict=True):
            if grad is not None:
                total.add_(grad)


def _random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators of random numbers, on the CPU and on the device of the poses."""
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():  # a captured graph has its own
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextlib.contextmanager
def _random_as(device: torch.device, states: list[Tensor]) -> Iterator[None]:
    """Within this context, random numbers are those after these states; afterwards they go on as before it."""
    with torch.random.fork_rng([device] if states[1:] else []):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)
        yield


def _autocast_of_now(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what makes a context with the autocast of now, for the backward pass."""
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled)
