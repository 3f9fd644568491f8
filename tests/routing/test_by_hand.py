"""Routings on cases that are small enough to work out on paper."""

import math

import pytest
import torch
from algorithms import Largest, route
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
    SelfRouting,
    UniformRouting,
    VBRouting,
    VectorNormRouting,
    squash,
)
from torchcaps.routing import Iteration, exponential_squash


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# Two children, two parents, vectors of two entries. Child 0 votes (1, 0) for parent 0 and (0, 0) for parent 1;
# child 1 votes (0, 2) for parent 0 and (0, 1) for parent 1.
VOTES = tensor([[[[1, 0], [0, 0]], [[0, 2], [0, 1]]]])


def test_dynamic_routing_once():
    # c = 1/2 everywhere: s_0 = (1/2, 1), s_1 = (0, 1/2). |s_0|^2 = 5/4, |s_1|^2 = 1/4.
    # v_0 = (5/4)/(9/4) s_0/|s_0| = 5/9 (1/2, 1)/(sqrt 5 / 2), v_1 = (1/4)/(5/4) (0, 1) = (0, 1/5).
    root5 = math.sqrt(5)
    out = route(DynamicRouting(1), VOTES)
    assert_close(out.poses, tensor([[[5 / 9 / root5, 10 / 9 / root5], [0, 0.2]]]))
    assert_close(out.coefficients, torch.full((1, 2, 2), 0.5, dtype=torch.float64))


def test_dynamic_routing_twice():
    # b_00 = (1, 0) . v_0 = 5/(9 sqrt 5), b_01 = 0, b_10 = (0, 2) . v_0 = 20/(9 sqrt 5), b_11 = (0, 1) . v_1 = 1/5.
    root5 = math.sqrt(5)
    c00 = 1 / (1 + math.exp(-5 / 9 / root5))
    c10 = 1 / (1 + math.exp(0.2 - 20 / 9 / root5))
    out = route(DynamicRouting(2), VOTES)
    assert_close(out.coefficients, tensor([[[c00, 1 - c00], [c10, 1 - c10]]]))
    # s_0 = (c00, 2 c10), s_1 = (0, c11).
    length = math.hypot(c00, 2 * c10)
    scale = length / (1 + length**2)
    c11 = 1 - c10
    assert_close(out.poses, tensor([[[scale * c00, scale * 2 * c10], [0, c11**2 / (1 + c11**2)]]]))


def test_dynamic_routing_over_children():
    # The same logits, but each parent's coefficients sum to one over the children.
    root5 = math.sqrt(5)
    # Over children the first pass is s_0 = (1/2, 1), s_1 = (0, 1/2) too: there are as many children as parents.
    c00 = 1 / (1 + math.exp(15 / 9 / root5))
    c01 = 1 / (1 + math.exp(0.2))
    out = route(DynamicRouting(2, softmax="children"), VOTES)
    assert_close(out.coefficients, tensor([[[c00, c01], [1 - c00, 1 - c01]]]))


def test_leaky_routing_starts_at_one_of_three():
    out = route(DynamicRouting(1, leaky=True), VOTES)
    assert_close(out.coefficients, torch.full((1, 2, 2), 1 / 3, dtype=torch.float64))
    # s_1 = (0, 1/3): v_1 = (1/9)/(10/9) = 1/10.
    assert_close(out.poses[0, 1], tensor([0, 0.1]))


def test_vector_norm_routing():
    # One parent, children (3, 0) and (0, 4). Mean (1.5, 2), unit (0.6, 0.8): b = (0.6, 0.8).
    votes = tensor([[[[3, 0]], [[0, 4]]]])
    c0 = 1 / (1 + math.exp(0.2 * 5))
    out = route(VectorNormRouting(1, sharpness=5.0), votes)
    assert_close(out.coefficients, tensor([[[c0], [1 - c0]]]))
    assert_close(out.poses, tensor([[[3 * c0, 4 * (1 - c0)]]]))


def test_inverted_attention_routing():
    # First pass p_0 = (1/2, 1), p_1 = (0, 1/2); LayerNorm of two entries gives (-1, 1) up to its eps, both times.
    out = route(InvertedAttentionRouting(2), VOTES, weight=torch.ones(2), bias=torch.zeros(2))
    # a_00 = -1/sqrt 2, a_01 = 0; a_10 = 2/sqrt 2, a_11 = 1/sqrt 2.
    r00 = 1 / (1 + math.exp(1 / math.sqrt(2)))
    r10 = 1 / (1 + math.exp(-1 / math.sqrt(2)))
    close = {"rtol": 0, "atol": 5e-4}
    assert_close(out.coefficients, tensor([[[r00, 1 - r00], [r10, 1 - r10]]]), **close)
    # Sums (r00, 2 r10) and (0, 1 - r10): both second entries are larger.
    assert_close(out.poses, tensor([[[-1, 1], [-1, 1]]]), **close)


