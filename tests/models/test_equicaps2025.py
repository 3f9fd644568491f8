"""The projector and the loss of EquiCaps, against plain loops and cases worked out by hand."""

import math

import pytest
import torch
from oracles import self_routing
from torch.testing import assert_close

from torchcaps import Capsules
from torchcaps.models import EquiCapsProjector, equicaps_loss

WEIGHTS = ("invariance", "equivariance", "deviation", "covariance", "mean_entropy")


def views(batch=5, capsules=4, rows=3):
    """Two views with activations that sum to 1, and rotations about z."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        activations = torch.rand(batch, capsules, generator=generator, dtype=torch.float64).softmax(1)
        poses = torch.randn(batch, capsules, rows, rows, generator=generator, dtype=torch.float64)
        found.append(Capsules(poses, activations.logit(), pose_dims=2))
    transforms = torch.eye(rows, dtype=torch.float64).repeat(batch, 1, 1)
    angles = torch.rand(batch, generator=generator, dtype=torch.float64)
    transforms[:, 0, 0] = transforms[:, 1, 1] = angles.cos()
    transforms[:, 0, 1], transforms[:, 1, 0] = angles.sin(), -angles.sin()
    return *found, transforms


def only(name, weight=1.0):
    """The weights with which the loss is one term."""
    return {other: weight if other == name else 0.0 for other in WEIGHTS}


def loops(first, second, transforms):
    """Return the five terms, by loops over single numbers."""
    batch, count, rows, _ = first.poses.shape
    activations = [[[1 / (1 + math.exp(-s)) for s in row] for row in x.scores.tolist()] for x in (first, second)]
    invariance = 0.0
    embeddings = [[], []]
    equivariance = 0.0
    for b in range(batch):
        invariance -= sum(q * math.log(p) for p, q in zip(activations[0][b], activations[1][b], strict=True)) / batch
        embedded = [list(activations[0][b]), list(activations[1][b])]
        for j in range(count):
            p, q, t = first.poses[b, j].tolist(), second.poses[b, j].tolist(), transforms[b].tolist()
            p = [[sum(p[r][k] * t[k][s] for k in range(rows)) for s in range(rows)] for r in range(rows)]
            flat = [[x for row in pose for x in row] for pose in (p, q)]
            flat = [[x / math.sqrt(sum(y * y for y in pose)) for x in pose] for pose in flat]
            equivariance += sum((x - y) ** 2 for x, y in zip(*flat, strict=True)) / (batch * count * rows * rows)
            embedded[0] += flat[0]
            embedded[1] += flat[1]
        embeddings[0].append(embedded[0])
        embeddings[1].append(embedded[1])
    deviation = covariance = entropy = 0.0
    for view, embedding in enumerate(embeddings):
        columns = list(zip(*embedding, strict=True))
        size = len(columns)
        centered = [[x - sum(column) / batch for x in column] for column in columns]
        for k in range(size):
            for m in range(size):
                value = sum(x * y for x, y in zip(centered[k], centered[m], strict=True)) / (batch - 1)
                if k == m:
                    deviation += max(0, 1 - math.sqrt(value + 1e-4)) / size / 2
                else:
                    covariance += value**2 / size
        means = [sum(row[j] for row in activations[view]) / batch for j in range(count)]
        entropy += math.log(count) + sum(mean * math.log(mean) for mean in means)
    return dict(zip(WEIGHTS, (invariance, equivariance, deviation, covariance, entropy), strict=True))


def test_the_published_projector_has_its_parameters():
    # 32 capsules with poses of 3x3 on the 8x8 map of a ResNet-18 for images of 256x256.
    with torch.device("meta"):
        projector = EquiCapsProjector(512, 8)
    convolutions, norms = 512 * 32 * (9 + 1) * 9, 2 * 32 * (9 + 1)
    votes, logits = 32 * 64 * 32 * 9 * 9, 32 * 64 * 32 * (9 + 1)
    assert sum(x.numel() for x in projector.parameters()) == convolutions + norms + votes + logits == 7_438_976


@pytest.mark.parametrize("rows", [3, 4])
def test_the_projector_is_two_convolutions_and_self_routing(rows):
    torch.manual_seed(0)
    projector = EquiCapsProjector(3, 2, capsules=2, rows=rows).double()
    torch.nn.init.normal_(projector.parents.routing.route_weight)
    torch.nn.init.normal_(projector.parents.routing.route_bias)
    maps = torch.randn(3, 3, 2, 2, dtype=torch.float64)
    output = projector(maps)
    features = rows * rows
    with torch.no_grad():
        poses, scores = projector.pose(maps), projector.score(maps)  # batch normalization by the batch's statistics
    weight, routing = projector.parents.weight.tolist(), projector.parents.routing
    children: list[list] = [[], [], []]
    gates: list[list[float]] = [[], [], []]
    for b in range(3):
        for i in range(2):
            for y in range(2):
                for x in range(2):
                    pose = poses[b, features * i : features * (i + 1), y, x].tolist()
                    w = weight[len(children[b])]
                    votes = [
                        [sum(pose[d] * w[j][d][h] for d in range(features)) for h in range(features)] for j in range(2)
                    ]
                    children[b].append((votes, [pose]))
                    gates[b].append(1 / (1 + math.exp(-scores[b, i, y, x])))
    routed = self_routing(children, routing.route_weight.tolist(), routing.route_bias.tolist(), gates=gates)
    expected = {name: torch.tensor(routed[name], dtype=torch.float64) for name in ("poses", "scores")}
    assert_close(output.poses, expected["poses"].view(3, 2, rows, rows))
    assert_close(output.scores, expected["scores"])
    assert_close(output.activations.sum(1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("rows", [3, 4])
def test_each_term_is_its_loops(rows):
    first, second, transforms = views(rows=rows)
    expected = loops(first, second, transforms)
    for name in WEIGHTS:
        assert_close(equicaps_loss(first, second, transforms, **only(name)).item(), expected[name])
    published = {"invariance": 0.1, "equivariance": 5, "deviation": 10, "covariance": 1, "mean_entropy": 1}
    total = sum(published[name] * expected[name] for name in WEIGHTS)
    assert_close(equicaps_loss(first, second, transforms).item(), total)


def test_terms_by_hand():
    transforms = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).repeat(2, 1, 1)
    first = Capsules(torch.eye(2).repeat(2, 1, 1, 1), torch.zeros(2, 1), pose_dims=2)
    turned = first._replace(poses=2 * transforms.unsqueeze(1))  # any length
    assert equicaps_loss(first, turned, transforms, **only("equivariance")) == 0
    # The same pose in both views: (1, 0, 0, 1) and (0, 1, -1, 0), divided by sqrt 2, differ by 4 / 2 in four entries.
    assert_close(equicaps_loss(first, first, transforms, **only("equivariance")), torch.tensor(0.5))
    # Two capsules with 0.5 each: a cross-entropy of log 2, and the largest entropy of the mean.
    two = Capsules(torch.eye(2).repeat(2, 2, 1, 1), torch.zeros(2, 2), pose_dims=2)
    assert_close(equicaps_loss(two, two, transforms, **only("invariance")), torch.tensor(math.log(2)))
    assert_close(equicaps_loss(two, two, transforms, **only("mean_entropy")), torch.tensor(0.0))
    # Nothing varies over the batch: each deviation is sqrt(1e-4) = 0.01.
    assert_close(equicaps_loss(two, two, transforms, **only("deviation")), torch.tensor(0.99))
    assert_close(equicaps_loss(two, two, transforms, **only("covariance")), torch.tensor(0.0))


def test_gradients():
    first, second, transforms = views()
    inputs = [x.requires_grad_() for x in (first.poses, first.scores, second.poses, second.scores)]

    def loss(p, s, q, t):
        return equicaps_loss(Capsules(p, s, pose_dims=2), Capsules(q, t, pose_dims=2), transforms)

    assert torch.autograd.gradcheck(loss, inputs)


def test_what_is_refused():
    first, second, transforms = views()
    with pytest.raises(ValueError, match="both views need capsules with scores"):
        equicaps_loss(first, second._replace(scores=None), transforms)
    with pytest.raises(ValueError, match=r"expected poses of shape \(batch, capsules, rows, rows\) in both views"):
        equicaps_loss(first, second._replace(poses=second.poses[:, :2]), transforms)
    with pytest.raises(ValueError, match=r"expected transforms of shape \(5, 3, 3\), got \(5, 2, 2\)"):
        equicaps_loss(first, second, transforms[:, :2, :2])
    one = [Capsules(x.poses[:1], x.scores[:1], pose_dims=2) for x in (first, second)]
    with pytest.raises(ValueError, match="give it two pairs at least"):
        equicaps_loss(*one, transforms[:1])
    with pytest.raises(ValueError, match="expected a map of 4x4 positions, got 4x5"):
        EquiCapsProjector(3, 4, 2)(torch.zeros(2, 3, 4, 5))
