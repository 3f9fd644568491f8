"""Every routing against plain Python loops that share no code with the library, in float64."""

import itertools
import math
import random

import oracles
import pytest
import torch
from torch import Tensor

import torchcaps.functional as F
from torchcaps.capsules import Capsules
from torchcaps.ops import LazyVotes

rng = random.Random(0)
TOLERANCE = {"rtol": 0, "atol": 1e-10}
# batch, children, parents, pose: rows of 1 and more, one child, one parent, one sample, poses of one entry
SHAPES = [
    (2, 5, 3, (4,)),
    (1, 7, 2, (2, 3)),
    (3, 1, 4, (3,)),
    (2, 6, 1, (2, 2)),
    (2, 1, 1, (2,)),
    (2, 4, 3, (1,)),
    *(
        (rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 6), (rng.randint(1, 3), rng.randint(2, 4)))
        for _ in range(4)
    ),
]
GATES = [False, True]


def make_votes(shape: tuple[int, int, int, tuple[int, ...]], seed: int = 0) -> Tensor:
    batch, children, parents, pose = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, children, parents, *pose, generator=generator, dtype=torch.float64)


def make_scores(shape: tuple[int, int, int, tuple[int, ...]], with_scores: bool) -> Tensor | None:
    if not with_scores:
        return None
    batch, children, *_ = shape
    scores = torch.randn(batch, children, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if children > 1:
        scores[:, 0] = -math.inf  # padding
        scores[0, 1] = math.inf
    return scores


def as_lists(votes: Tensor) -> list:
    return votes.flatten(3).tolist()


def gates_of(scores: Tensor | None) -> list | None:
    return None if scores is None else scores.sigmoid().tolist()


def check(capsules: Capsules, expected: dict) -> None:
    for field in ("poses", "scores", "variances", "coefficients"):
        actual = getattr(capsules, field)
        assert (actual is None) == (expected[field] is None), field
        if actual is not None:
            wanted = torch.tensor(expected[field], dtype=torch.float64)
            actual = actual.flatten(2) if field in ("poses", "variances") else actual
            torch.testing.assert_close(actual, wanted, **TOLERANCE, msg=lambda m, f=field: f"{f}: {m}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_scores", GATES)
@pytest.mark.parametrize("iterations", [1, 2, 4])
@pytest.mark.parametrize(("softmax", "leaky"), [("parents", False), ("parents", True), ("children", False)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dynamic(shape, with_scores, iterations, softmax, leaky, with_bias):
    votes, scores = make_votes(shape), make_scores(shape, with_scores)
    bias = make_votes(shape, seed=2)[0, 0] if with_bias else None
    actual = F.dynamic_routing(votes, iterations, softmax, bias, leaky, scores)
    expected = oracles.dynamic_routing(
        as_lists(votes),
        iterations,
        softmax=softmax,
        bias=None if bias is None else bias.flatten(1).tolist(),
        leaky=leaky,
        gates=gates_of(scores),
    )
    check(actual, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize(("softmax", "leaky"), [("parents", False), ("parents", True), ("children", False)])
def test_dynamic_from_first_logits(shape, iterations, softmax, leaky):
    votes, scores = make_votes(shape), make_scores(shape, True)
    for rows in (shape[1], 1):
        start = torch.linspace(-2, 3, rows * shape[2]).double().reshape(rows, shape[2])
        actual = F.dynamic_routing(votes, iterations, softmax, leaky=leaky, scores=scores, start=start)
        first = start.expand(shape[1], -1).tolist()
        check(
            actual,
            oracles.dynamic_routing(
                as_lists(votes), iterations, softmax=softmax, leaky=leaky, gates=gates_of(scores), start=first
            ),
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_scores", GATES)
@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("sharpness", [0.0, 0.5, 5.0])
def test_vector_norm(shape, with_scores, iterations, sharpness):
    votes, scores = make_votes(shape), make_scores(shape, with_scores)
    actual = F.vector_norm_routing(votes, iterations, sharpness, scores=scores)
    check(actual, oracles.vector_norm_routing(as_lists(votes), iterations, sharpness, gates=gates_of(scores)))


def test_vector_norm_activation():
    votes = make_votes(SHAPES[0])
    actual = F.vector_norm_routing(votes, 2, 1.0, activation=F.squash)
    check(actual, oracles.vector_norm_routing(as_lists(votes), 2, 1.0, activation=oracles.squash))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3] != (1,)])
@pytest.mark.parametrize("with_scores", GATES)
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_inverted_attention(shape, with_scores, iterations, layer_norm):
    votes, scores = make_votes(shape), make_scores(shape, with_scores)
    features = math.prod(shape[3])
    weight, bias = torch.linspace(0.5, 1.5, features).double(), torch.linspace(-0.2, 0.1, features).double()
    actual = F.inverted_attention_routing(votes, iterations, weight, bias, layer_norm, scores=scores)
    expected = oracles.inverted_attention_routing(
        as_lists(votes),
        iterations,
        weight=weight.tolist(),
        bias=bias.tolist(),
        layer_norm=layer_norm,
        gates=gates_of(scores),
    )
    check(actual, expected)


@pytest.mark.parametrize("with_scores", GATES)
@pytest.mark.parametrize("iterations", [1, 3])
def test_inverted_attention_with_activations_and_a_start(with_scores, iterations):
    shape = (2, 5, 3, (2, 2))
    votes, scores = make_votes(shape), make_scores(shape, with_scores)
    start = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    beta_a, beta_u = torch.tensor([0.5, -1.0, 2.0]).double(), torch.tensor([0.1, 0.3, -0.2]).double()
    actual = F.inverted_attention_routing(votes, iterations, scores=scores, start=start, beta_a=beta_a, beta_u=beta_u)
    expected = oracles.inverted_attention_routing(
        as_lists(votes),
        iterations,
        gates=gates_of(scores),
        start=start.tolist(),
        betas=(beta_a.tolist(), beta_u.tolist()),
    )
    check(actual, expected)
    if iterations == 1:  # a start is no first iteration: coefficients are not uniform
        assert (actual.coefficients - 1 / 3).abs().max() > 0.01


def test_inverted_attention_refuses_half_a_score_and_misshapen_starts():
    votes = make_votes((2, 5, 3, (2, 2)))
    with pytest.raises(ValueError, match="beta_a and beta_u come together"):
        F.inverted_attention_routing(votes, beta_a=torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"expected start of shape .* = \(2, 3, 4\), got \(2, 3, 2, 2\)"):
        F.inverted_attention_routing(votes, start=torch.zeros(2, 3, 2, 2).double())


def test_inverted_attention_does_not_normalize_poses_of_one_entry():
    votes = make_votes((2, 4, 3, (1,)))
    check(
        F.inverted_attention_routing(votes, 3),
        oracles.inverted_attention_routing(as_lists(votes), 3, layer_norm=False),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_scores", GATES)
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize(("inverse_temperature", "decay"), [(0.01, 0.95), (1.0, 0.0)])
@pytest.mark.parametrize(("schedule", "cost_range"), [("saturating", None), ("linear", 10.0)])
def test_em(shape, with_scores, iterations, inverse_temperature, decay, schedule, cost_range):
    votes, scores = make_votes(shape), make_scores(shape, with_scores)
    activations = torch.ones(shape[:2], dtype=torch.float64) if scores is None else scores.sigmoid()
    beta_a, beta_u = torch.linspace(-1, 1, shape[2]).double(), torch.linspace(0.3, 1.5, shape[2]).double()
    options = {"schedule": schedule, "cost_range": cost_range}
    schedules = iterations, inverse_temperature, decay
    actual = F.em_routing(votes, activations, beta_a, beta_u, *schedules, **options)
    expected = oracles.em_routing(
        as_lists(votes), activations.tolist(), beta_a.tolist(), beta_u.tolist(), *schedules, **options
    )
    check(actual, expected)


def test_bad_options_of_li():
    votes, one = make_votes(SHAPES[0]), torch.ones(1, dtype=torch.float64)
    for cost_range in (0.0, -10.0, math.inf):
        with pytest.raises(ValueError, match="cost_range must be None, or above 0 and finite, got"):
            F.em_routing(votes, None, one, one, cost_range=cost_range)
    with pytest.raises(ValueError, match="schedule must be 'saturating' or 'linear', got 'square'"):
        F.em_routing(votes, None, one, one, schedule="square")
    for start in (torch.zeros(0, SHAPES[0][2]), torch.zeros(SHAPES[0][2]), torch.zeros(1, SHAPES[0][2] + 1)):
        with pytest.raises(ValueError, match=r"expected start of shape \(children, parents\) = "):
            F.dynamic_routing(votes, start=start)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_scores", GATES)
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
@pytest.mark.parametrize(("fixed_children", "single_beta"), [(True, False), (False, False), (True, True)])
def test_heinsen(shape, with_scores, iterations, model, fixed_children, single_beta):
    votes, scores = make_votes(shape), make_scores(shape, with_scores)
    child_scores = torch.full(shape[:2], math.inf, dtype=torch.float64) if scores is None else scores
    rows = shape[1] if fixed_children else 1
    use = torch.linspace(-1, 2, rows * shape[2]).double().reshape(rows, shape[2])
    ignore = None if single_beta else 0.5 - use.flip(0)
    actual = F.heinsen_routing(votes, scores, use, ignore, iterations, model)
    expected = oracles.heinsen_routing(
        as_lists(votes),
        child_scores.tolist(),
        use.tolist(),
        None if ignore is None else ignore.tolist(),
        iterations,
        model=model,
    )
    check(actual, expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("groups", "bias_groups", "bias_parents"), [(6, None, 0), (6, 6, 4), (1, 1, 4), (2, 2, 4), (2, 6, 1)]
)
def test_votes_of_poses(rows, groups, bias_groups, bias_parents):
    """Weights per child, shared by all and shared per type; all reductions of lazy votes on top of them."""
    poses = torch.randn(2, 6, rows, 2, dtype=torch.float64)
    weight = torch.randn(groups, 4, 2, 3, dtype=torch.float64)
    bias = None if bias_groups is None else torch.randn(bias_groups, bias_parents, rows, 3, dtype=torch.float64)
    lazy = LazyVotes(poses, weight, bias, (rows, 3))
    votes = oracles.votes_from_poses(poses.tolist(), weight.tolist(), None if bias is None else bias.tolist())
    scores = make_scores((2, 6, 4, (rows, 3)), True)
    for s, (softmax, leaky) in itertools.product(
        (None, scores), [("parents", False), ("parents", True), ("children", False)]
    ):
        actual = F.dynamic_routing(lazy, 2, softmax, leaky=leaky, scores=s)
        check(actual, oracles.dynamic_routing(votes, 2, softmax=softmax, leaky=leaky, gates=gates_of(s)))
        start = torch.linspace(-1, 2, 4 * groups).double().reshape(groups, 4)
        of_child = start.repeat_interleave(6 // groups, dim=0).tolist()
        for backend in ("reference", "tiled"):
            lazy_votes = LazyVotes(poses, weight, bias, (rows, 3), backend=backend)
            actual = F.dynamic_routing(lazy_votes, 2, softmax, leaky=leaky, scores=s, start=start)
            expected = oracles.dynamic_routing(
                votes, 2, softmax=softmax, leaky=leaky, gates=gates_of(s), start=of_child
            )
            check(actual, expected)
        actual = F.dynamic_routing(lazy, 1, softmax, leaky=leaky, scores=s)  # uniform: no votes are made
        check(actual, oracles.dynamic_routing(votes, 1, softmax=softmax, leaky=leaky, gates=gates_of(s)))
    assert actual.poses.shape == (2, 4, rows, 3)


def test_losses():
    lengths = torch.rand(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 1, 2])
    expected = oracles.margin_loss(lengths.tolist(), labels.tolist())
    assert F.margin_loss(lengths, labels).item() == pytest.approx(expected, abs=1e-12)
    one_hot = torch.nn.functional.one_hot(labels, 4)
    assert F.margin_loss(lengths, one_hot).item() == pytest.approx(expected, abs=1e-12)
    for margin in (0.2, 0.9):
        expected = oracles.spread_loss(lengths.tolist(), labels.tolist(), margin)
        assert F.spread_loss(lengths, labels, margin).item() == pytest.approx(expected, abs=1e-12)


def test_squash():
    for vector in ([3.0, 4.0], [0.0, 0.0, 0.0], [1e-3], [-1e3, 2.0]):
        actual = F.squash(torch.tensor(vector, dtype=torch.float64))
        torch.testing.assert_close(actual, torch.tensor(oracles.squash(vector), dtype=torch.float64), **TOLERANCE)
    rows = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(F.squash(rows, dim=0), F.squash(rows.T).T, **TOLERANCE)