def test_em_routing_once():
    # One entry per pose. Parent 0 gets the votes 1 and 3, parent 1 gets 0 and 4. Both gates are 1/2, so R = 1/4.
    votes = tensor([[[[1], [0]], [[3], [4]]]])
    activations = tensor([[0.5, 0.5]])
    out = route(EMRouting(1), votes, torch.logit(activations), beta_a=tensor([1.0, 1.0]), beta_u=tensor([0.5, 0.5]))
    assert_close(out.poses, tensor([[[2], [2]]]))
    assert_close(out.variances, tensor([[[1], [4]]]))
    # cost_0 = (0.5 + log 1) / 2, cost_1 = (0.5 + log 2) / 2; lambda = 0.01 (1 - 0.95).
    rate = 0.01 * 0.05
    assert_close(out.scores, tensor([[rate * 0.75, rate * (0.75 - math.log(2) / 2)]]))


def test_em_routing_twice():
    votes = tensor([[[[1], [0]], [[3], [4]]]])
    out = route(EMRouting(2, 1.0, decay=0.0), votes, beta_a=torch.zeros(2), beta_u=torch.zeros(2))
    # After the first M-step: mu = (2, 2), sigma^2 = (1, 4), cost = (0, log 2), a = (1/2, 1/3).
    # Each vote lies one sigma off: N(V; 0) : N(V; 1) = 1 : 1/2, so R_i0 = (1/2)/(1/2 + 1/6) = 3/4.
    assert_close(out.coefficients, tensor([[[0.75, 0.25], [0.75, 0.25]]]))
    # Means and variances stay; masses are 3/2 and 1/2: scores are -3/2 log 1 and -1/2 log 2.
    assert_close(out.scores, tensor([[0, -math.log(2) / 2]]))


def test_variances_of_em_routing_are_at_least_eps():
    votes = torch.ones(1, 4, 3, 2, dtype=torch.float64)
    out = route(EMRouting(1, eps=0.01), votes, beta_a=torch.zeros(3), beta_u=torch.zeros(3))
    assert_close(out.variances, torch.full((1, 3, 2), 0.01, dtype=torch.float64))


def test_costs_that_rounding_tells_apart_are_equal():
    """The parents have the same votes with their entries in other orders, whose sums differ in the last digit."""
    votes = torch.randn(60, 7, 1, 5, dtype=torch.float64)
    votes = torch.cat([votes, votes[..., [4, 2, 0, 3, 1]], votes[..., [1, 0, 4, 2, 3]]], 2)
    routing = EMRouting(1, inverse_temperature=1.0, cost_range=10)
    out = route(routing, votes, beta_a=torch.zeros(3), beta_u=torch.zeros(3))
    assert_close(out.scores, torch.full((60, 3), 0.05 * 5, dtype=torch.float64))  # all costs are -5


