"""Credit: shares of children in parents, composed through layers, as parse trees and over pixels."""

import itertools

import pytest
import torch
from algorithms import ALGORITHMS, make
from networks import Network
from torch import nn

from torchcaps import (
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleFC,
    CapsuleLinear,
    Capsules,
    CapsuleShared,
    CapsuleStack,
    DynamicRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RoutingPool2d,
    SlotAttention,
    VectorNormRouting,
    create_model,
)
from torchcaps.capsules import Prediction
from torchcaps.explain import credit, heat, parse_tree, places
from torchcaps.explain.credits import NoCapsules
from torchcaps.routing import Routing


class Layers(nn.Module):
    """A network of the given parts, whose last poses' lengths are the scores."""

    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> Prediction:
        for part in self.parts:
            x = part(x)
        if isinstance(x, torch.Tensor):
            return Prediction(x)
        return Prediction(activations=x.poses.flatten(2).norm(dim=-1), capsules=x)


def sums_of(network: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [layer.shares.flatten(2).sum(-1) for layer in credit(network, x).layers]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_total_is_handed_on_for_every_routing(name: str) -> None:
    routing = make(name)
    network = Layers(
        CapsuleConv2d(2, 3, (2, 2), (2, 2), kernel_size=3, stride=2, padding=1, dilation=1, routing=routing),
        CapsuleConv2d(3, 2, (2, 2), (2, 2), kernel_size=2, routing=routing),
        CapsuleLinear(2, 5, (2, 2), (2, 2), routing, share_positions=True),
        CapsuleLinear(5, 4, (2, 2), (2, 2), routing),
    )
    found = credit(network, torch.randn(3, 2, 7, 9, 2, 2))
    assert [tuple(layer.shares.shape) for layer in found.layers] == [
        (3, 4, 2, 7, 9), (3, 4, 3, 4, 5), (3, 4, 2, 3, 4), (3, 4, 5),
    ]  # fmt: skip
    for layer in found.layers:
        assert (layer.shares >= 0).all()
        torch.testing.assert_close(layer.shares.flatten(2).sum(-1), torch.ones(3, 4))
    # Of all layers the first one says most: it is not even.
    assert found.layers[0].shares.flatten(2).std(-1).min() > 0


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
def test_the_total_is_handed_on_in_every_schedule(schedule) -> None:
    routing = InvertedAttentionRouting(2)
    stack = CapsuleStack(
        CapsuleConv2d(2, 3, 4, 4, kernel_size=3, routing=routing),
        CapsuleLinear(27, 5, 4, 4, routing),
        schedule=schedule,
    )
    for sums in sums_of(Layers(stack), torch.randn(2, 2, 5, 5, 4)):
        torch.testing.assert_close(sums, torch.ones(2, 5))


def test_shares_by_hand() -> None:
    """Two children with votes of lengths 3 and 1 for parent 0, and 2 and 2 for parent 1, with one iteration."""
    layer = CapsuleLinear(2, 2, 1, 1, DynamicRouting(1))
    layer.weight.data = torch.tensor([[[[3.0]], [[2.0]]], [[[-1.0]], [[2.0]]]])
    found = credit(Layers(layer), torch.ones(1, 2, 1))
    torch.testing.assert_close(found.layers[0].shares, torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]))


def test_weights_count_where_the_routing_gives_scores() -> None:
    layer = CapsuleLinear(3, 2, 4, 4, HeinsenRouting(2))
    poses, scores = torch.randn(1, 3, 4), torch.tensor([[1.0, -torch.inf, 0.0]])
    parents = layer(Capsules(poses, scores), return_coefficients=True)
    weights = (parents.coefficients * scores.sigmoid().unsqueeze(-1)).detach()
    network = Network(lambda net, poses, scores: net.layer(Capsules(poses, scores)).scores, layer=layer)
    (found,) = credit(network, (poses, scores)).layers
    torch.testing.assert_close(found.shares, (weights / weights.sum(1, keepdim=True)).transpose(1, 2))
    assert found.shares[0, :, 1].max() == 0  # padding


