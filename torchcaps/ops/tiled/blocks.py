"""Division of the work into blocks of children and samples, and access to their parts of the tensors.

The votes of a block are computed from poses and weights, used, and dropped; the backward pass computes them again. So
memory grows with poses, weights and parents, and not with children x parents.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.ops.children import BLOCK, ON_DEVICE, Children, Options, count_samples, grid_of
from torchcaps.ops.grid import Pair
from torchcaps.ops.numerics import at_least_float32

SAMPLES = 64  # most samples in a block on a CPU


@dataclass(frozen=True)
class Block:
    """Children and samples that are processed together: the children of a range of types at one place in the window,
    and the samples of a range of images and positions."""

    total_types: int
    types: slice
    groups: slice  # groups of weights that these types use
    place: Pair
    stride: Pair
    dilation: Pair
    images: slice
    grid_rows: slice  # rows of the grid of positions; the block has all of its columns
    grid_columns: int
    samples: slice

    def read(self, x: Tensor) -> Tensor:
        """Return the block's part of `(images, types, height, width, ...)` as `(children, samples, ...)`."""
        return at_least_float32(self._window(x).flatten(1, 3)).contiguous()

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add values to the part of x that `read` returns."""
        window = self._window(x)
        window += values.unflatten(1, window.shape[1:4])

    def of_samples(self, x: Tensor) -> Tensor:
        """Return a view of the block's part of `(images, types, 1, 1, rows, d)`, `(samples, children, rows, d)`:
        without windows the samples are images."""
        return x[self.images, self.types, 0, 0]

    def of_weight(self, x: Tensor) -> Tensor:
        """Return a view of the block's part of `(groups, *window, parents, d, h)`, `(groups, parents, d, h)`."""
        return x[self.groups, self.place[0], self.place[1]]

    def of_gates(self, x: Tensor) -> Tensor:
        """Return a view of the block's part of `(samples, types, *window)`, `(children, samples)`."""
        return x[self.samples, self.types, self.place[0], self.place[1]].T

    def read_rows(self, x: Tensor) -> Tensor:
        """Return the block's rows of `(groups, *window, ...)`, one for each child: `(children, ...)`. A row that
        all children share stays a single one, `(1, ...)`, to be broadcast."""
        part = x[:, self.place[0], self.place[1]]
        return at_least_float32(part if len(x) == 1 else part[self._groups_of(x)])

    def add_rows(self, x: Tensor, values: Tensor) -> None:
        if x.shape[3] == 1:  # the parents share them
            values = values.sum(1, keepdim=True)
        # Children that share a row are summed first: index_add_ adds them one by one, which loses digits.
        per_group = self.total_types // x.shape[0]
        first, last = self.types.start // per_group, (self.types.stop - 1) // per_group
        part = x[:, self.place[0], self.place[1]]
        if first == last:
            part[first] += values.sum(0)
        elif self.types.start % per_group == self.types.stop % per_group == 0:
            part[first : last + 1] += values.unflatten(0, (-1, per_group)).sum(1)
        else:
            part.index_add_(0, self._groups_of(x), values.to(x.dtype))

    def _window(self, x: Tensor) -> Tensor:
        """Return a view of the block's part of a map, `(children, images, rows, columns, ...)`. It has no overlaps,
        because windows at different positions have different capsules at the same place."""
        down, across = (place * step for place, step in zip(self.place, self.dilation, strict=True))
        vertical, horizontal = self.stride
        rows = slice(down + vertical * self.grid_rows.start, down + vertical * (self.grid_rows.stop - 1) + 1, vertical)
        columns = slice(across, across + horizontal * (self.grid_columns - 1) + 1, horizontal)
        return x[self.images, self.types, rows, columns].transpose(0, 1)

    def _groups_of(self, x: Tensor) -> Tensor:
        types = torch.arange(self.types.start, self.types.stop, device=x.device)
        return types // (self.total_types // x.shape[0])


def limits(device: torch.device) -> Pair:
    """Return the most entries of votes, and the most samples, of a block."""
    return (BLOCK, SAMPLES) if device.type == "cpu" else (ON_DEVICE * BLOCK, sys.maxsize)


def vote_blocks(children: Children, options: Options) -> Iterator[Block]:
    """Yield blocks of so many entries of votes, or of one child and one sample if these have more."""
    rows, h = children.poses.shape[4], children.weight.shape[5]
    entries, most = limits(children.poses.device)
    pairs = max(1, entries // (children.parents * rows * h))
    return blocks(children, options, pairs, min(pairs, most))


def pose_blocks(children: Children, options: Options) -> Iterator[Block]:
    """Yield blocks of about as many entries of poses and of weights, for work that computes no votes."""
    poses, weight = children.poses, children.weight
    parents, d, h = weight.shape[3:]
    entries, most = limits(poses.device)
    per_pose = poses.shape[4] * d
    if options.poses_are_votes:  # no weights, and the logits may have more entries than the poses
        pairs = max(1, entries // max(parents, per_pose))
        return blocks(children, options, pairs, max(1, pairs // poses.shape[1]))
    samples = max(
        1, min(count_samples(children, options), 8 * most if poses.device.type == "cpu" else entries // per_pose)
    )
    per_group = poses.shape[1] // weight.shape[0]
    count = min(entries // (samples * per_pose), per_group * (entries // (parents * d * h)))
    return blocks(children, options, samples * max(1, count), samples)


def blocks(children: Children, options: Options, pairs: int, samples: int) -> Iterator[Block]:
    """Yield every pair of a child and a sample once, in blocks of about that many pairs and samples."""
    images, types = children.poses.shape[:2]
    height, width = grid_of(children, options)
    # Whole images if one fits, else rows of one image.
    row_step = min(height, max(1, samples // width))
    image_step = max(1, min(images, samples // (height * width)))
    # Whole groups if one fits, else types of one group.
    per_group = types // children.weight.shape[0]
    type_step = max(1, pairs // (image_step * row_step * width))
    if type_step > per_group:
        type_step -= type_step % per_group
        runs = [(0, types)]
    else:
        runs = [(first, first + per_group) for first in range(0, types, per_group)]
    down, across = children.window
    places = itertools.product(range(down), range(across))
    type_runs = [(first, min(end, first + type_step)) for start, end in runs for first in range(start, end, type_step)]
    starts = itertools.product(range(0, images, image_step), range(0, height, row_step))
    for place, (first, last), (image, row) in itertools.product(places, type_runs, starts):
        block_images = slice(image, min(images, image + image_step))
        rows = slice(row, min(height, row + row_step))
        yield Block(
            total_types=types,
            types=slice(first, last),
            groups=slice(first // per_group, (last - 1) // per_group + 1),
            place=place,
            stride=options.stride,
            dilation=options.dilation,
            images=block_images,
            grid_rows=rows,
            grid_columns=width,
            samples=slice((image * height + row) * width, ((block_images.stop - 1) * height + rows.stop) * width),
        )
