"""Variational Bayes routing: its batch norms in training, its limits, and numbers at which published code gives NaN.

The algorithm in evaluation mode is in `test_algorithms.py`.
"""

import copy
import math

import oracles
import pytest
import torch
from algorithms import expected_of, randomize
from problems import BACKENDS
from scipy.special import digamma
from torch import Tensor
from torch.testing import assert_close

from torchcaps import CapsuleConv2d, CapsuleLinear, Capsules, CapsuleStack, VBRouting, squash


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def training_layer(routing: VBRouting | None = None, children: int | None = 5, parents: int | None = 3):
    layer = CapsuleLinear(children, parents, (2, 3), (2, 2), routing or VBRouting(), bias=True)
    return randomize(layer).train()


def some_children(batch: int = 4, children: int = 5) -> Capsules:
    scores = torch.randn(batch, children)
    scores[:, 0], scores[0, 1] = -math.inf, math.inf
    return Capsules(torch.randn(batch, children, 2, 3), scores)


def close(found: Tensor | None, expected: object) -> None:
    assert found is not None
    assert_close(found.detach(), torch.as_tensor(expected), rtol=0, atol=1e-10)


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize(("children", "parents"), [(5, 3), (1, 3), (5, 1)])
def test_training_mode_in_plain_loops(iterations, children, parents):
    layer = training_layer(VBRouting(iterations), children, parents)
    capsules = some_children(children=5)
    capsules = Capsules(capsules.poses[:, -children:], capsules.scores[:, -children:])
    expected = expected_of("variational_bayes", layer, capsules.poses, capsules.scores)
    for backend in BACKENDS:
        layer.backend = backend
        found = layer(capsules, return_coefficients=True)
        close(found.poses.flatten(2), expected["poses"])
        close(found.scores, expected["scores"])
        close(found.coefficients, expected["coefficients"])


def test_the_papers_betas_change_nothing():
    layer, capsules = training_layer(), some_children()
    votes = oracles.votes_from_poses(capsules.poses.tolist(), layer.weight.tolist(), layer.bias.tolist())
    betas = [1.0, -2.0, 0.5], [3.0, 0.25, -1.0]
    gates = capsules.scores.sigmoid().tolist()
    expected = oracles.variational_bayes_routing(votes, 3, None, gates=gates, betas=betas)
    close(layer(capsules).scores, expected["scores"])


@pytest.mark.parametrize("gradient", ["unrolled", "last"])
def test_running_values_change_once_per_pass_by_the_last_iteration(gradient):
    layer, capsules, seen = training_layer(VBRouting(3, gradient)), some_children(), []
    layer.routing.reset_parameters()
    stack = CapsuleStack(layer)
    with layer.routing.watched(seen.append):
        stack(capsules)
    assert len(seen) == 3
    moments = seen[-1].votes.moments()
    m = (moments.mass / (1 + moments.mass)).unsqueeze(-1) * moments.mean
    norm = layer.routing.pose_norm
    close(norm.running_mean, 0.1 * m.mean((0, 2)))
    close(norm.running_var, 0.9 + 0.1 * m.transpose(0, 1).flatten(1).var(1))
    assert layer.routing.score_norm.running_mean.all()
    with torch.no_grad():
        stack(capsules)
    assert norm.num_batches_tracked == layer.routing.score_norm.num_batches_tracked == 2
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    stack.eval()(capsules)
    assert all(value.equal(before[key]) for key, value in layer.state_dict().items())


def test_evaluation_after_one_batch_is_as_in_training():
    """Running values that start at a variance of 1 would make all samples alike."""
    layer = CapsuleLinear(32, 10, 8, 8, VBRouting())
    children = squash(torch.randn(64, 32, 8))
    trained, evaluated = layer.train()(children), layer.eval()(children)
    assert trained.poses.std(0).mean() > 0.1
    assert_close(evaluated.poses, trained.poses, rtol=0.02, atol=1e-3)
    assert_close(evaluated.scores, trained.scores, rtol=0.02, atol=1e-3)


def test_padding_in_training():
    """Padding does not enter the batch norms, unless a sample has nothing else."""
    layer, (poses, scores, *_) = training_layer(children=None), some_children()
    padded = torch.cat([1e4 * torch.randn(4, 3, 2, 3), poses], 1), torch.cat([torch.full((4, 3), -math.inf), scores], 1)
    close(layer(Capsules(*padded)).poses, layer(Capsules(poses, scores)).poses)
    close(layer(Capsules(*padded)).scores, layer(Capsules(poses, scores)).scores)
    scores[0] = -math.inf
    out = layer(Capsules(poses, scores))
    assert out.poses.isfinite().all()
    assert out.scores.isfinite().all()


@pytest.mark.slow
def test_compiled_in_training():
    layer, capsules = training_layer(), some_children()
    twin = copy.deepcopy(layer)
    torch._dynamo.reset()
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(capsules)
    close(found.scores, twin(capsules).scores)
    for value, expected in zip(layer.state_dict().values(), twin.state_dict().values(), strict=True):
        assert_close(value, expected)


def test_poses_and_scores_are_normalized_over_samples_and_positions():
    layer = randomize(CapsuleConv2d(2, 3, (2, 2), (2, 2), 2, VBRouting())).train()
    out = layer(torch.randn(4, 2, 5, 6, 2, 2))
    for x in (out.poses.movedim(1, 0).flatten(1), out.scores.movedim(1, 0).flatten(1)):
        close(x.mean(1), torch.zeros(3))
        assert_close(x.var(1, unbiased=False), torch.ones(3), rtol=0, atol=2e-2)


