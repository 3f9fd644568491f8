"""Division of the work among the Triton kernels: windows of a launch, tiles and splits."""

import itertools

import pytest
import torch

from torchcaps.ops.children import Children, Options
from torchcaps.ops.triton.problem import MOST_PARTS, Problem, _step_apart
from torchcaps.ops.triton.sizes import Layer, Tile, tile_by_rule

SIDES = [(5, 1, 1, 1), (5, 3, 1, 1), (6, 3, 2, 1), (7, 3, 3, 1), (9, 3, 1, 2), (9, 2, 2, 3), (8, 5, 2, 1), (4, 4, 1, 1)]


@pytest.mark.parametrize(("down", "across"), list(itertools.pairwise([*SIDES, SIDES[0]])))
def test_windows_of_one_launch_have_no_pose_in_common(down, across):
    """A side is given by the sizes of map, kernel, stride and dilation."""
    (height, *of_rows), (width, *of_columns) = down, across
    kernel, stride, dilation = zip(of_rows, of_columns, strict=True)
    poses, weight = torch.zeros(2, 3, height, width, 1, 1), torch.zeros(3, *kernel, 2, 1, 1)
    problem = Problem(Children(poses, weight, None, None), Options(stride=stride, dilation=dilation))
    seen = []
    for windows in problem.windows_apart():
        poses_seen = []
        for n in range(windows["n_samples"]):  # as `find_windows` counts
            image, of_image = divmod(n, windows["windows_down"] * windows["windows_across"])
            y, x = divmod(of_image, windows["windows_across"])
            sample = image * windows["sample_image"] + windows["sample_0"]
            seen.append(sample + y * windows["sample_down"] + x * windows["sample_across"])
            corner = image * windows["pose_image"] + windows["pose_0"]
            corner += y * windows["pose_down"] + x * windows["pose_across"]
            places = itertools.product(range(kernel[0]), range(kernel[1]))
            poses_seen += [corner + i * dilation[0] * width + j * dilation[1] for i, j in places]
        assert len(poses_seen) == len(set(poses_seen))
        assert max(poses_seen) < height * width + windows["pose_image"]
    assert sorted(seen) == list(range(problem.samples))
    assert problem.windows()["n_samples"] == problem.samples


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "steps"),
    [(3, 1, 1, 3), (3, 2, 1, 2), (3, 1, 2, 3), (1, 1, 1, 1), (2, 2, 1, 1), (3, 3, 1, 1)],
)
def test_no_more_launches_than_windows_overlap(kernel, stride, dilation, steps):
    assert _step_apart(kernel, stride, dilation) == steps


LAYERS = [
    Layer(kernel, agreement, moments, over, parents, *pose)
    for kernel in ("sums", "normalize", "grads", "weight_grads")
    for agreement, moments, over in (("dot", False, False), ("unit", False, True), ("gaussian", True, False))
    for parents in (1, 5, 10, 64, 100, 512)
    for pose in ((4, 4, 4), (1, 8, 16), (8, 8, 8), (1, 64, 2), (3, 2, 5))
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_tile_is_one_that_triton_takes(layer):
    tile = tile_by_rule(layer)
    assert all(x == 1 << (x.bit_length() - 1) for x in (tile.parents, tile.per_lane, tile.samples, tile.warps))
    assert layer.parents % tile.per_lane == 0
    assert tile.programs >= 1
    if layer.kernel != "sums":
        assert tile.warps == 1  # sums across warps would need barriers


def test_parts_are_bounded():
    """Partial results stay below a limit, even if more splits would be needed to fill the device."""
    children = Children(torch.zeros(4, 2048, 1, 1, 1, 8), torch.zeros(32, 1, 1, 512, 8, 16), None, None)
    problem = Problem(children, Options("children"), torch.zeros(4, 512, 16))
    part = 4 * 512 * 16
    splits, per_split = problem.split(2048, 1, Tile(1, 1, 1, 1, 10**6, 64), part)
    assert splits * part <= MOST_PARTS
    assert splits * per_split >= 2048
