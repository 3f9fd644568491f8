"""Routing dynamics count every vote once, in the right bin."""

import math

import pytest
import torch
from algorithms import Largest
from networks import Network
from torch import Tensor, nn

from torchcaps import CapsuleConv2d, CapsuleLinear, Capsules, CapsuleShared, CapsuleStack, SlotAttention
from torchcaps.explain import RoutingDynamics, capsule_layers, routing_dynamics, routing_dynamics_figure
from torchcaps.ops import votes as ops_votes
from torchcaps.routing import DynamicRouting, EMRouting, InvertedAttentionRouting, VectorNormRouting


def dynamics_of(layer: nn.Module, *children: Capsules, name: str = "layer", bins: int = 20) -> RoutingDynamics:
    """Routing dynamics of a layer; an input of its network is not an image but the index of the children to route."""
    network = Network(lambda net, index: net.layer(children[int(index)]), layer=layer)
    return routing_dynamics(network, name, torch.arange(len(children)).unbind(), bins)


def counted(pairs: list[tuple[list[float], list[float]]], bins: int) -> RoutingDynamics:
    """Routing dynamics of pairs of a parent and a vote, counted one pair at a time."""
    edges = [-1 + 2 * k / bins for k in range(bins + 1)]
    counts, lengths, zeros = [0] * bins, [0.0] * bins, 0
    for parent, vote in pairs:
        size, length = math.hypot(*parent), math.hypot(*vote)
        if size == 0 or length == 0:
            zeros += 1
            continue
        cosine = sum(v * p for v, p in zip(vote, parent, strict=True)) / size / length
        place = max(k for k in range(bins) if k == 0 or edges[k] <= cosine)
        counts[place] += 1
        lengths[place] += length
    share = torch.tensor([100 * n / len(pairs) for n in counts], dtype=torch.float64)
    mean = [total / n if n else math.nan for total, n in zip(lengths, counts, strict=True)]
    mean = torch.tensor(mean, dtype=torch.float64)
    return RoutingDynamics(torch.tensor(edges, dtype=torch.float64), share, mean, 100 * zeros / len(pairs))


def assert_same(found: RoutingDynamics, expected: RoutingDynamics) -> None:
    torch.testing.assert_close(found.edges, expected.edges)
    torch.testing.assert_close(found.share, expected.share)
    torch.testing.assert_close(found.length, expected.length, rtol=1e-5, atol=0, equal_nan=True)
    assert found.zeros == pytest.approx(expected.zeros)
    assert float(found.share.sum()) == pytest.approx(100 - found.zeros)