def test_any_number_of_parents_shares_its_statistics():
    layer = training_layer(children=None, parents=None)
    assert layer.routing.pose_norm.num_features == 1
    out = layer(some_children(), out_capsules=7)
    assert out.scores.shape == (4, 7)
    close(out.scores.mean(), 0.0)
    close(out.poses.mean(), 0.0)


def test_a_batch_of_one():
    layer, capsules = training_layer(), some_children(1)
    with pytest.raises(ValueError, match="more than one sample.*eval"):
        layer(capsules)
    assert layer.eval()(capsules).poses.isfinite().all()
    conv = CapsuleConv2d(2, 3, 4, 4, 2, VBRouting())
    assert conv(torch.randn(1, 2, 3, 3, 4)).scores.shape == (1, 3, 2, 2)  # four windows


def test_an_empty_batch_in_training():
    layer = training_layer()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    poses = torch.zeros(0, 5, 2, 3, requires_grad=True)
    out = layer(poses)
    assert out.scores.shape == (0, 3)
    (out.poses.sum() + out.scores.sum()).backward()
    for key, value in layer.state_dict().items():
        assert value.equal(before[key]) or "num_batches" in key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_training(dtype):
    layer = CapsuleLinear(6, 3, 4, 5, VBRouting()).to(dtype)
    exact = CapsuleLinear(6, 3, 4, 5, VBRouting()).double()
    exact.load_state_dict(layer.state_dict())
    poses = torch.randn(16, 6, 4).to(dtype)
    out, expected = layer(poses), exact(poses.double())
    assert out.poses.dtype == out.scores.dtype == layer.routing.score_norm.running_var.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert_close(out.poses.double(), expected.poses, rtol=0, atol=16 * eps)
    assert_close(out.scores.double(), expected.scores, rtol=0, atol=64 * eps)


def test_many_children_leave_nothing_of_the_prior():
    """With a child copied n times, the assignments tend to those of a mixture of Gaussians without priors, as 1/n."""
    layer = randomize(CapsuleLinear(None, 3, (2, 3), (2, 2), VBRouting(2), bias=True))
    few, errors = torch.randn(2, 4, 2, 3), []
    m = layer.votes(few).moments(None)
    (votes,) = (block for block, _ in layer.votes(few).blocks())
    normal = torch.distributions.Normal(m.mean.unsqueeze(1), m.variance.sqrt().unsqueeze(1))
    logits = (m.mass / m.mass.sum(-1, keepdim=True)).log().unsqueeze(1) + normal.log_prob(votes).sum(-1)
    for n in (1_000, 10_000, 100_000):
        found = layer(few.repeat_interleave(n, 1), return_coefficients=True).coefficients[:, ::n]
        errors.append((found - logits.softmax(-1)).abs().max().item())
    assert errors[2] < 0.01
    assert errors[2] < errors[1] / 5 < errors[0] / 25


def test_a_parent_that_no_child_chooses_has_its_prior():
    """All coefficients of parent 1 underflow in float32; the authors' code divides 0 by 0 here."""
    layer = CapsuleLinear(None, 2, 8, 8, VBRouting()).float().eval()
    with torch.no_grad():
        layer.weight[:, 0], layer.weight[:, 1] = torch.eye(8), 1e8 * torch.eye(8)
    poses = torch.randn(3, 400, 8, dtype=torch.float32, requires_grad=True)
    out = layer(poses, return_coefficients=True)
    assert out.coefficients[..., 1].max() == 0
    (out.poses.square().sum() + out.scores.square().sum()).backward()
    assert all(x.isfinite().all() for x in (out.poses, out.scores, poses.grad, layer.weight.grad))
    close(out.poses[:, 1].double(), torch.zeros(3, 8))
    # alpha = 1 of 402, nu = 9, P = 1.
    log_det = sum(digamma((9 - h) / 2) + math.log(2) for h in range(8))
    score = -math.exp(digamma(1.0) - digamma(402.0)) * (4 * math.log(2 * math.pi * math.e) - log_det / 2)
    assert_close(out.scores[:, 1].double(), torch.full((3,), score), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e6, 1e9])
@pytest.mark.parametrize("children", [1, 2000])
def test_votes_of_any_size_are_finite_in_training(scale, children):
    layer = CapsuleLinear(None, 3, 16, 16, VBRouting()).float()
    poses = (scale * torch.randn(4, children, 16)).float().requires_grad_()
    out = layer(poses)
    (out.poses.sum() + out.scores.square().sum()).backward()
    values = (*layer.state_dict().values(), *(p.grad for p in layer.parameters()), poses.grad, out.poses, out.scores)
    assert all(x.isfinite().all() for x in values)


def test_a_concurrent_stack_is_refused():
    layers = [CapsuleLinear(3, 3, 2, 2, VBRouting()) for _ in range(2)]
    with pytest.raises(ValueError, match="VBRouting has batch norms.*schedule='sequential'"):
        CapsuleStack(*layers, schedule="concurrent")


def test_first_weights_are_drawn_as_by_the_authors():
    """Xavier counts the weights of a convolution: its kernel in both fans, and each shared weight once."""
    conv = CapsuleConv2d(16, 16, (4, 4), (4, 4), 3, VBRouting())
    bound = (6 / (16 * 9 * 16 + 16 * 9 * 16)) ** 0.5
    assert 0.999 * bound < conv.weight.abs().max().item() <= bound  # 0.0361
    shared = CapsuleLinear(16, 5, (4, 4), (4, 4), VBRouting(), share_positions=True, expected_children=16 * 36)
    bound = (6 / (16 * 16 + 5 * 16)) ** 0.5
    assert 0.99 * bound < shared.weight.abs().max().item() <= bound
