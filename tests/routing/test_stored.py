"""Routing of stored votes, without a layer: it equals that of a layer, and bad values raise errors."""

import pytest
import torch
from algorithms import route
from torch import Tensor
from torch.testing import assert_close

from torchcaps import (
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EfficientRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RandomRouting,
    Routing,
    VectorNormRouting,
    squash,
)
from torchcaps.ops import WeightedVotes
from torchcaps.ops.stored import coefficients_of
from torchcaps.testing import assert_coefficients_sum_to_one

BIAS, START = DynamicRouting(learn_bias=True), DynamicRouting(start="learned")
ROUTINGS = {
    "dynamic": DynamicRouting(2, leaky=True, learn_bias=True, start="learned"),
    "vector_norm": VectorNormRouting(2, learn_sharpness=True),
    "inverted_attention": InvertedAttentionRouting(2, activations=True, start="learned"),
    "em": EMRouting(2, schedule="linear"),
    "heinsen": HeinsenRouting(2, model="kmeans"),
    "efficient": EfficientRouting(),
    "random": RandomRouting(),
}
names = pytest.mark.parametrize("name", ROUTINGS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer_of(name: str, children: int, pose: int | tuple[int, int] = (2, 2)) -> tuple[CapsuleLinear, dict[str, Tensor]]:
    """Return a layer with random parameters, and the values that its routing has learned."""
    layer = CapsuleLinear(children, 3, pose, pose, ROUTINGS[name]).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, layer.routing.state_dict()


@names
def test_stored_votes_are_routed_as_in_a_layer(name):
    layer, learned = layer_of(name, 5)
    poses, scores = randn(2, 5, 2, 2), randn(2, 5, seed=1)
    votes = torch.einsum("bird,ijdh->bijrh", poses, layer.weight)
    for given in (scores, None):
        expected = layer(Capsules(poses, given), return_coefficients=True)
        found = route(ROUTINGS[name], votes, given, **learned)
        for x, y in zip(found[:4], expected[:4], strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert_close(x, y)
    assert ROUTINGS[name].with_values(**learned)(votes).coefficients is None


@names
def test_values_may_be_less_precise_than_the_votes(name):
    """Those of float32 for votes of float64, with and without scores."""
    _, learned = layer_of(name, 5)
    single = {key: value.float() for key, value in learned.items()}
    votes, scores = randn(2, 5, 3, 2, 2), randn(2, 5, seed=1)
    for given in (scores, None):
        expected, found = (route(ROUTINGS[name], votes, given, **values).poses for values in (learned, single))
        assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert found.dtype == torch.float64


@pytest.mark.parametrize(
    ("routing", "name", "shape"),
    [
        (START, "first_logits", (4, 3)),
        (BIAS, "bias", (3, 2)),
        (RandomRouting(), "logits", (4, 3)),
        (EfficientRouting(), "coefficient_bias", (4, 3)),
    ],
    ids=str,
)
def test_sizes_of_1_are_shared(routing, name, shape):
    votes = randn(2, 4, 3, 2)
    for narrow in {(1, shape[1]), (shape[0], 1), (1, 1)}:
        value = randn(*narrow)
        found, expected = (route(routing, votes, **{name: x}) for x in (value, value.expand(shape)))
        for x, y in zip(found[:4], expected[:4], strict=True):
            assert x is y or torch.allclose(x, y)


def test_pooling_limits():
    v = randn(2, 6, 1, 4)
    assert_close(route(VectorNormRouting(sharpness=0.0), v).poses, v.mean(1))
    assert_close(route(VectorNormRouting(0), v).poses, v.mean(1))
    selected = route(VectorNormRouting(sharpness=1e4), v)
    assert (selected.coefficients.amax(1) > 0.999).all()
    chosen = selected.coefficients.squeeze(-1).argmax(1)
    assert_close(selected.poses.squeeze(1), v[torch.arange(2), chosen, 0])


def test_the_gradient_of_the_last_iteration_is_that_of_given_coefficients():
    v = randn(2, 5, 3, 2).requires_grad_()
    (actual,) = torch.autograd.grad(DynamicRouting(2, gradient="last")(v).poses.square().sum(), v)
    first = squash(v.detach().mean(1) * 5 / 3)
    parents = squash(((v * first.unsqueeze(1)).sum(-1).softmax(2).unsqueeze(-1) * v).sum(1))
    assert_close(actual, torch.autograd.grad(parents.square().sum(), v)[0])


def test_random_starts_are_the_same_for_all_samples():
    votes, drawn = randn(1, 5, 3, 2).expand(4, -1, -1, -1), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(DynamicRouting(start="random")(votes).poses)
        assert_close(drawn[-1], drawn[-1][:1].expand(4, -1, -1))
    assert_close(drawn[1], drawn[0])
    assert not torch.allclose(drawn[2], drawn[0])
    over_children = DynamicRouting(1, softmax="children", start="random")
    assert route(over_children, votes).coefficients.std() > 0.01


def test_a_softmax_over_the_wrong_axis_breaks_a_law(monkeypatch):
    monkeypatch.setattr(WeightedVotes, "coefficients", lambda self: self.votes.coefficients(self.agreement, "children"))
    with pytest.raises(AssertionError, match="sum to one over the parents"):
        assert_coefficients_sum_to_one(DynamicRouting())


@pytest.mark.parametrize(
    ("routing", "values", "message"),
    [
        (BIAS, {"bias": randn(2, 5)}, r"bias.*\(3, 5\).*\(2, 5\)"),
        (START, {"first_logits": randn(3, 3)}, r"first_logits.*\(4, 3\).*\(3, 3\)"),
        (EMRouting(), {"beta_a": randn(2, 1), "beta_u": randn(3)}, r"beta_a.*\(3,\).*\(2, 1\)"),
        (HeinsenRouting(), {"beta": randn(4, 3)}, "has no beta_use, beta_ignore yet"),
        (DynamicRouting(), {"bias": randn(3, 5)}, "learns no 'bias', but nothing"),
        (BIAS, {"bias": randn(3, 5), "bias_": randn(3, 5)}, "learns no 'bias_', but bias"),
    ],
    ids=str,
)
def test_bad_values(routing: Routing, values, message):
    with pytest.raises((ValueError, RuntimeError), match=message) as error:
        routing.with_values(**values)(randn(2, 4, 3, 5))
    assert "\n" not in str(error.value)


def test_values_may_be_given_one_after_another():
    votes, row = randn(2, 4, 3, 2), randn(3)
    both = EMRouting().with_values(beta_a=row, beta_u=-row)
    assert_close(EMRouting().with_values(beta_a=row).with_values(beta_u=-row)(votes).scores, both(votes).scores)
    assert_close(
        both.with_values(beta_a=-row)(votes).scores, route(EMRouting(), votes, beta_a=-row, beta_u=-row).scores
    )


def test_logits_over_children_that_exp_cannot_take():
    """The largest logit of the children counts as 0, also with gates."""
    logits = torch.tensor([[[100.0], [100.0], [99.0]]])
    found = coefficients_of(logits, torch.tensor([[1.0, 0.5, 0.0]]), "children", False)
    assert_close(found, torch.tensor([[[2 / 3], [1 / 3], [0.0]]]))
