"""Sums with uniform coefficients: a convolution of the map, a matrix product, or a kernel where children have gates."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from torchcaps.ops.children import Children, Gradients, Options, grid_of
from torchcaps.ops.triton.launch import Problem


def vote_sum(children: Children, options: Options) -> tuple[Tensor]:
    if children.gates is not None:
        return (Problem(children, options, None).weighted_sum()[0],)
    channels, matrix = _channels(children), _matrix(children.weight)
    rows, (down, across) = children.poses.shape[4], grid_of(children, options)
    if channels.numel() == 0 or down * across == 0:
        total = channels.new_zeros(len(channels), len(matrix), down, across)
    elif channels.shape[2:] == (1, 1):
        total = (channels.flatten(1) @ matrix.flatten(1).T)[..., None, None]
    else:
        with _exact():
            total = torch.conv2d(channels, matrix, None, options.stride, 0, options.dilation)
    total = total.view(-1, rows, children.parents, len(matrix) // children.parents, down, across)
    total = total.permute(0, 4, 5, 2, 1, 3).flatten(0, 2)
    if children.bias is not None:
        types, groups = children.poses.shape[1], children.bias.shape[0]
        total = total + children.bias.sum((0, 1, 2)) * (types // groups)
    return (total.flatten(2).contiguous(),)


def vote_sum_backward(
    grads: tuple[Tensor], results: tuple[()], children: Children, options: Options, into: Gradients
) -> tuple[()]:
    if children.gates is not None:
        Problem(children, options, None).grads(into, grad=grads[0])
        return ()
    (images, types, *_, rows, d), groups = children.poses.shape, children.weight.shape[0]
    of_parents = grads[0].unflatten(2, (rows, -1))  # (samples, parents, rows, h)
    grid = grid_of(children, options)
    grad = of_parents.unflatten(0, (images, *grid)).permute(0, 4, 3, 5, 1, 2).flatten(0, 1).flatten(1, 2)
    channels, matrix = _channels(children), _matrix(children.weight)
    flat, way = channels.shape[2:] == (1, 1), (options.stride, 0, options.dilation)
    if channels.numel() == 0 or grad.numel() == 0:
        return ()
    with _exact():
        if into.poses is not None:
            if flat:
                own = (grad.flatten(1) @ matrix.flatten(1))[..., None, None]
            else:
                own = conv2d_input(channels.shape, matrix, grad, *way)
            own = own.view(images, rows, groups, 1, d, *channels.shape[2:]).permute(0, 2, 3, 5, 6, 1, 4)
            into.poses.unflatten(1, (groups, -1)).add_(own)
        if into.weight is not None:
            if flat:
                own = (grad.flatten(1).T @ channels.flatten(1))[..., None, None]
            else:
                own = conv2d_weight(channels, matrix.shape, grad, *way)
            _matrix(into.weight, copy=False).add_(own.view(children.parents, -1, groups, d, *children.kernel))
    if into.bias is not None:
        own = of_parents.sum(0) * (types // children.bias.shape[0])  # type: ignore[union-attr]
        into.bias.add_(own if into.bias.shape[3] > 1 else own.sum(0))
    return ()


def _channels(children: Children) -> Tensor:
    """The map as `(images * rows, groups * d, height, width)`: types that share weights are summed up."""
    poses, groups = children.poses, children.weight.shape[0]
    if poses.shape[1] > groups:
        poses = poses.unflatten(1, (groups, -1)).sum(2)
    return poses.permute(0, 4, 1, 5, 2, 3).flatten(2, 3).flatten(0, 1)


def _matrix(weight: Tensor, copy: bool = True) -> Tensor:
    """Weights as a convolution has them, `(parents * h, groups * d, kernel, kernel)`; not a copy: its dimensions are
    `(parents, h, groups, d, kernel, kernel)`."""
    view = weight.permute(3, 5, 0, 4, 1, 2)
    return view.flatten(2, 3).flatten(0, 1) if copy else view


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    """Convolutions in float32, where PyTorch would round their operands to TF32 by default."""
    settings = getattr(torch.backends.cudnn, "conv", None)
    name = "fp32_precision" if hasattr(settings, "fp32_precision") else "allow_tf32"
    holder = settings if name == "fp32_precision" else torch.backends.cudnn
    before = getattr(holder, name)
    setattr(holder, name, "ieee" if name == "fp32_precision" else False)
    try:
        yield
    finally:
        setattr(holder, name, before)
