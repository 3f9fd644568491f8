"""The networks of embeddings of texts, of Heinsen 2019 and 2022: masks and padding, order, half precision, errors."""

import math

import pytest
import torch
from torch import nn

from torchcaps.models import heinsen_sst, heinsen_texts

BUILDERS = {
    "heinsen_sst": lambda: heinsen_sst(3, layers=2, width=7, features=5, pose=3, parts=4),
    "heinsen_texts": lambda: heinsen_texts(3, layers=2, width=7, hidden=4, pose=5),
}


@pytest.fixture(params=BUILDERS)
def name(request):
    return request.param


def build(name, dtype=torch.float64):
    """A small network with random parameters, because initially some are zero; embeddings of two texts; their mask."""
    torch.manual_seed(0)
    network = BUILDERS[name]().to(dtype)
    for p in network.parameters():
        nn.init.normal_(p, std=0.4)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    return network, torch.randn(2, 4, 2, 7, dtype=dtype), mask


@pytest.mark.parametrize(
    ("places", "garbage"),
    [(slice(0, 4), math.nan), (slice(4, 8), math.inf), (slice(1, 8, 2), 1e3)],
    ids=["right", "left", "between"],
)
def test_padding_changes_nothing(name, places, garbage):
    network, embeddings, mask = build(name)
    padded = garbage * torch.randn(2, 8, 2, 7, dtype=torch.float64)
    padded[:, places] = embeddings
    padded_mask = torch.zeros(2, 8, dtype=torch.bool)
    padded_mask[:, places] = mask
    results = []
    for x, m in ((embeddings, mask), (padded, padded_mask)):
        x.requires_grad_()
        network.zero_grad()
        scores, capsules, _ = network(x, m)
        (scores.pow(3).sum() + capsules.poses.pow(3).sum()).backward()
        results.append((scores, capsules.poses, *(p.grad.clone() for p in network.parameters())))
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(padded.grad[:, places], embeddings.grad, rtol=1e-11, atol=1e-11)
    assert not padded.grad[~padded_mask].any()
    # The first text alone, without its padding and without a mask.
    torch.testing.assert_close(network(embeddings[:1, :3]).scores, results[1][0][:1], rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_masks(name):
    network, embeddings, mask = build(name)
    expected = network(embeddings, mask).scores
    for other in (mask.long(), mask.float(), mask.double(), mask.half()):
        torch.testing.assert_close(network(embeddings, other).scores, expected, rtol=0, atol=0)
    torch.testing.assert_close(network(embeddings).scores, network(embeddings, torch.ones(2, 4)).scores)
    assert not torch.allclose(network(embeddings).scores[0], expected[0])
    scores = network.primary_capsules(embeddings, mask).scores
    assert scores.tolist() == [[math.inf] * 6 + [-math.inf] * 2, [math.inf] * 8]
    nothing = network(embeddings, torch.zeros(2, 4)).scores  # all children absent
    assert nothing.isfinite().all()
    torch.testing.assert_close(nothing[0], nothing[1])
    assert network(embeddings[:0], mask[:0]).scores.shape == (0, 3)


@torch.no_grad()
def test_soft_masks(name):
    network, embeddings, _ = build(name)
    mask = torch.tensor([[1, 0.5, 0.01, 0], [0.9, 0.8, 0.3, 1]], dtype=torch.float64)
    children = network.primary_capsules(embeddings, mask)
    torch.testing.assert_close(children.scores.sigmoid(), mask.repeat_interleave(2, 1))
    # A token that occurs twice, with 0.3 and 0.7 of its mask, counts as once with its whole mask.
    twice = network(torch.cat([embeddings, embeddings], 1), torch.cat([0.3 * mask, 0.7 * mask], 1)).scores
    torch.testing.assert_close(twice, network(embeddings, mask).scores, rtol=1e-10, atol=1e-10)


def test_the_gradient_of_a_mask_is_finite(name):
    network, x, _ = build(name)
    mask = torch.tensor([[1, 1, 0.5, 1], [1, 0, 0, 0]], dtype=torch.float64, requires_grad=True)
    network(x.requires_grad_(), mask).scores.sum().backward()
    assert mask.grad.isfinite().all()
    assert mask.grad.nonzero().tolist() == [[0, 2]]
    assert x.grad.isfinite().all()


@torch.no_grad()
def test_layers_are_told_apart_and_tokens_are_not(name):
    network, embeddings, _ = build(name)
    scores = network(embeddings).scores
    torch.testing.assert_close(network(embeddings.flip(1)).scores, scores)
    assert not torch.allclose(network(embeddings.flip(2)).scores, scores)
    for tokens in (1, 300):
        assert network(torch.randn(2, tokens, 2, 7, dtype=torch.float64)).scores.shape == (2, 3)


@torch.no_grad()
def test_embeddings_in_half_precision(name):
    network, embeddings, mask = build(name, torch.float32)
    half = embeddings.half()
    torch.testing.assert_close(network(half, mask).scores, network(half.float(), mask).scores)
    with torch.autocast("cpu", torch.bfloat16):
        scores = network(half, mask).scores
    torch.testing.assert_close(scores.float(), network(half, mask).scores, rtol=0.1, atol=0.1)


def test_bad_input(name):
    network, embeddings, mask = build(name)
    with pytest.raises(ValueError, match=r"expected embeddings of shape .*got \(2, 0, 2, 7\)"):
        network(embeddings[:, :0], mask)
    for bad, shape in ((mask[0], r"\(4,\)"), (mask.T, r"\(4, 2\)"), (mask[..., None], r"\(2, 4, 1\)")):
        with pytest.raises(ValueError, match=r"expected a mask of shape \(batch, tokens\) = \(2, 4\), got " + shape):
            network(embeddings, bad)
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="a mask must be bool, or from 0"):
            network(embeddings, torch.full((2, 4), bad))