def test_convolutions_equal_plain_loops() -> None:
    routing = DynamicRouting(2)
    conv = CapsuleConv2d(
        2, 3, 4, 4, kernel_size=(2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2), routing=routing
    )
    network = Layers(conv, CapsuleLinear(3 * 3 * 3, 2, 4, 4, routing))
    x = torch.randn(1, 2, 5, 7, 4)
    first, second = credit(network, x).layers
    table = first.own.table[0]
    expected = torch.zeros(2, 2, 5, 7)
    rows, columns, types, down, across, parents = map(range, table.shape)
    for k, r, c, t, i, j, p in itertools.product(range(2), rows, columns, types, down, across, parents):
        y, z = 2 * r + i - 1, c + 2 * j
        if 0 <= y < 5 and 0 <= z < 7:
            expected[k, t, y, z] += second.shares[0, k, p, r, c] * table[r, c, t, i, j, p]
    torch.testing.assert_close(first.shares[0], expected)


def test_sequences() -> None:
    routing = DynamicRouting(2)
    network = Layers(CapsuleConv1d(2, 3, 4, 4, 3, routing, padding=1), CapsuleLinear(3 * 6, 2, 4, 4, routing))
    first, _ = credit(network, torch.randn(2, 2, 6, 4)).layers
    assert first.shares.shape == (2, 2, 2, 6)
    torch.testing.assert_close(first.shares.flatten(2).sum(-1), torch.ones(2, 2))


def test_capsule_fc_adds_features() -> None:
    layer = CapsuleFC(6, 3, 4)
    poses = torch.rand(2, 6, 4)
    (found,) = credit(Layers(layer), poses).layers
    for b, j in itertools.product(range(2), range(3)):
        parts = torch.stack([(layer.weight[:, i, j] * poses[b, i]).norm() for i in range(6)])
        torch.testing.assert_close(found.shares[b, j], (parts / parts.sum()).detach())


@pytest.mark.parametrize("windows", [{}, {"kernel_size": 3, "stride": 2, "padding": 1}])
def test_pools_hand_on_what_a_linear_layer_takes_of_each_group(windows) -> None:
    pool = RoutingPool2d(4, sharpness=2.0, **windows)
    numbers = 12 if not windows else 12 * 3 * 3
    linear = nn.Linear(numbers, 5)
    x = torch.randn(2, 12, 6, 6)
    with torch.no_grad():  # it needs gradients all the same
        found = credit(Layers(pool, nn.Flatten(), linear), x)
    (layer,) = found.layers
    assert layer.shares.shape == (2, 5, 3, 6, 6)
    torch.testing.assert_close(layer.shares.flatten(2).sum(-1), torch.ones(2, 5))
    pooled = pool(x).unflatten(1, (3, 4))
    products = (linear.weight.view(1, 5, *pooled.shape[1:]) * pooled.unsqueeze(1)).sum(3).abs().detach()
    products = products.squeeze(-1).squeeze(-1) if not windows else products
    torch.testing.assert_close(
        found.top, products / products.flatten(2).sum(-1).view(2, 5, *[1] * (products.dim() - 2))
    )
    if not windows:
        _, coefficients = pool(x, return_coefficients=True)
        amounts = coefficients * x.unflatten(1, (3, 4)).norm(dim=2)
        expected = found.top[..., None, None] * (amounts / amounts.sum((2, 3), keepdim=True)).unsqueeze(1)
        torch.testing.assert_close(layer.shares, expected)


def test_children_without_votes_share_evenly() -> None:
    layer = CapsuleLinear(4, 2, 3, 3, DynamicRouting(2))
    (found,) = credit(Layers(layer), torch.zeros(1, 4, 3)).layers
    torch.testing.assert_close(found.shares, torch.full((1, 2, 4), 0.25))


def test_nothing_is_left_behind() -> None:
    network = create_model("narrow_cifar10", routing=InvertedAttentionRouting(2)).train()
    network.capsules.layers[0].routing.eval()
    before = {name: module.training for name, module in network.named_modules()}
    parameters = {name: p.grad for name, p in network.named_parameters()}
    credit(network, torch.rand(1, 3, 32, 32))
    with pytest.raises(ValueError, match="expected images"):
        credit(network, torch.rand(1, 3, 31, 32))
    places(network, (3, 32, 32))
    assert {name: module.training for name, module in network.named_modules()} == before
    assert {name: p.grad for name, p in network.named_parameters()} == parameters
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not (isinstance(module, Routing) and module.is_watched)