def test_a_case_worked_out_by_hand():
    layer = CapsuleLinear(2, 2, 2, 2, DynamicRouting(1))
    # The vote of the pose (1, 0) is the first row of its weight.
    votes = torch.tensor([[[3.0, 0.0], [1.0, 0.0]], [[0.0, 4.0], [-3.0, 0.0]]])
    layer.weight.data.zero_()[:, :, 0] = votes
    children = Capsules(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    # Parents along (3, 4) and (-2, 0): cosines 0.6 and 0.8, -1 and 1.
    found = dynamics_of(layer, children, bins=8)
    assert found.edges.tolist() == [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1]
    assert found.share.tolist() == [25, 0, 0, 0, 0, 0, 25, 50]
    assert found.length[[0, 6, 7]].tolist() == [1, 3, 3.5]
    assert found.length[1:6].isnan().all()
    assert found.zeros == 0


def vectors(children: Tensor, layer: CapsuleLinear) -> list[tuple[list[float], list[float]]]:
    """Pairs of each parent and each vote for it."""
    parents = layer(children).poses
    return [
        (parents[b, j].flatten().tolist(), (children[b, i] @ layer.weight[i, j]).flatten().tolist())
        for b in range(len(children))
        for i in range(layer.in_capsules)
        for j in range(layer.out_capsules)
    ]


@pytest.mark.parametrize("pose", [3, (2, 3)])
@pytest.mark.parametrize("routing", [DynamicRouting(3), EMRouting(2), VectorNormRouting(0), VectorNormRouting(2)])
def test_linear_layers_against_a_double_loop(pose, routing, monkeypatch):
    out = 4 if isinstance(pose, int) else (2, 4)
    layer = CapsuleLinear(5, 3, pose, out, routing)
    batches = [torch.randn(n, 5, *((pose,) if isinstance(pose, int) else pose)) for n in (3, 4)]
    expected = counted([pair for batch in batches for pair in vectors(batch, layer)], 6)
    monkeypatch.setattr(ops_votes, "BLOCK", 30)  # several blocks
    assert_same(dynamics_of(layer, *map(Capsules, batches), bins=6), expected)


@pytest.mark.parametrize("scores", [False, True])
def test_convolutions_against_a_double_loop(scores):
    layer = CapsuleConv2d(2, 3, (2, 2), (2, 2), 3, EMRouting(2), stride=2, padding=1, bias=True)
    nn.init.normal_(layer.bias)
    poses = torch.randn(2, 2, 4, 5, 2, 2)
    children = Capsules(poses, torch.randn(poses.shape[:4]) if scores else None)
    if scores:
        children.scores[0, 1, 2, 3] = -torch.inf
    parents, pairs = layer(children).poses, []
    assert parents.shape[2:4] == (2, 3)
    for b, j, row, column in torch.cartesian_prod(*map(torch.arange, (2, 3, 2, 3))).tolist():
        for c, k, m in torch.cartesian_prod(*map(torch.arange, (2, 3, 3))).tolist():
            y, x = 2 * row + k - 1, 2 * column + m - 1
            if not (0 <= y < 4 and 0 <= x < 5) or (scores and (b, c, y, x) == (0, 1, 2, 3)):
                continue
            vote = poses[b, c, y, x] @ layer.weight[c, k, m, j] + layer.bias[c, k, m, j]
            pairs.append((parents[b, j, row, column].flatten().tolist(), vote.flatten().tolist()))
    assert_same(dynamics_of(layer, children), counted(pairs, 20))


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
def test_layers_of_a_stack(schedule):
    layers = [CapsuleLinear(n, m, 4, 4, InvertedAttentionRouting(2)) for n, m in ((6, 5), (5, 3))]
    stack = CapsuleStack(*layers, schedule=schedule)
    children = torch.randn(4, 6, 4)
    with torch.no_grad():
        between, last = layers[0](children).poses, stack(children).poses
        if schedule == "concurrent":  # the second layer sees only the first iteration of the first layer
            between = layers[0].routing.advance(layers[0].votes(children), None, 0)[0].parents.poses
    votes = torch.einsum("bid,ijdh->bijh", between, layers[1].weight)
    pairs = [(last[b, j].tolist(), votes[b, i, j].tolist()) for b in range(4) for i in range(5) for j in range(3)]
    assert_same(dynamics_of(stack, Capsules(children), name="layer.layers.1"), counted(pairs, 20))
    votes = torch.einsum("bid,ijdh->bijh", children, layers[0].weight)
    pairs = [(between[b, j].tolist(), votes[b, i, j].tolist()) for b in range(4) for i in range(6) for j in range(5)]
    assert_same(dynamics_of(stack, Capsules(children), name="layer.layers.0"), counted(pairs, 20))


@pytest.mark.parametrize("routing", [DynamicRouting(2, softmax="children"), DynamicRouting(2), EMRouting(2)])
def test_padding_does_not_count(routing):
    layer = CapsuleLinear(None, 3, 4, 4, routing)
    poses = torch.randn(2, 5, 4)
    scores = torch.zeros(2, 5)
    padded = Capsules(
        torch.cat([poses, 9 * torch.randn(2, 3, 4)], 1), torch.cat([scores, torch.full((2, 3), -torch.inf)], 1)
    )
    assert_same(dynamics_of(layer, padded), dynamics_of(layer, Capsules(poses, scores)))


def test_zeros_have_no_cosine():
    layer = CapsuleLinear(None, 2, 3, 3, DynamicRouting(2))
    poses = torch.randn(2, 4, 3)
    poses[0, 0] = 0
    found = dynamics_of(layer, Capsules(poses))
    assert found.zeros == 12.5  # one child of eight
    with_none = Capsules(torch.cat([poses[:, 1:2], -poses[:, 1:2]], 1))  # two votes that cancel
    assert dynamics_of(layer, with_none).zeros == 100
    assert dynamics_of(layer, with_none).length.isnan().all()


def test_cosines_of_one_fall_into_the_outer_bins():
    layer = CapsuleLinear(None, 1, 7, 7, VectorNormRouting(0))
    poses = torch.randn(1000, 1, 7) * torch.logspace(-6, 6, 1000).view(-1, 1, 1)
    found = dynamics_of(layer, Capsules(poses))  # rounding leads beyond 1
    assert (found.share[-1], found.zeros) == (100, 0)
    found = dynamics_of(layer, Capsules(torch.cat([poses, -0.5 * poses], 1)))
    assert (found.share[0], found.share[-1]) == (50, 50)


def test_cosines_on_an_edge_belong_to_the_bin_above():
    layer = CapsuleLinear(None, 1, 2, 2, VectorNormRouting(0))
    layer.weight.data.copy_(torch.eye(2))
    children = torch.tensor(
        [[[4.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, 0.0]]]
    )  # the parent has the direction of the first child
    assert dynamics_of(layer, Capsules(children), bins=4).share.tolist() == [25, 0, 50, 25]


def test_votes_are_not_stored(monkeypatch):
    monkeypatch.setattr(ops_votes, "BLOCK", 2**14)
    layer = CapsuleLinear(None, 64, 4, 16, DynamicRouting(2))
    children = Capsules(torch.randn(4, 512, 4))
    with Largest() as largest:
        dynamics_of(layer, children)
    assert 2**13 < largest.numbers <= 2**14 < 4 * 512 * 64 * 16


def network_of_images() -> Network:
    features, capsules = nn.Conv2d(1, 12, 4), CapsuleLinear(4, 2, 3, 3, DynamicRouting(2))
    return Network(
        lambda net, images: net.capsules(net.features(images).view(-1, 4, 3)), features=features, capsules=capsules
    )


def test_compiled_networks():
    network, images = network_of_images(), torch.rand(2, 1, 4, 4)
    expected = routing_dynamics(network, "capsules", [images[:1], (images[1:], torch.zeros(1))])
    compiled = torch.compile(network, backend="eager")
    with torch.no_grad():
        compiled(images)
    assert capsule_layers(compiled) == ["_orig_mod.capsules"]
    assert_same(routing_dynamics(compiled, "_orig_mod.capsules", [images]), expected)


def test_bad_input():
    network, images = network_of_images(), torch.rand(2, 1, 4, 4)
    with pytest.raises(ValueError, match="Network has no capsule layer 'features'; there are capsules"):
        routing_dynamics(network, "features", [images])
    with pytest.raises(ValueError, match="Linear .*no capsule layer"):
        routing_dynamics(nn.Linear(1, 1), "capsules", [images])
    slots = CapsuleShared(None, 2, 3, SlotAttention(2))
    with pytest.raises(ValueError, match="layer '' routes poses, and its parents are no sums of votes"):
        routing_dynamics(slots, "", [torch.rand(2, 4, 3)])
    with pytest.raises(ValueError, match="no vote"):
        routing_dynamics(network, "capsules", [images[:0]])
    for batch in (3, {"images": images}, (), "x", None):
        with pytest.raises(TypeError, match="batches must be inputs, or tuples that begin with a tensor or several"):
            routing_dynamics(network, "capsules", [batch])
    with pytest.raises(ValueError, match="layer 'capsules' has votes or parents that are not finite"):
        routing_dynamics(network, "capsules", [images * torch.nan])
    network.unused = CapsuleLinear(1, 1, 1, 1, DynamicRouting(1))
    with pytest.raises(ValueError, match="Network did not run its layer 'unused' on these inputs"):
        routing_dynamics(network, "unused", [images])
    for nothing in ([], [[]]):
        with pytest.raises(ValueError, match="RoutingDynamics.*none"):
            routing_dynamics_figure(nothing)


def panel(title: str, share: list[float], length: list[float], zeros: float = 0.0) -> tuple[str, RoutingDynamics]:
    edges = torch.linspace(-1, 1, len(share) + 1).double()
    return title, RoutingDynamics(edges, torch.tensor(share).double(), torch.tensor(length).double(), zeros)


def test_figure():
    first = panel("after epoch 1", [0, 80, 20], [math.nan, 2, 1])
    second = panel("after epoch 20", [40, 10, 40], [3, 2, 4], zeros=10.0)
    third = panel("after epoch 1", [0, 0, 0], [math.nan] * 3, zeros=100.0)
    figure = routing_dynamics_figure([[first, second], [third]], ["low", "high"])
    left, right = figure.axes[:4], figure.axes[4:]
    titles = ["after epoch 1", "after epoch 20\n10 % zero, left out", "after epoch 1\n100 % zero, left out", ""]
    assert [axis.get_title() for axis in left] == titles
    assert [axis.get_ylabel() for axis in left] == ["low\nshare, %", "", "high\nshare, %", ""]
    assert [axis.get_ylabel() for axis in right] == ["", "mean length", "mean length"]
    assert [axis.axison for axis in left] == [True, True, True, False]
    assert [bar.get_height() for bar in left[0].patches] == [0, 80, 20]
    assert [bar.get_x() for bar in left[0].patches] == pytest.approx([-1, -1 / 3, 1 / 3])
    assert right[1].lines[0].get_xdata() == pytest.approx([-2 / 3, 0, 2 / 3])
    assert right[1].lines[0].get_ydata().tolist() == [3, 2, 4]
    assert left[0].get_ylim() == left[1].get_ylim() == (0, 84)
    assert right[0].get_ylim() == right[1].get_ylim() == pytest.approx((0, 4.2))
    assert left[2].get_ylim() == right[2].get_ylim() == (0, 1)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["share of the votes", "their mean length"]
    assert figure.get_supxlabel() == "cosine of a vote and its parent"


def test_long_rows_are_broken():
    panels = [panel(f"after epoch {k}", [100, 0], [k, math.nan]) for k in range(1, 9)]
    figure = routing_dynamics_figure([panels])
    drawn = [axis for axis in figure.axes[:12] if axis.axison]
    assert [axis.get_title() for axis in drawn] == [title for title, _ in panels]
    assert len(figure.axes) == 12 + 8
    assert {axis.get_ylim() for axis in figure.axes[12:]} == {(0, 8.4)}
    figure.draw_without_rendering()
    lefts = torch.tensor([axis.get_position().x0 for axis in drawn[:6]])
    assert lefts.diff().std() < 1e-3  # the last line, which ends early, leaves no gap in the first
