"""Sum of the votes: a matrix product or, where children have gates or windows, a kernel, so that gated poses and
windows are not copied."""

from torch import Tensor

from torchcaps.ops.children import Children, Gradients, Options
from torchcaps.ops.numerics import at_least_float32
from torchcaps.ops.triton import launches
from torchcaps.ops.triton.problem import Problem
from torchcaps.ops.triton.weighted_sum import sum_of


def vote_sum(children: Children, options: Options) -> tuple[Tensor]:
    if not _is_product(children):
        return (sum_of(Problem(children, options))[0],)
    samples, rows = children.poses.shape[0], children.poses.shape[4]
    parents, width = children.parents, children.weight.shape[5]
    total = _group_sums(children) @ _matrix(children.weight)  # (samples * rows, h * parents)
    total = total.unflatten(0, (samples, rows)).unflatten(2, (width, parents)).permute(0, 3, 1, 2)
    if children.bias is not None:
        types, groups = children.poses.shape[1], children.bias.shape[0]
        total = total + children.bias.sum((0, 1, 2)) * (types // groups)
    return (total.flatten(2).contiguous(),)


def vote_sum_backward(
    grads: tuple[Tensor], results: tuple[()], children: Children, options: Options, into: Gradients
) -> tuple[()]:
    if not _is_product(children):
        launches.backward(Problem(children, options), into, grad=grads[0])
        return ()
    (samples, types, *_, rows, d), groups = children.poses.shape, children.weight.shape[0]
    parent_grads = at_least_float32(grads[0]).unflatten(
        2, (rows, children.weight.shape[5])
    )  # (samples, parents, rows, h)
    grad = parent_grads.permute(0, 2, 3, 1).flatten(2).flatten(0, 1)
    if into.poses is not None:
        own = (grad @ _matrix(children.weight).T).view(samples, rows, groups, 1, d)
        into.poses.view(samples, groups, types // groups, rows, d).add_(own.permute(0, 2, 3, 1, 4))
    if into.weight is not None:
        own = (_group_sums(children).T @ grad).view(groups, d, children.weight.shape[5], children.parents)
        into.weight.add_(own.permute(0, 3, 1, 2)[:, None, None])
    if into.bias is not None and children.bias is not None:
        own = parent_grads.sum(0) * (types // children.bias.shape[0])
        into.bias.add_(own if into.bias.shape[3] > 1 else own.sum(0))
    return ()


def _is_product(children: Children) -> bool:
    """Return whether the sum is a matrix product of poses and weights as they are."""
    return children.gates is None and children.poses.shape[2:4] == (1, 1)


def _group_sums(children: Children) -> Tensor:
    """Sum poses over the children that share weights, `(samples * rows, groups * d)`."""
    poses, groups = at_least_float32(children.poses)[:, :, 0, 0], children.weight.shape[0]
    if poses.shape[1] > groups:
        poses = poses.unflatten(1, (groups, -1)).sum(2)
    return poses.transpose(1, 2).flatten(2).flatten(0, 1)


def _matrix(weight: Tensor) -> Tensor:
    """Return weights with the parents innermost as one matrix, a view `(groups * d, h * parents)`."""
    return at_least_float32(weight)[:, 0, 0].movedim(1, -1).flatten(2).flatten(0, 1)