def test_a_network_without_capsules_says_so() -> None:
    with pytest.raises(NoCapsules, match="FeatureClassifier ran no capsule layer"):
        credit(create_model("pooling_cnn", pooling="max"), torch.rand(1, 3, 32, 32))
    assert places(create_model("pooling_cnn", pooling="max"), (3, 32, 32)) == {}


def test_windows_of_padding_alone_are_made_of_nothing() -> None:
    """Their part in the classes goes to the other parents."""
    for routing in (DynamicRouting(2), HeinsenRouting(2)):
        torch.manual_seed(0)
        conv = CapsuleConv2d(2, 3, 4, 4, kernel_size=3, padding=3, routing=routing)
        network = Layers(conv, CapsuleLinear(3, 2, 4, 4, routing, share_positions=True))
        first = credit(network, torch.randn(2, 2, 4, 4, 4)).layers[0]
        for shares in (first.shares, first.even):
            torch.testing.assert_close(shares.flatten(2).sum(-1), torch.ones(2, 2))


def test_parents_are_classes_only_if_the_network_says_so() -> None:
    """As many capsules as classes do not make class capsules."""
    x = torch.randn(2, 6, 4)

    def mixed(layer: nn.Module, linear: nn.Module) -> Network:
        return Network(lambda net, x: net.linear(net.layer(x).poses.flatten(1)), layer=layer, linear=linear)

    top = credit(mixed(CapsuleLinear(6, 5, 4, 3, DynamicRouting(2)), nn.Linear(15, 5)), x).top
    assert (top > 0).all()
    assert not torch.equal(top, torch.eye(5).expand(2, -1, -1))
    pool = Layers(RoutingPool2d(4), nn.Flatten(), nn.Linear(12, 3))
    assert (credit(pool, torch.randn(2, 12, 5, 5)).top > 0).all()
    fc = Layers(CapsuleFC(6, 3, 4))
    torch.testing.assert_close(credit(fc, x).top, torch.eye(3).expand(2, -1, -1))
    behind = mixed(CapsuleFC(6, 3, 4), nn.Linear(12, 7))
    assert credit(behind, x).layers[0].shares.shape == (2, 7, 6)


def test_layers_are_connected_by_their_poses_not_by_their_numbers() -> None:
    layers = {name: CapsuleLinear(4, 4, 3, 3, DynamicRouting(2)) for name in ("first", "second")}
    chain = Network(lambda net, x: net.second(net.first(x).poses), **layers)
    side_by_side = Network(lambda net, x: (net.first(x), net.second(x))[1], **layers)
    in_another_order = Network(lambda net, x: net.second(net.first(x).poses.flip(1)), **layers)
    x = torch.randn(2, 4, 3)
    names = [[layer.name for layer in credit(net, x).layers] for net in (chain, side_by_side, in_another_order)]
    assert names == [["first", "second"], ["second"], ["second"]]


def test_layers_whose_routing_prepares_its_children_are_connected() -> None:
    """Slot attention normalizes the poses first."""
    first = CapsuleLinear(6, 4, 3, 3, DynamicRouting(2))
    network = Layers(first, CapsuleShared(None, 2, 3, SlotAttention(2, start="learned")))
    assert [layer.name for layer in credit(network, torch.randn(2, 6, 3)).layers] == ["parts.0", "parts.1"]


def test_a_pool_that_returns_its_coefficients_too() -> None:
    pool = Network(
        lambda net, x: Prediction(net.pool(x, return_coefficients=True)[0].flatten(1)), pool=RoutingPool2d(4)
    )
    assert credit(pool, torch.randn(2, 12, 5, 5)).layers[0].shares.shape == (2, 12, 3, 5, 5)


