"""SegCaps against convolutions of each type and votes in tensors, and the U-Net beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import CapsuleMap, Capsules, DynamicRouting, create_model
from torchcaps.nn import map as map_module
from torchcaps.ops import StoredVotes

# Kernel, stride, types, features, and those of the parents, in the order of LaLonde & Bagci's Figure 2.
LAYERS = [
    (5, 2, 1, 16, 2, 16),
    (5, 1, 2, 16, 4, 16),
    (5, 2, 4, 16, 4, 32),
    (5, 1, 4, 32, 8, 32),
    (5, 2, 8, 32, 8, 64),
    (5, 1, 8, 64, 8, 32),
    (4, 2, 8, 32, 8, 32),  # transposed
    (5, 1, 16, 32, 4, 32),
    (4, 2, 4, 32, 4, 16),
    (5, 1, 8, 16, 4, 16),
    (4, 2, 4, 16, 2, 16),
    (1, 1, 3, 16, 1, 16),
]


def layers_of(network: nn.Module) -> list[CapsuleMap]:
    """The capsule layers in the order in which they run."""
    parts = [*network.down, *(nn.Sequential(*pair) for pair in zip(network.up, network.after_skip, strict=True))]
    return [layer for part in parts for layer in part]


def stored(layer: CapsuleMap, x: Tensor) -> Tensor:
    """The poses of parents by convolutions of one type at a time and `DynamicRouting` of a tensor of votes."""
    types = []
    for i in range(layer.in_capsules):
        poses = x[:, i].movedim(-1, 1)
        if layer.transposed:
            types.append(F.conv_transpose2d(poses, layer.weight, stride=2, padding=1))
        else:
            before, after = {(5, 1): (2, 2), (5, 2): (1, 2), (1, 1): (0, 0)}[layer.kernel_size[0], layer.stride[0]]
            types.append(F.conv2d(F.pad(poses, (before, after) * 2), layer.weight, stride=layer.stride))
    votes = torch.stack(types, dim=1).unflatten(2, (layer.out_capsules, layer.out_pose))  # (b, i, j, k, y, x)
    batch, height, width = len(x), *votes.shape[-2:]
    routing = DynamicRouting(layer.routing.iterations, learn_bias=True).with_values(bias=layer.routing.bias)
    parents = routing(StoredVotes(votes.permute(0, 4, 5, 1, 2, 3).flatten(0, 2))).poses
    return parents.unflatten(0, (batch, height, width)).movedim(3, 1)


def lengths_stored(network: nn.Module, images: Tensor) -> Tensor:
    first = F.relu(network.conv(images)).movedim(1, -1).unsqueeze(1)
    one, two, three, four, five, six, *rest = layers_of(network)
    half = stored(two, stored(one, first))
    quarter = stored(four, stored(three, half))
    x = stored(six, stored(five, quarter))
    for up, after, skipped in zip(rest[::2], rest[1::2], (quarter, half, first), strict=True):
        x = stored(after, torch.cat([stored(up, x), skipped], dim=1))
    return x.norm(dim=-1)


@pytest.mark.parametrize("variant", ["R3", "R1"])
def test_segcaps_has_the_layers_of_the_paper(variant):
    network = create_model("segcaps", variant=variant)
    layers = layers_of(network)
    shown = [(x.kernel_size[0], x.stride[0], x.in_capsules, x.in_pose, x.out_capsules, x.out_pose) for x in layers]
    assert shown == LAYERS
    assert [x.transposed for x in layers] == [kernel == 4 for kernel, *_ in LAYERS]
    same = [1 if stride == 1 and variant == "R1" else 3 for _, stride, *_ in LAYERS]
    assert [x.routing.iterations for x in layers] == [1, *same[1:]]
    for layer in layers:
        assert (layer.routing.bias == 0.1).all()
        std = (2 / layer.weight[0].numel()) ** 0.5  # of He; Keras cuts it at two
        assert layer.weight.abs().max() <= 2 * std
        assert layer.weight.std().item() == pytest.approx(0.88 * std, rel=0.05)


@pytest.mark.parametrize("block", [1, 2**20])
def test_segcaps_is_convolutions_and_routing_of_stored_votes(block, monkeypatch):
    """In values and gradients, with blocks of one row too."""
    monkeypatch.setattr(map_module, "BLOCK", block)
    torch.manual_seed(0)
    network = create_model("segcaps", in_channels=2, decoder=False).double()
    images = torch.rand(2, 2, 16, 24, dtype=torch.float64, requires_grad=True)
    lengths, expected = network(images).activations, lengths_stored(network, images)
    assert_close(lengths, expected, rtol=0, atol=1e-12)
    inputs = [images, *network.parameters()]
    grads, expected_grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (lengths, expected))
    for grad, one in zip(grads, expected_grads, strict=True):
        assert_close(grad, one, rtol=0, atol=1e-12 * max(1, one.abs().max().item()))


@pytest.mark.parametrize("name", ["segcaps", "unet"])
@pytest.mark.parametrize("classes", [1, 3])
def test_images_of_any_size(name, classes):
    small = {"features": 2} if name == "segcaps" else {"channels": 2}
    network = create_model(name, in_channels=2, classes=classes, **small).eval()
    for height, width in ((1, 1), (8, 16), (13, 21)):
        images = torch.rand(2, 2, height, width)
        result = network(images)
        map_ = result.activations if name == "segcaps" else result.scores
        assert (result.scores is None) == (name == "segcaps")
        assert map_.shape == (2, classes, height, width)
        padded = F.pad(images, (0, -width % 8, 0, -height % 8))
        whole = network(padded)
        assert_close(map_, (whole.activations if name == "segcaps" else whole.scores)[..., :height, :width])
        if name == "segcaps":
            assert result.capsules.poses.shape == (2, classes, height, width, 2)
            assert_close(map_, result.capsules.poses.norm(dim=-1))
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 2, height, width\), got \(2, 13, 21\)"):
        network(images[0])


def test_masks_of_the_classes_hide_capsules_from_the_decoder():
    network = create_model("segcaps", in_channels=3, classes=2, features=4)
    capsules = Capsules(torch.randn(2, 2, 5, 6, 4))
    masks = torch.rand(2, 2, 5, 6) > 0.5
    drawn = network.reconstruct(capsules, masks)
    assert drawn.shape == (2, 3, 5, 6)
    hidden = Capsules(torch.where(masks.unsqueeze(-1), capsules.poses, 0))
    assert_close(network.reconstruct(hidden), drawn)
    assert not torch.equal(network.reconstruct(capsules), drawn)
    assert_close(network.reconstruct(capsules, masks.float()), drawn)
    with pytest.raises(ValueError, match=r"expected masks of shape \(2, 2, 5, 6\), got \(2, 5, 6\)"):
        network.reconstruct(capsules, masks[:, 0])
    with pytest.raises(ValueError, match=r"expected poses of shape \(batch, 2, height, width, 4\), got \(2, 2, 4\)"):
        network.reconstruct(Capsules(capsules.poses[:, :, 0, 0]))
    with pytest.raises(RuntimeError, match="this SegCaps has no decoder: build it with decoder=True"):
        create_model("segcaps", features=4, decoder=False).reconstruct(capsules)


@pytest.mark.parametrize("name", ["segcaps", "unet"])
def test_it_learns_to_find_squares(name):
    """Bright squares on noise, in a few steps."""
    torch.manual_seed(0)
    network = create_model(name, **({"features": 4} if name == "segcaps" else {"channels": 4}))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    masks = torch.zeros(4, 1, 24, 24)
    for i, mask in enumerate(masks):
        mask[:, 3 * i : 3 * i + 9, 4 * i : 4 * i + 8] = 1
    images = 0.5 * masks + 0.5 * torch.rand(4, 1, 24, 24)
    for _ in range(50):
        result = network(images)
        found = result.scores.sigmoid() if result.activations is None else result.activations
        optimizer.zero_grad()
        (found - masks).square().mean().backward()
        optimizer.step()
    assert ((found > 0.5) == masks.bool()).float().mean() > 0.97
