"""The routing functions: they equal the modules on stored votes, and bad input raises errors."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

import torchcaps.functional as F
from torchcaps import (
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    VectorNormRouting,
)
from torchcaps.ops import StoredVotes
from torchcaps.testing import assert_coefficients_sum_to_one

FUNCTIONS = {
    "dynamic": (F.dynamic_routing, DynamicRouting(2, leaky=True, learn_bias=True, start="learned"), {"leaky": True}),
    "vector norm": (F.vector_norm_routing, VectorNormRouting(2, 0.7), {"sharpness": 0.7}),
    "inverted attention": (
        F.inverted_attention_routing,
        InvertedAttentionRouting(2, activations=True, start="learned"),
        {},
    ),
    "em": (F.em_routing, EMRouting(2, schedule="linear"), {"schedule": "linear"}),
    "heinsen": (F.heinsen_routing, HeinsenRouting(2, model="kmeans"), {"model": "kmeans"}),
    "heinsen, one beta": (F.heinsen_routing, HeinsenRouting(2, single_beta=True), {}),
}
names = pytest.mark.parametrize("name", FUNCTIONS)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@names
def test_functions_are_their_modules(name):
    function, routing, options = FUNCTIONS[name]
    layer = CapsuleLinear(5, 3, (2, 3), (2, 2), routing).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    poses, scores = randn(2, 5, 2, 3), randn(2, 5, seed=1)
    votes = torch.einsum("bird,ijdh->bijrh", poses, layer.weight)
    learned = dict(layer.routing.named_parameters())
    if name == "dynamic":
        learned["bias"] = learned["bias"].unflatten(1, (2, 2))
    for given in (scores, None):
        expected = layer(Capsules(poses, given), return_coefficients=True)
        found = function(votes, given, iterations=2, **learned, **options)
        for x, y in zip(found[:4], expected[:4], strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert_close(x, y)
    assert function(votes, iterations=2, return_coefficients=False, **learned, **options).coefficients is None


@names
def test_gates_that_votes_have_count_without_scores(name):
    function, *_ = FUNCTIONS[name]
    votes, scores = randn(2, 5, 3, 2), randn(2, 5, seed=1)
    values = {"em": {"beta_a": randn(3), "beta_u": randn(3)}, "heinsen": {"beta_use": randn(5, 3)}}
    given = next((value for key, value in values.items() if name.startswith(key)), {})
    gated = StoredVotes(votes).gated(scores.sigmoid())
    assert_close(function(gated, **given).poses, function(votes, scores, **given).poses)


def test_gradients_of_what_is_learned():
    v, scores = randn(2, 4, 3, 2), randn(2, 4, seed=1)
    row, table = randn(3, seed=2).requires_grad_(), randn(4, 3, seed=3).requires_grad_()
    pose, entry = randn(3, 2, seed=4).requires_grad_(), randn(2, seed=5).requires_grad_()
    sharpness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda b, s: F.dynamic_routing(v, bias=b, first_logits=s).poses, (pose, table))
    assert gradcheck(lambda s: F.vector_norm_routing(v, sharpness=s).poses, sharpness)
    assert gradcheck(lambda w, b: F.inverted_attention_routing(v, weight=w, bias=b).poses, (entry, entry))
    for options in ({"inverse_temperature": 1.0}, {"schedule": "linear", "cost_range": 10.0}):
        assert gradcheck(lambda a, u, o=options: F.em_routing(v, scores, beta_a=a, beta_u=u, **o)[:3], (row, row))
    assert gradcheck(lambda u, i: F.heinsen_routing(v, scores, beta_use=u, beta_ignore=i)[:3], (table, table))


def test_values_that_many_share():
    v, one = randn(2, 4, 3, 2), randn(1)
    rows = randn(2, 1).expand(-1, 3)
    for wide, narrow in ((rows.repeat_interleave(2, 0), rows[:, :1]), (one.expand(4, 3), one.view(1, 1))):
        expected = F.heinsen_routing(v, beta_use=wide)
        assert_close(F.heinsen_routing(v, beta_use=narrow).scores, expected.scores)
        assert_close(F.dynamic_routing(v, first_logits=narrow).poses, F.dynamic_routing(v, first_logits=wide).poses)
    assert_close(
        F.em_routing(v, beta_a=one, beta_u=one[0]).scores,
        F.em_routing(v, beta_a=one.expand(3), beta_u=one.expand(3)).scores,
    )
    pose = randn(1, 2)
    assert_close(F.dynamic_routing(v, bias=pose).poses, F.dynamic_routing(v, bias=pose.expand(3, 2)).poses)


def test_pooling_limits():
    v = randn(2, 6, 1, 4)
    assert_close(F.vector_norm_routing(v, sharpness=0.0).poses, v.mean(1))
    assert_close(F.vector_norm_routing(v, iterations=0).poses, v.mean(1))
    selected = F.vector_norm_routing(v, sharpness=1e4)
    assert (selected.coefficients.amax(1) > 0.999).all()
    chosen = selected.coefficients.squeeze(-1).argmax(1)
    assert_close(selected.poses.squeeze(1), v[torch.arange(2), chosen, 0])


def test_the_gradient_of_the_last_iteration_is_that_of_given_coefficients():
    v = randn(2, 5, 3, 2).requires_grad_()
    (actual,) = torch.autograd.grad(F.dynamic_routing(v, iterations=2, gradient="last").poses.square().sum(), v)
    first = F.squash(v.detach().mean(1) * 5 / 3)
    parents = F.squash(((v * first.unsqueeze(1)).sum(-1).softmax(2).unsqueeze(-1) * v).sum(1))
    assert_close(actual, torch.autograd.grad(parents.square().sum(), v)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squash_in_half_precision(dtype):
    """Only the result is rounded: 300 squared overflows in float16."""
    s = torch.tensor([300.0, 400.0, 0.0], dtype=dtype)
    assert_close(F.squash(s), F.squash(s.double()).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_random_starts_are_the_same_for_all_samples():
    votes = randn(1, 5, 3, 2).expand(4, -1, -1, -1)
    one, two = (F.dynamic_routing(votes, start="random").poses for _ in range(2))
    assert_close(one, one[:1].expand(4, -1, -1))
    assert not torch.allclose(one, two)


def test_a_softmax_over_the_wrong_axis_breaks_a_law():
    class Wrong(DynamicRouting):
        def coefficients(self, votes, agreement):
            return votes.coefficients(agreement, "children")

    with pytest.raises(AssertionError, match="sum to one over the parents"):
        assert_coefficients_sum_to_one(Wrong())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: F.dynamic_routing(v[0]), r"votes.*\(batch, children, parents, \*pose\)"),
        (lambda v: F.dynamic_routing(v, v[:, :1, 0, 0]), r"scores.*\(2, 4\).*\(2, 1\)"),
        (lambda v: F.dynamic_routing(v, bias=v[0, 0, :2]), r"bias.*\(3, 5\).*\(2, 5\)"),
        (lambda v: F.dynamic_routing(v, first_logits=v[0, :3, :, 0]), r"first_logits.*\(4, 3\).*\(3, 3\)"),
        (lambda v: F.dynamic_routing(v, first_logits=torch.zeros(0, 3)), r"first_logits.*\(4, 3\).*\(0, 3\)"),
        (lambda v: F.em_routing(v, beta_a=torch.zeros(2, 1), beta_u=torch.zeros(3)), r"beta_a.*\(3,\).*\(2, 1\)"),
        (lambda v: F.heinsen_routing(v, beta_use=torch.zeros(4, 2)), r"beta_use.*\(4, 3\).*\(4, 2\)"),
        (lambda v: F.inverted_attention_routing(v, beta_a=torch.zeros(3)), "beta_a and beta_u must be given together"),
        (
            lambda v: F.inverted_attention_routing(v, first_poses=v[:, 0, :, :4]),
            r"first_poses.*\(2, 3, 5\).*\(2, 3, 4\)",
        ),
        (lambda v: F.margin_loss(v[:, :, 0, 0], torch.zeros(2, 3)), r"targets.*\(2, 4\)"),
        (lambda v: F.spread_loss(v[:, :, 0, 0], torch.zeros(2, 4)), r"class indices.*\(batch,\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(randn(2, 4, 3, 5))
    assert "\n" not in str(error.value)


def test_padding_in_stored_votes():
    votes, padding = randn(2, 4, 3, 2), 1e4 * randn(2, 2, 3, 2, seed=3)
    scores, nobody = randn(2, 4, seed=1), torch.full((2, 2), -math.inf, dtype=torch.float64)
    for name, (function, *_) in FUNCTIONS.items():
        rows = randn(6, 3, seed=4)
        own = {"em": {"beta_a": rows[0], "beta_u": rows[1]}}.get(name, {})
        alone, padded = ({"beta_use": rows[:n]} if name.startswith("heinsen") else own for n in (4, 6))
        expected = function(votes, scores, **alone)
        found = function(torch.cat([votes, padding], 1), torch.cat([scores, nobody], 1), **padded)
        assert_close(found.poses, expected.poses)
        assert_close(found.coefficients[:, :4], expected.coefficients)