def test_a_tree_of_as_many_groups_as_classes_has_both() -> None:
    pool = Layers(RoutingPool2d(4), nn.Flatten(), nn.Linear(12, 3))
    tree = parse_tree(credit(pool, torch.randn(1, 12, 5, 5)), 0, 1)
    assert (tree.layer, len(tree.parts)) == (2, 3)
    assert tree.parts[0].layer == 1


def test_flattened_children_keep_their_grid() -> None:
    network = Network(
        lambda net, images: net.linear(net.conv(images.movedim(1, -1).unsqueeze(1)).poses.reshape(len(images), -1, 4)),
        conv=CapsuleConv2d(1, 6, 3, 4, 5, DynamicRouting(2)),
        linear=CapsuleLinear(6 * 4 * 4, 3, 4, 4, DynamicRouting(2)),
    )
    found = credit(network, torch.rand(2, 3, 8, 8))
    assert [tuple(layer.shares.shape) for layer in found.layers] == [(2, 3, 1, 8, 8), (2, 3, 6, 4, 4)]
    assert {name: tuple(x.shape) for name, x in heat(network, torch.rand(2, 3, 8, 8)).items()} == {
        "conv": (2, 3, 8, 8), "linear": (2, 3, 8, 8),
    }  # fmt: skip


def test_what_a_network_may_return() -> None:
    layer = CapsuleLinear(5, 2, 4, 4, DynamicRouting(2))
    x = torch.randn(1, 5, 4)
    assert credit(layer, x).top.shape == (1, 2, 2)  # capsules
    with pytest.raises(ValueError, match="not finite"):
        credit(layer, x / 0)
    with pytest.raises(TypeError, match=r"Network must return a Prediction, .* scores \(batch, classes\), got"):
        credit(Network(lambda net, x: net.layer(x).poses, layer=layer), x)


class TestTrees:
    def test_strands_sum_to_the_class(self) -> None:
        routing = DynamicRouting(2)
        network = Layers(CapsuleConv2d(2, 3, 4, 4, 3, routing), CapsuleLinear(27, 2, 4, 4, routing))
        found = credit(network, torch.randn(2, 2, 5, 5, 4))
        tree = parse_tree(found, 1, 0, widest=9)
        assert (tree.layer, tree.place) == (2, (0,))
        assert tree.share == pytest.approx(1)
        assert tree.rest == pytest.approx(0, abs=1e-6)
        for part in tree.parts:
            expected = found.layers[1].shares[1, 0, :, *part.place].sum()
            assert part.share == pytest.approx(float(expected))
            assert sum(x.share for x in part.parts) + part.rest == pytest.approx(part.share)
            for leaf in part.parts:  # inside the window
                assert 0 <= leaf.place[0] - part.place[0] < 3
                assert 0 <= leaf.place[1] - part.place[1] < 3
        # All strands to a place together have its share in the class.
        place = tree.parts[0].parts[0].place
        whole = parse_tree(found, 1, 0, widest=25)
        strands = sum(leaf.share for part in whole.parts for leaf in part.parts if leaf.place == place)
        assert strands == pytest.approx(float(found.layers[0].shares[1, 0, :, *place].sum()))
        assert [x.share for x in tree.parts] == sorted((x.share for x in tree.parts), reverse=True)

    def test_groups_are_parts(self) -> None:
        found = credit(Layers(CapsuleLinear(5, 2, 4, 4, DynamicRouting(2))), torch.randn(1, 5, 4))
        tree = parse_tree(found, 0, 1, groups=[[0, 3], [1], [2, 4]])
        shares = found.layers[0].shares[0, 1]
        expected = {0: shares[0] + shares[3], 1: shares[1], 2: shares[2] + shares[4]}
        assert {part.place[0]: pytest.approx(part.share) for part in tree.parts} == {
            index: pytest.approx(float(share)) for index, share in expected.items()
        }

    def test_bad_arguments(self) -> None:
        found = credit(Layers(CapsuleLinear(5, 2, 4, 4, DynamicRouting(2))), torch.randn(1, 5, 4))
        with pytest.raises(ValueError, match="class_ must be from 0 to 1, got 2"):
            parse_tree(found, 0, 2)


