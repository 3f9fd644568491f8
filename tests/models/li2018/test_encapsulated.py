"""CapsuleBlock2d, with its master and aide branches, and CapsuleFC against their formulas written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps import CapsuleBlock2d, CapsuleFC, Capsules
from torchcaps.explain.controls import with_new_weights
from torchcaps.functional import squash
from torchcaps.models.li2018.encapsulated import BNReLUSquash, as_map, as_poses

TYPES = 3
COEFFICIENTS = ["own", "other", "both", None]
# (in_pose, out_pose, kernel_size, stride): the paper's types I and II, type I without a stride and with equal poses.
KINDS = [(2, 4, 3, 2), (4, 4, 1, 1), (1, 2, 3, 1), (2, 2, 3, 2)]


def poses(in_pose: int, size: int = 6, batch: int = 2) -> Tensor:
    return torch.rand(batch, TYPES, size, size, in_pose, generator=torch.Generator().manual_seed(0)).double()


def per_type(x: Tensor, conv: nn.Conv2d, stride: int, padding: int) -> Tensor:
    """Convolve each type on its own."""
    maps, weights = x.chunk(TYPES, dim=1), conv.weight.chunk(TYPES)
    biases = (None,) * TYPES if conv.bias is None else conv.bias.chunk(TYPES)
    return torch.cat([F.conv2d(*own, stride, padding) for own in zip(maps, weights, biases, strict=True)], dim=1)


def activate(x: Tensor, features: int) -> Tensor:
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    x = ((x - mean) / (variance + 1e-5).sqrt()).clamp_min(0)
    capsules = [squash(x[:, k : k + features].movedim(1, -1)).movedim(-1, 1) for k in range(0, x.shape[1], features)]
    return torch.cat(capsules, dim=1)


def expected(block: CapsuleBlock2d, x: Tensor, skip: Tensor | None) -> Tensor:
    """The layer's formula, type by type; x is a map."""
    stride, padding, features = block.stride, block.padding, block.out_pose
    if block.coefficients is None:
        y = per_type(x, block.conv, stride, padding)
    else:
        master = activate(per_type(x, block.master[0], stride, padding), features)
        aide = activate(F.conv2d(x, block.aide[0].weight, None, stride, padding + 2), features)
        c_master, c_aide = per_type(master, block.from_master, 1, 1), per_type(aide, block.from_aide, 1, 1)
        if block.coefficients == "both":
            together = c_master + c_aide
            c_master, c_aide = together[:, 0::2], together[:, 1::2]
        elif block.coefficients == "other":
            c_master, c_aide = c_aide, c_master
        y = master * c_master.repeat_interleave(features, 1) + aide * c_aide.repeat_interleave(features, 1)
    if block.shortcut is not None:
        y = y + (x if isinstance(block.shortcut, nn.Identity) else F.conv2d(x, block.shortcut.weight, None, stride, 1))
    return activate(y if skip is None else y + skip, features)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize(("in_pose", "out_pose", "kernel_size", "stride"), KINDS)
@pytest.mark.parametrize("skip", [False, True])
def test_block(coefficients, in_pose, out_pose, kernel_size, stride, skip):
    block = CapsuleBlock2d(TYPES, in_pose, out_pose, kernel_size, stride, coefficients=coefficients, skip=skip)
    x = poses(in_pose)
    torch.testing.assert_close(as_map(block(x).poses), expected(block, as_map(x), None))
    size = 6 // stride
    given = torch.rand(2, TYPES, size, size, out_pose)
    actual = block(Capsules(x), given)
    torch.testing.assert_close(as_map(actual.poses), expected(block, as_map(x), as_map(given)))
    assert actual.poses.shape == (2, TYPES, size, size, out_pose)
    assert actual.activations.max() < 1


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_gradients(coefficients):
    block = CapsuleBlock2d(2, 1, 2, 3, 2, coefficients=coefficients, skip=True)
    names = [name for name, _ in block.named_parameters()]

    def run(x, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(block, state, (x,)).poses

    x = torch.rand(2, 2, 3, 3, 1, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *block.parameters()), fast_mode=True)


def test_blocks_pass_maps_on_without_a_copy():
    first, second = CapsuleBlock2d(TYPES, 2, 4, 3, 2), CapsuleBlock2d(TYPES, 4, 4, 1)
    capsules = first(poses(2)).poses
    assert as_map(capsules).data_ptr() == capsules.data_ptr()
    torch.testing.assert_close(as_poses(as_map(capsules), 4), capsules)
    # Contiguous poses give the same values.
    torch.testing.assert_close(second.eval()(capsules.contiguous()).poses, second(capsules).poses)


def test_first_values():
    block = CapsuleBlock2d(32, 4, 8, 3, 2, coefficients="own")
    conv = block.aide[0]
    fan = (conv.in_channels + conv.out_channels) * 49
    assert conv.weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.02)
    assert block.from_aide.bias.std().item() == pytest.approx(1, rel=0.4)
    assert all(
        module.bias is None
        for module in block.modules()
        if isinstance(module, nn.Conv2d) and module not in (block.from_aide, block.from_master)
    )
    drawn = with_new_weights(block, seed=1)
    assert (drawn.aide[0].weight != conv.weight).all()
    assert drawn.aide[0].weight.std().item() == pytest.approx(conv.weight.std().item(), rel=0.02)
    assert drawn.from_aide.bias.std().item() == pytest.approx(1, rel=0.4)


def test_batch_normalization_that_is_not_trained_takes_a_single_position():
    unit = BNReLUSquash(2, 3)
    unit.bn.eval()
    assert unit(torch.rand(1, 6, 1, 1)).isfinite().all()
    unit.eval().bn.train()
    with pytest.raises(ValueError, match="batch normalization needs more than one sample or position"):
        unit(torch.rand(1, 6, 1, 1))


def test_block_of_bad_input():
    with pytest.raises(ValueError, match="skip=True needs .*got kernel_size=3 and padding=0"):
        CapsuleBlock2d(2, 2, 2, 3, padding=0, skip=True)
    block = CapsuleBlock2d(TYPES, 2, 4)
    for bad in (torch.rand(2, 6, 4, 4), torch.rand(2, 4, 6, 6, 2), torch.rand(2, 3, 6, 6, 4)):
        with pytest.raises(ValueError, match=r"expected poses of shape \(batch, 3, height, width, 2\), got"):
            block(bad)
    assert "coefficients='both'" in repr(block)


def test_fully_connected():
    layer = CapsuleFC(TYPES * 4, 5, 2)
    x = poses(2, size=2)
    actual = layer(x)
    children = x.reshape(2, TYPES * 4, 2)
    for b in range(2):
        for j in range(5):
            s = torch.stack(
                [sum(children[b, i, h] * layer.weight[h, i, j] for i in range(TYPES * 4)) for h in range(2)]
            )
            torch.testing.assert_close(actual.poses[b, j], squash(s))
    torch.testing.assert_close(layer(children).poses, actual.poses)
    assert 0.8 * 12**-0.5 < layer.weight.max() <= 12**-0.5
    assert -(12**-0.5) <= layer.weight.min() < -0.8 * 12**-0.5
    assert torch.autograd.gradcheck(lambda x: layer(x).poses, children.clone().requires_grad_())
