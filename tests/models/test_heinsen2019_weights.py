"""Loading the author's published weights: the networks against the paper's algorithm in plain operations, and errors.

Without the published files, files of random values with the same keys and shapes take their place.
"""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from state_dicts import assert_holds, assert_refuses_other_files, assert_stays_as_it_was, edited, error_of

from torchcaps import EMRouting, HeinsenRouting
from torchcaps.models import EmbeddingCapsNet, StereoCapsNet, heinsen_smallnorb, heinsen_sst, load_authors_weights

WEIGHTS = Path(os.environ.get("TORCHCAPS_WEIGHTS") or Path(__file__).parents[3] / "shared" / "weights")
FILES = {name: f"{name}_pretrained_model_state_dict.pt" for name in ("smallNORB", "SST2R", "SST5R")}
PARAMETERS = {"smallNORB": 271_688, "SST2R": 138_944, "SST5R": 140_480}

needs_weights = pytest.mark.skipif(
    not all((WEIGHTS / name).is_file() for name in FILES.values()),
    reason=f"no weights of Heinsen's at {WEIGHTS} (set TORCHCAPS_WEIGHTS to their folder)",
)
published_or_alike = pytest.mark.parametrize("published", [pytest.param(True, marks=needs_weights), False])


# The author's files


def shapes_of(name):
    """Keys and shapes of a published file."""
    shapes = {}

    def routing(k, children, parents, rows, d, h):
        shapes.update({f"routings.{k}.W": (children, parents, d, h), f"routings.{k}.B": (children, parents, rows, h)})
        shapes.update({f"routings.{k}.beta_{which}": (children, parents) for which in ("use", "ign")})
        shapes[f"routings.{k}.CONST_one"] = ()

    def norm_and_conv(norm, conv, before, after, kernel):
        shapes.update({f"{norm}.{key}": (before,) for key in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{norm}.num_batches_tracked"] = ()
        shapes.update({f"{conv}.weight": (after, before, kernel, kernel), f"{conv}.bias": (after,)})

    if name == "smallNORB":
        for k in range(6):
            norm_and_conv(f"convolve.{3 * k}", f"convolve.{3 * k + 1}", 64 if k else 4, 64, 3)
        norm_and_conv("compute_a.0", "compute_a.1", 64, 64, 1)
        norm_and_conv("compute_mu.0", "compute_mu.1", 64, 1024, 1)
        routing(0, 1, 64, 4, 4, 4)
        routing(1, 64, 5, 4, 4, 4)
    else:
        shapes.update({"depth_emb": (37, 1280), "detect_parts.0.weight": (64, 1280)})
        shapes.update({f"detect_parts.{key}": (64,) for key in ("0.bias", "2.weight", "2.bias")})
        routing(0, 1, 64, 1, 64, 2)
        routing(1, 64, 2 if name == "SST2R" else 5, 1, 2, 2)
    return shapes


def alike(name):
    """A state dict with the keys and shapes of a published one and random values."""
    generator = torch.Generator().manual_seed(len(name))
    state = {}
    for key, shape in shapes_of(name).items():
        scale = 0.5 if len(shape) < 2 else (2 * max(shape) / math.prod(shape)) ** 0.5
        state[key] = scale * torch.randn(shape, generator=generator)
        if key.endswith("running_var"):
            state[key] = 0.5 + torch.rand(shape, generator=generator)
        if key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(7)
        if key.endswith("CONST_one"):
            state[key] = torch.tensor(1.0)
        if "beta" in key:
            state[key] = 0.1 * torch.randn(shape, generator=generator)
    return state


@pytest.fixture
def file(tmp_path):
    """A function: the path of a published file, or of one like it."""

    def place(name, published):
        if published:
            return WEIGHTS / FILES[name]
        torch.save(alike(name), tmp_path / FILES[name])
        return tmp_path / FILES[name]

    return place


def raw(path):
    return {key: x.double() for key, x in torch.load(path, map_location="cpu", weights_only=True).items()}


# The networks written out from the paper in plain operations


def route(w, k, gates, poses):
    """Run Algorithm 1 on gates f(a_i), `(batch, children)`, and poses `(batch, children, rows, features)`."""
    weight, bias, use, ignore = (w[f"routings.{k}.{name}"] for name in ("W", "B", "beta_use", "beta_ign"))
    votes = torch.einsum("bicd,ijdh->bijch", poses, weight.expand(poses.shape[1], -1, -1, -1)) + bias  # line 1
    gates, mu, var, a = gates.unsqueeze(-1), None, None, None
    for _ in range(3):
        if mu is None:
            r = torch.full(votes.shape[:3], 1 / votes.shape[2], dtype=votes.dtype)  # line 5
        else:
            log_p = -((votes - mu[:, None]) ** 2 / (2 * var[:, None]) + var[:, None].log() / 2).sum((-2, -1))  # line 7
            joint = a.sigmoid().log()[:, None] + log_p
            joint = (joint - joint.amax(2, keepdim=True)).exp()
            r = joint / joint.sum(2, keepdim=True)  # line 8
        used = gates * r  # line 12
        ignored = gates - used  # line 13
        a = (use * used).sum(1) - (ignore * ignored).sum(1)  # line 16
        total = used.sum(1)[..., None, None] + 1e-5
        mu = (used[..., None, None] * votes).sum(1) / total  # line 17
        var = (used[..., None, None] * (votes - mu[:, None]) ** 2).sum(1) / total + 1e-5  # line 18
    return a, mu, var


def two_layers(w, gates, poses):
    a, mu, _ = route(w, 0, gates, poses)
    return route(w, 1, a.sigmoid(), mu)


def batch_norm(w, name, x):
    mean, var, scale, shift = (
        w[f"{name}.{key}"].view(-1, 1, 1) for key in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * scale + shift


def smallnorb_by_hand(w, images):
    height, width = images.shape[2:]
    x = torch.zeros(len(images), 4, height, width, dtype=images.dtype)
    x[:, :2] = images
    x[:, 2] = torch.linspace(-1, 1, height, dtype=images.dtype).view(-1, 1)
    x[:, 3] = torch.linspace(-1, 1, width, dtype=images.dtype)
    for k in range(6):
        x = batch_norm(w, f"convolve.{3 * k}", x)
        x = F.conv2d(x, w[f"convolve.{3 * k + 1}.weight"], w[f"convolve.{3 * k + 1}.bias"], stride=1 + k % 2)
        x = x * x.sigmoid()
    scores = F.conv2d(batch_norm(w, "compute_a.0", x), w["compute_a.1.weight"], w["compute_a.1.bias"])
    poses = F.conv2d(batch_norm(w, "compute_mu.0", x), w["compute_mu.1.weight"], w["compute_mu.1.bias"])
    # Children in another order than the library's, position by position: the order must not matter.
    scores = scores.permute(0, 2, 3, 1).flatten(1)
    poses = poses.permute(0, 2, 3, 1).reshape(len(images), -1, 4, 4)
    return two_layers(w, scores.sigmoid(), poses)


def sst_by_hand(w, embeddings, mask):
    x = (embeddings + w["depth_emb"]) @ w["detect_parts.0.weight"].T + w["detect_parts.0.bias"]
    x = x * x.sigmoid()
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["detect_parts.2.weight"] + w["detect_parts.2.bias"]
    gates = mask.repeat_interleave(37, dim=1)
    return two_layers(w, gates, x.flatten(1, 2).unsqueeze(2))


def check(prediction, expected):
    scores, poses, variances = expected
    capsules = prediction.capsules
    assert scores.std() > 1e-3
    torch.testing.assert_close(prediction.scores, scores, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(capsules.poses, poses.view_as(capsules.poses), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(capsules.variances, variances.view_as(capsules.poses), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("published", "size"), [pytest.param(True, (96, 96), marks=needs_weights), (False, (29, 61)), (False, (52, 37))]
)
@torch.no_grad()
def test_smallnorb_by_hand(file, published, size):
    path = file("smallNORB", published)
    images = torch.rand(2, 2, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check(load_authors_weights(path).double()(images), smallnorb_by_hand(raw(path), images))


@pytest.mark.parametrize(
    ("published", "name", "tokens"),
    [
        *((False, "SST2R", 1), (False, "SST5R", 3), (False, "SST2R", 11)),
        *(pytest.param(True, *case, marks=needs_weights) for case in (("SST2R", 3), ("SST5R", 11))),
    ],
)
@torch.no_grad()
def test_sst_by_hand(file, published, name, tokens):
    path = file(name, published)
    generator = torch.Generator().manual_seed(tokens)
    embeddings = torch.randn(3, tokens, 37, 1280, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([tokens, (tokens + 1) // 2, 1])
    mask = (torch.arange(tokens) < lengths[:, None]).double()
    model, weights = load_authors_weights(path).double(), raw(path)
    check(model(embeddings, mask), sst_by_hand(weights, embeddings, mask))
    soft = torch.rand(3, tokens, generator=generator, dtype=torch.float64)
    check(model(embeddings, soft), sst_by_hand(weights, embeddings, soft))
    check(model(embeddings), sst_by_hand(weights, embeddings, torch.ones_like(mask)))


# Loading


@published_or_alike
@pytest.mark.parametrize("name", FILES)
def test_every_value_is_loaded(file, published, name):
    path = file(name, published)
    state = torch.load(path, map_location="cpu", weights_only=True)
    assert {key: tuple(x.shape) for key, x in state.items()} == shapes_of(name)
    model = load_authors_weights(path)
    assert type(model) is (StereoCapsNet if name == "smallNORB" else EmbeddingCapsNet)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert_holds(model, path)


def test_loads_into_a_given_model(file):
    path = file("SST2R", False)
    model = heinsen_sst(classes=2, routing=HeinsenRouting(1)).double()
    assert load_authors_weights(str(path), model) is model
    assert model.depth.dtype == torch.float64
    torch.testing.assert_close(model.depth, raw(path)["depth_emb"])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("SST2R", {"depth_emb2": torch.ones(1)}, "depth_emb2 has shape (1,) there, expected none"),
        ("smallNORB", {"routings.1.B": None}, "capsules.layers.1.bias has shape none there, expected"),
        ("SST5R", {"depth_emb": torch.ones(37, 1281)}, "depth has shape (37, 1281) there, expected (37, 1280)"),
        ("SST5R", {"depth_emb": None}, "is not from one of the author's networks, which have routings.1.W and"),
    ],
)
def test_files_that_do_not_fit(file, name, changes, message):
    assert message in error_of(load_authors_weights, edited(file(name, False), changes))


def test_other_files(tmp_path):
    assert_refuses_other_files(load_authors_weights, tmp_path, "is not from one of the author's networks")


def test_a_model_that_does_not_fit_stays_as_it_was(file):
    path = file("SST2R", False)
    without_betas = heinsen_sst(classes=2, routing=EMRouting())
    for model in (heinsen_smallnorb(), heinsen_sst(classes=5), without_betas):
        assert_stays_as_it_was(load_authors_weights, path, model, "has the weights of another network")