class TestPixels:
    def test_windows_of_plain_convolutions(self) -> None:
        seen = places(create_model("capsnet_small"), (1, 28, 28))["class_capsules"]
        assert seen == ((8.0, 8.0), (2.0, 2.0), (17.0, 17.0))
        assert seen.box(0, 5, (28, 28)) == pytest.approx((10 / 28, 0, 27 / 28, 17 / 28))

    def test_windows_of_capsule_convolutions_are_put_together(self) -> None:
        network = create_model("narrow_cifar10", routing=InvertedAttentionRouting(2))
        found = places(network, (3, 32, 32))
        # 3x3 convolutions of stride 2 and 1 over a grid of step 2: from 3 pixels to 7 and 15.
        assert [x.window for x in found.values()] == [(3, 3), (7, 7), (15, 15)]
        assert [x.step for x in found.values()] == [(2, 2), (4, 4), (4, 4)]
        assert [x.offset for x in found.values()] == [(0.5, 0.5), (2.5, 2.5), (6.5, 6.5)]

    def test_no_place_behind_a_layer_that_sees_all(self) -> None:
        network = create_model("capnet_dynamic", types=2, grid=4)
        assert list(places(network, (3, 32, 32))) == ["capsules"]
        assert len(credit(network, torch.rand(1, 3, 32, 32)).layers) == 2

    def test_only_what_a_class_sees_is_warm(self) -> None:
        """A class that takes its input from one child alone is warm at the center of this child's window."""
        network = create_model("capsnet_small", classes=2, decoder=False)
        weight = torch.zeros(8, 6, 6, 2, 8, 16)
        weight[3, 1, 4, 0] = 1
        weight[:, :, :, 1] = 1
        network.class_capsules.weight.data = weight.flatten(0, 2)
        maps = heat(network, torch.rand(1, 1, 28, 28))["class_capsules"]
        assert maps.shape == (1, 2, 28, 28)
        assert maps[0, 0].argmax() == (8 + 2 * 1) * 28 + 8 + 2 * 4
        assert maps[0, 0].max() == pytest.approx(36)
        assert maps[0, 0, 16:].max() == 0

    def test_maps_do_not_show_how_many_windows_a_position_lies_in(self) -> None:
        """Children that are all alike are as warm in the middle as at the edge."""
        routing = DynamicRouting(2)
        first = CapsuleConv2d(2, 3, 4, 4, kernel_size=3, stride=2, routing=routing)
        second = CapsuleLinear(3, 2, 4, 4, routing, share_positions=True)
        first.weight.data[:] = first.weight[:, :1, :1]
        network = Layers(first, second)
        poses = torch.randn(1, 2, 1, 1, 4).expand(-1, -1, 9, 9, -1)
        found = credit(network, poses).layers[0]
        by_place = found.shares.sum(2)
        assert by_place.std() > 0.001
        torch.testing.assert_close(by_place / found.even.sum(2), torch.ones(1, 2, 9, 9))
        torch.testing.assert_close(found.even.flatten(2).sum(-1), torch.ones(1, 2))

    def test_a_grid_with_a_single_row(self) -> None:
        network = create_model("capsnet_small", image_size=(17, 33), classes=2, decoder=False)
        maps = heat(network, torch.rand(1, 1, 17, 33))["class_capsules"]
        assert (maps > 0).any(-1).all()  # each row of pixels

    def test_pools(self) -> None:
        network = create_model("pooling_resnet_small")
        (maps,) = heat(network, torch.rand(2, 3, 32, 32)).values()
        assert maps.shape == (2, 10, 32, 32)
        assert maps.mean((2, 3)).sub(1).abs().max() < 0.1
        assert maps.std() > 0.001


def test_vector_norm_routing_counts_lengths() -> None:
    layer = CapsuleLinear(3, 2, 4, 4, VectorNormRouting(1, sharpness=2.0))
    x = torch.randn(1, 3, 4)
    parents = layer(x, return_coefficients=True)
    votes = torch.einsum("bid,ijdh->bijh", x, layer.weight).norm(dim=-1)
    amounts = (parents.coefficients * votes).detach()
    (found,) = credit(Layers(layer), x).layers
    torch.testing.assert_close(found.shares, (amounts / amounts.sum(1, keepdim=True)).transpose(1, 2))