def test_heinsen_routing_once():
    # R = 1/2, f(a_i) = 1 and 1/2 (score 0): D_use = 1/2, 1/4 and D_ign the same.
    votes = tensor([[[[1], [0]], [[4], [3]]]])
    scores = tensor([[math.inf, 0.0]])
    use, ignore = tensor([[1, 2], [4, 0]]), tensor([[0, 1], [8, 4]])
    out = route(HeinsenRouting(1, eps=1e-6), votes, scores, beta_use=use, beta_ignore=ignore)
    # a_0 = 1/2 + 4/4 - 0 - 8/4 = -1/2; a_1 = 2/2 + 0 - 1/2 - 4/4 = -1/2.
    assert_close(out.scores, tensor([[-0.5, -0.5]]))
    # mu_0 = (1/2 + 4/4)/(3/4) = 2, mu_1 = (0 + 3/4)/(3/4) = 1; variances (1/2 + 4/4)/(3/4) = 2 and 2.
    assert_close(out.poses, tensor([[[2], [1]]]), rtol=0, atol=1e-5)  # but for eps
    assert_close(out.variances, tensor([[[2], [2]]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
def test_heinsen_routing_twice(model):
    # As above: mu = (2, 1), sigma^2 = (2, 2), equal scores. Child 0 lies 1 off both means, child 1 lies 2 off both.
    votes = tensor([[[[1], [0]], [[4], [3]]]])
    scores = tensor([[math.inf, 0.0]])
    use, ignore = tensor([[1, 2], [4, 0]]), tensor([[0, 1], [8, 4]])
    out = route(HeinsenRouting(2, model=model, eps=1e-6), votes, scores, beta_use=use, beta_ignore=ignore)
    assert_close(out.coefficients, torch.full((1, 2, 2), 0.5, dtype=torch.float64), rtol=0, atol=1e-5)
    # Move child 0's vote for parent 1 away from the mean, so that the child prefers parent 0.
    votes = tensor([[[[1], [-1]], [[4], [3.5]]]])  # mu_1 = (-1/2 + 3.5/4)/(3/4) = 1/2
    out = route(HeinsenRouting(2, model=model, eps=1e-6), votes, scores, beta_use=use, beta_ignore=ignore)
    variance = ((1.5**2) / 2 + 3**2 / 4) / 0.75  # of parent 1
    if model == "gaussian":
        logits = (-1 / 4 - math.log(2) / 2, -(1.5**2) / (2 * variance) - math.log(variance) / 2)
    else:
        logits = (-1.0, -(1.5**2))
    expected = 1 / (1 + math.exp(logits[1] - logits[0]))
    assert out.coefficients[0, 0, 0].item() == pytest.approx(expected, rel=1e-5)


def test_self_routing_of_a_parent_that_hardly_any_child_chooses():
    """One child, whose logits are 0 and -40: the second parent has a share of 4e-18, and still learns to get more."""
    layer = CapsuleLinear(1, 2, 1, 1, SelfRouting()).double()
    layer.routing.route_bias.data = tensor([[0, -40]])
    scores = layer(tensor([[[1]]])).scores
    assert_close(scores, tensor([[40, -40]]))
    (-torch.nn.functional.logsigmoid(scores[0, 1])).backward()
    assert_close(layer.routing.route_bias.grad, tensor([[1, -1]]))


def test_self_routing_of_nobody():
    """A sample of padding alone has no parent that is present."""
    layer = CapsuleLinear(3, 4, 2, 2, SelfRouting())
    out = layer(Capsules(torch.randn(2, 3, 2), torch.tensor([[-math.inf] * 3, [0.0, -math.inf, 1.0]])))
    assert out.activations[0].max() < 1e-20
    assert_close(out.activations[1].sum(), torch.tensor(1.0))


@pytest.mark.parametrize("parents", [1, 2, 3, 500])
def test_scores_of_self_routing_are_the_logits_of_the_shares(parents):
    layer = CapsuleLinear(None, parents, 1, 1, SelfRouting()).double()
    layer.routing.route_bias.data = 5 * torch.randn(1, parents, dtype=torch.float64)  # one parent may have nearly all
    share = layer.routing.route_bias.softmax(-1)
    scores = layer(torch.zeros(1, 7, 1, dtype=torch.float64)).scores
    expected = torch.logit(share) if parents > 1 else tensor([[math.log(1e30)]])
    assert_close(scores, expected, rtol=1e-10, atol=1e-10)
    assert_close(scores.sigmoid().sum(-1), tensor([1]))


def test_self_routing_to_many_parents_takes_little_memory():
    """A matrix of parents x parents would have 1.6 GB."""
    layer, kept = CapsuleLinear(1, 20_000, 1, 1, SelfRouting()), list[int]()
    children = torch.randn(2, 1, 1)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
        Largest() as most,
    ):
        scores = layer(children).scores
        scores.logsumexp(-1).sum().backward()
    assert scores.shape == (2, 20_000)
    assert max(*kept, most.numbers) <= 10 * 20_000
    assert_close(scores.sigmoid().sum(-1), torch.ones(2), rtol=1e-4, atol=0)


def test_self_routing():
    # Two children with one entry, 1 and 2, and gates 1/2 and 1; their logits are x ln 2 and 0.
    layer = CapsuleLinear(2, 2, 1, 1, SelfRouting()).double()
    layer.weight.data = tensor([[[[1]], [[3]]], [[[1]], [[1]]]])
    layer.routing.route_weight.data[:, 0] = math.log(2)
    children = Capsules(tensor([[[1], [2]]]), torch.logit(tensor([[0.5, 1.0]])))
    out = layer(children, return_coefficients=True)
    # Child 0: 2 : 1; child 1: 4 : 1.
    assert_close(out.coefficients, tensor([[[2 / 3, 1 / 3], [4 / 5, 1 / 5]]]))
    # Shares 1/3, 1/6 and 4/5, 1/5: masses 17/15 and 11/30 of 3/2. Votes 1, 3 and 2, 2.
    assert_close(out.activations, tensor([[17 / 15 / 1.5, 11 / 30 / 1.5]]))
    assert_close(out.poses, tensor([[[(1 / 3 + 8 / 5) / (17 / 15)], [(3 / 6 + 2 / 5) / (11 / 30)]]]))


def test_efficient_routing():
    # Votes of one entry: 1 and 2 for parent 0, ln 3 - 1 and 1 for parent 1; their sums are 3 and ln 3.
    layer = CapsuleLinear(2, 2, 1, 1, EfficientRouting()).double()
    layer.weight.data = tensor([[[[1]], [[math.log(3) - 1]]], [[[2]], [[1]]]])
    layer.routing.coefficient_bias.data = tensor([[0.5, 0], [0, -1]])
    seen: list[Iteration] = []
    with layer.routing.watched(seen.append):
        out = layer(tensor([[[1], [1]]]), return_coefficients=True)
    # Logits 3 and (ln 3 - 1) ln 3 of child 0; 6 and ln 3 of child 1.
    c0 = 1 / (1 + math.exp((math.log(3) - 1) * math.log(3) - 3))
    c1 = 1 / (1 + 3 * math.exp(-6))
    assert_close(out.coefficients, tensor([[[c0, 1 - c0], [c1, 1 - c1]]]))
    s0, s1 = c0 + 0.5 + 2 * c1, (1 - c0) * (math.log(3) - 1) + (1 - c1 - 1)
    assert s1 < 0
    assert_close(seen[0].votes.factors(), tensor([[[c0 + 0.5, 1 - c0], [c1, -c1]]]))
    assert_close(out.poses, tensor([[[1 - math.exp(-s0)], [math.exp(s1) - 1]]]))


def test_exponential_squash():
    s = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]], dtype=torch.float64, requires_grad=True)
    v = exponential_squash(s)
    assert_close(v[0], (1 - math.exp(-5)) * torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert_close(v[1:], s[1:])
    assert_close(exponential_squash(tensor([1e-4, 0.0])), tensor([-math.expm1(-1e-4), 0.0]), rtol=1e-12, atol=0)
    v.sum().backward()
    assert_close(s.grad[1:], torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squash_in_half_precision(dtype):
    """Only the result is rounded: 300 squared overflows in float16."""
    s = torch.tensor([300.0, 400.0, 0.0], dtype=dtype)
    assert_close(squash(s), squash(s.double()).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dim", [1, -1])  # the kernel takes the last dimension
def test_gradients_of_squash(dim):
    """Its backward pass is written by hand, and has derivatives and batches."""
    s = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: squash(s, dim), s)
    assert torch.autograd.gradgradcheck(lambda s: squash(s, dim), s)
    v, rows = squash(s, dim), torch.eye(24, dtype=torch.float64).view(24, 2, 3, 4)
    (batched,) = torch.autograd.grad(v, s, rows, is_grads_batched=True, retain_graph=True)
    assert_close(batched, torch.stack([torch.autograd.grad(v, s, row, retain_graph=True)[0] for row in rows]))


@pytest.mark.parametrize("length", [0.0, 1e-18, 1.0, 1e18])
@pytest.mark.parametrize("dim", [0, 1])
def test_squash_of_any_length(length, dim):
    """The gradient along the vector is 2 l / (1 + l^2)^2 for the length l, and across it l / (1 + l^2): nothing
    overflows."""
    s = torch.tensor([[0.0, length]]).movedim(1, dim).requires_grad_()
    v = squash(s, dim)
    (gradient,) = torch.autograd.grad(v.sum(), s)
    across = length / (1 + length**2)
    assert_close(v.flatten().double(), tensor([0.0, length * across]), rtol=1e-6, atol=1e-17)
    assert_close(gradient.flatten().double(), tensor([across, 2 * across / (1 + length**2)]), rtol=1e-6, atol=1e-17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squash_of_many_vectors(dtype, monkeypatch):
    """Several threads share them; the gradient comes in another order in memory."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    s = torch.randn(20_001, 16, dtype=dtype, requires_grad=True)
    given = torch.randn(16, 20_001, dtype=dtype).T
    exact = s.detach().double().T.contiguous().requires_grad_()  # its vectors are not along the last dimension
    v, expected = squash(s), squash(exact, 0)
    (gradient,), (wanted,) = torch.autograd.grad(v, s, given), torch.autograd.grad(expected, exact, given.double().T)
    assert_close(v, expected.T.to(dtype))
    assert_close(gradient, wanted.T.to(dtype))


def test_squash_keeps_nan_to_its_vector():
    v = squash(torch.tensor([[1.0, torch.nan], [3.0, 4.0]]))
    assert v[0].isnan().all()
    assert_close(v[1], torch.tensor([3.0, 4.0]) * 5 / 26)


def test_uniform_routing():
    # Gates 1 and 1/2, c = 1/2: s_0 = (1/2, 1/2), s_1 = (0, 1/4). |s_0|^2 = 1/2, |s_1| = 1/4.
    out = UniformRouting()(VOTES, torch.tensor([[math.inf, 0.0]], dtype=torch.float64))
    v0, v1 = 1 / 3 / math.sqrt(2), (1 / 16) / (17 / 16)
    assert_close(out.poses, tensor([[[v0, v0], [0, v1]]]))


def test_random_routing():
    # Logits ln 3, 0 and 0, 0: c = 3/4, 1/4 and 1/2, 1/2.
    routing = RandomRouting(activation=None).with_values(logits=tensor([[math.log(3), 0], [0, 0]]))
    out = routing(VOTES, return_coefficients=True)
    assert_close(out.coefficients, tensor([[[0.75, 0.25], [0.5, 0.5]]]))
    assert_close(out.poses, tensor([[[0.75, 1], [0, 0.5]]]))


def vb_layer(iterations: int) -> CapsuleLinear:
    """One entry per pose. For children 1 and 1 the votes are 1, 3 for parent 0 and 0, 4 for parent 1."""
    layer = CapsuleLinear(2, 2, 1, 1, VBRouting(iterations)).double().eval()
    layer.weight.data = tensor([[[[1]], [[0]]], [[[3]], [[4]]]])
    return layer


def test_variational_bayes_routing_once():
    # R = 1/2, R_j = 1: alpha = kappa = 2, nu = 2 + 1 = 3, mu = (2, 2), m = mu/2 = (1, 1).
    # P_0 = 1 + (1 + 1)/2 + 4/2 = 4, P_1 = 1 + (4 + 4)/2 + 4/2 = 7.
    out = vb_layer(1)(tensor([[[1], [1]]]))
    bn = 1 / math.sqrt(1 + 1e-5)  # running mean 0 and variance 1
    assert_close(out.poses, tensor([[[bn], [bn]]]))
    # E ln pi = psi(2) - psi(4) = -1/2 - 1/3; psi(3/2) = 2 - gamma - 2 ln 2, so E ln|L| = 2 - gamma - ln 2 - ln P.
    gamma = 0.5772156649015329
    entropies = [(math.log(2 * math.pi * math.e) - 2 + gamma + math.log(2 * p)) / 2 for p in (4, 7)]
    assert_close(out.scores, tensor([[-math.exp(-5 / 6) * h * bn for h in entropies]]))


def test_variational_bayes_routing_twice():
    # Between the parents only ln P and the distances differ. Child 0 is 0 and 1 off the means, child 1 is 2 and 3 off:
    # logits -ln(4)/2 - 3/2 * 0 and -ln(7)/2 - 3/2 * 1/7; child 1: -ln(4)/2 - 3/2 * 4/4 and -ln(7)/2 - 3/2 * 9/7.
    c0 = 1 / (1 + math.sqrt(4 / 7) * math.exp(-3 / 14))
    c1 = 1 / (1 + math.sqrt(4 / 7) * math.exp(3 / 2 - 27 / 14))
    out = vb_layer(2)(tensor([[[1], [1]]]), return_coefficients=True)
    assert_close(out.coefficients, tensor([[[c0, 1 - c0], [c1, 1 - c1]]]))
    # m = sum of the shares times the votes, divided by 1 + R_j.
    m = (c0 + 3 * c1) / (1 + c0 + c1), 4 * (1 - c1) / (3 - c0 - c1)
    assert_close(out.poses, tensor([[[x / math.sqrt(1 + 1e-5)] for x in m]]))
