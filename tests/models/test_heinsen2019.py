"""The networks of Heinsen 2019 and the author's weights, against the paper's algorithm on the weights as published."""

import math
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from torchcaps import (
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    VectorNormRouting,
    create_model,
)
from torchcaps.models import EmbeddingCapsNet, StereoCapsNet, heinsen_smallnorb, heinsen_sst, load_authors_weights
from torchcaps.models.heinsen2019 import with_coordinates

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
    """Keys and shapes as published."""
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
    """A state dict with the keys and shapes of a published one, every value its own."""
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


# The networks once more, from the paper and in plain operations


def route(w, k, gates, poses):
    """Algorithm 1 on gates f(a_i), `(batch, children)`, and poses, `(batch, children, rows, features)`."""
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
    # Children in another order than the library's, place by place: it must not matter.
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
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    loaded = [x for key, x in state.items() if not key.endswith("CONST_one")]
    own = list(model.state_dict().values())
    # In whatever order: what is in the file is in the network, once, and nothing else is.
    assert sorted((x.shape, x.double().sum().item()) for x in own) == sorted(
        (x.shape, x.double().sum().item()) for x in loaded
    )


def test_loads_into_a_given_model(file):
    path = file("SST2R", False)
    model = heinsen_sst(classes=2, routing=HeinsenRouting(1)).double()
    assert load_authors_weights(str(path), model) is model
    assert model.depth.dtype == torch.float64
    torch.testing.assert_close(model.depth, raw(path)["depth_emb"])


def error_of(path, *model):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_authors_weights(path, *model)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def edited(path, **changes):
    """The file with some keys changed; None takes one away."""
    state = torch.load(path, weights_only=True) | {key.replace("__", "."): x for key, x in changes.items()}
    torch.save({key: x for key, x in state.items() if x is not None}, path)
    return path


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("SST2R", {"depth_emb2": torch.ones(1)}, "does not fit EmbeddingCapsNet: it has depth_emb2, which that does"),
        ("SST2R", {"detect_parts__2__bias": None}, "does not fit EmbeddingCapsNet: it has no detect_parts.2.bias;"),
        ("SST2R", {"routings__0__W": None, "routings__0__B": None}, "it has no routings.0.B and 1 more;"),
        ("smallNORB", {"routings__1__CONST_one": None}, "it has no routings.1.CONST_one"),
        ("smallNORB", {"compute_a__0__running_var": None}, "it has no compute_a.0.running_var"),
        ("smallNORB", {"depth_emb": torch.ones(37, 1280)}, "it has depth_emb, which that does not"),
        (
            "SST5R",
            {"depth_emb": torch.ones(37, 1281)},
            r"CapsNet: depth_emb has shape \(37, 1281\), expected \(37, 1280\);",
        ),
        ("SST5R", {"routings__1__B": torch.ones(64, 4, 1, 2)}, r"routings.1.B has shape .*, expected \(64, 5, 1, 2\)"),
        ("SST5R", {"routings__0__CONST_one": torch.tensor(2.0)}, "routings.0.CONST_one is 2.0, expected 1"),
        ("SST5R", {"routings__0__CONST_one": torch.ones(1)}, r"has shape \(1,\), expected \(\)"),
        ("SST5R", {"depth_emb": None}, "is of no network of the author's, which have routings.1.W and"),
        ("SST5R", {"routings__1__W": None}, "is of no network of the author's"),
        ("SST5R", {"routings__1__W": torch.ones(3)}, "is of no network of the author's"),
        ("SST5R", {"depth_emb": "a string"}, "is not a state dict, keys and tensors: give a file of github.com/"),
    ],
)
def test_files_that_do_not_fit(file, name, changes, message):
    path = edited(file(name, False), **changes)
    with pytest.raises(ValueError, match=message):
        load_authors_weights(path)
    error_of(path)


class Opened(Exception):
    pass


class Trap:
    def __reduce__(self):
        return Opened, ()


def test_files_that_are_no_state_dicts(tmp_path):
    assert "no file" in error_of(tmp_path / "absent.pt")
    assert "no file" in error_of(tmp_path)
    path = tmp_path / "x.pt"
    for content in (b"", b"hello", bytes(range(256)), pickle.dumps(Trap())):
        path.write_bytes(content)
        assert "cannot be read safely as a state dict" in error_of(path)
    for value in ([torch.ones(1)], torch.ones(1), {"routings.1.W": 1}, {1: torch.ones(1)}):
        torch.save(value, path)
        assert "is not a state dict, keys and tensors" in error_of(path)
    torch.save(nn.Linear(1, 1).state_dict(), path)
    assert "is of no network of the author's" in error_of(path)
    torch.save(Trap(), path)
    assert "cannot be read safely as a state dict (UnpicklingError)" in error_of(path)


def test_a_model_that_does_not_fit_stays_as_it_was(file):
    path = file("SST2R", False)
    one_beta = heinsen_sst(classes=2, routing=HeinsenRouting(single_beta=True))
    for model in (heinsen_smallnorb(), heinsen_sst(classes=5), one_beta):
        before = {key: x.clone() for key, x in model.state_dict().items()}
        assert f"does not fit {type(model).__name__}" in error_of(path, model)
        assert model.training
        for key, x in model.state_dict().items():
            assert torch.equal(x, before[key])


# The networks


def count(name, **arguments):
    with torch.device("meta"):
        return sum(p.numel() for p in create_model(name, **arguments).parameters())


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        ("heinsen_smallnorb", {}, 271_688),
        ("heinsen_sst", {}, 140_480),
        ("heinsen_sst", {"classes": 2}, 138_944),
        # Of MiniLM: 30 * 1280 + 7 * 384 embeddings less, 64 * 896 weights less.
        ("heinsen_sst", {"layers": 7, "width": 384}, 140_480 - 37 * 1280 + 7 * 384 - 64 * (1280 - 384)),
    ],
)
def test_parameter_counts(name, arguments, parameters):
    assert count(name, **arguments) == parameters


def networks(**arguments):
    """Small ones and their input, with values everywhere: as they start, all betas and all scores are zero."""
    torch.manual_seed(0)
    images = heinsen_smallnorb(classes=3, parts=4, channels=6, **arguments), (torch.rand(2, 2, 45, 50),)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    words = heinsen_sst(3, layers=2, width=7, features=5, pose=3, parts=4, **arguments), (torch.randn(2, 4, 2, 7), mask)
    for model, _ in (images, words):
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
    return images, words


def test_shapes_and_gradients():
    for model, inputs in networks():
        prediction = model(*inputs, return_coefficients=True)
        capsules = prediction.capsules
        assert prediction.scores.shape == (2, 3)
        assert torch.equal(prediction.scores, capsules.scores)
        assert capsules.poses.shape[2:] == ((4, 4) if len(inputs) == 1 else (3,))
        torch.testing.assert_close(capsules.coefficients.sum(2), torch.ones(2, 4))
        F.cross_entropy(prediction.scores, torch.tensor([0, 2])).backward()
        for name, p in model.named_parameters():
            assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "routing",
    [
        HeinsenRouting(2, model="kmeans"),
        EMRouting(2),
        DynamicRouting(2),
        InvertedAttentionRouting(2),
        InvertedAttentionRouting(2, activations=True),
        VectorNormRouting(2),
    ],
    ids=str,
)
def test_other_routings(routing):
    for model, inputs in networks(routing=routing):
        prediction = model(*inputs)
        assert prediction.scores.shape == (2, 3)
        assert prediction.scores.isfinite().all()
        prediction.scores.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())  # or several devices could not train it together
        if not routing.gives_scores:  # classes share a classifier
            poses = prediction.capsules.poses.flatten(2)
            torch.testing.assert_close(prediction.scores, model.classifier(poses).squeeze(-1))


def test_first_values():
    torch.manual_seed(0)
    images, words = heinsen_smallnorb(), heinsen_sst()
    assert not words.depth.any()
    for model in (images, words):
        for layer, d in zip(model.capsules.layers, (4, 4) if model is images else (64, 2), strict=True):
            assert not any(p.any() for p in (layer.bias, *layer.routing.parameters()))
            assert layer.weight.std().item() == pytest.approx(1 / d, rel=0.1)
    for layer in (*images.features[4::3], words.detector[0]):
        fan_in = layer.weight[0].numel()
        assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)
        assert not layer.bias.any()


def test_coordinates():
    images = torch.rand(2, 3, 3, 5)
    x = with_coordinates(images)
    assert torch.equal(x[:, :3], images)
    assert x[1, 3].tolist() == [[-1] * 5, [0] * 5, [1] * 5]
    assert x[0, 4].tolist() == [[-1, -0.5, 0, 0.5, 1]] * 3
    assert with_coordinates(torch.zeros(1, 1, 1, 1, dtype=torch.float64)).flatten().tolist() == [0, -1, -1]
    torch.testing.assert_close(with_coordinates(torch.rand(1, 2, 96, 1))[0, 2, :, 0], torch.linspace(-1, 1, 96))


def test_the_papers_children():
    model = heinsen_smallnorb().eval()
    children = model.primary_capsules(torch.rand(1, 2, 96, 96))
    assert children.poses.shape == (1, 64, 9, 9, 4, 4)  # 5184
    assert children.scores.shape == (1, 64, 9, 9)


# Sentences


@pytest.mark.parametrize("place", ["right", "left", "between"])
@pytest.mark.parametrize("garbage", [1e3, float("nan"), float("inf")])
def test_padding_changes_nothing(place, garbage):
    _, (model, (embeddings, mask)) = networks()
    model.double()
    embeddings = embeddings.double()
    places = {"right": slice(0, 4), "left": slice(4, 8), "between": slice(1, 8, 2)}[place]
    padded = garbage * torch.randn(2, 8, 2, 7, dtype=torch.float64)
    padded[:, places] = embeddings
    padded_mask = torch.zeros(2, 8, dtype=torch.bool)
    padded_mask[:, places] = mask

    results = []
    for x, m in ((embeddings, mask), (padded, padded_mask)):
        x.requires_grad_()
        model.zero_grad()
        prediction = model(x, m)
        (prediction.scores.square().sum() + prediction.capsules.poses.pow(3).sum()).backward()
        results.append((*prediction.capsules[:3], *(p.grad.clone() for p in model.parameters())))
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded.grad[:, places], embeddings.grad, rtol=1e-12, atol=1e-12)
    assert not padded.grad[~padded_mask].any()
    # The same sentence alone, and without a mask.
    torch.testing.assert_close(model(embeddings[:1, :3]).scores, results[1][1][:1], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_masks():
    _, (model, (embeddings, mask)) = networks()
    expected = model(embeddings, mask)
    for other in (mask.long(), mask.float(), mask.double(), mask.half()):
        torch.testing.assert_close(model(embeddings, other).scores, expected.scores, rtol=0, atol=0)
    torch.testing.assert_close(model(embeddings).scores, model(embeddings, torch.ones(2, 4)).scores)
    assert not torch.allclose(model(embeddings).scores[0], expected.scores[0])
    scores = model.primary_capsules(embeddings, mask).scores
    assert scores.tolist() == [[math.inf] * 6 + [-math.inf] * 2, [math.inf] * 8]
    nothing = model(embeddings, torch.zeros(2, 4)).scores  # what no children make of it
    assert nothing.isfinite().all()
    torch.testing.assert_close(nothing[0], nothing[1])
    assert model(embeddings[:0], mask[:0]).scores.shape == (0, 3)
    for bad in (-0.1, 1.1):
        assert model(embeddings, torch.full((2, 4), bad)).scores.isnan().all()


@torch.no_grad()
def test_soft_masks():
    _, (model, (embeddings, _)) = networks()
    model.double()
    embeddings = embeddings.double()
    mask = torch.tensor([[1, 0.5, 0.01, 0], [0.9, 0.8, 0.3, 1]], dtype=torch.float64)
    children = model.primary_capsules(embeddings, mask)
    torch.testing.assert_close(children.scores.sigmoid(), mask.repeat_interleave(2, dim=1))
    # A token that is there by 0.3 and again by 0.7 of its mask is there by all of it.
    twice = model(torch.cat([embeddings, embeddings], 1), torch.cat([0.3 * mask, 0.7 * mask], 1))
    torch.testing.assert_close(twice.scores, model(embeddings, mask).scores, rtol=1e-10, atol=1e-10)


def test_depths_are_told_apart_and_tokens_are_not():
    _, (model, (embeddings, _)) = networks()
    scores = model(embeddings).scores
    torch.testing.assert_close(model(embeddings.flip(1)).scores, scores)
    assert not torch.allclose(model(embeddings.flip(2)).scores, scores)


def test_embeddings_in_half_precision():
    _, (model, (embeddings, mask)) = networks()
    half = embeddings.half()
    torch.testing.assert_close(model(half, mask).scores, model(half.float(), mask).scores)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(half, mask).scores
    torch.testing.assert_close(scores.float(), model(half, mask).scores, rtol=0.05, atol=0.05)


# Compilation, and what is not taken


def test_compile():
    for model, inputs in networks():
        model.eval()
        # The operators' own tests compile them for gradients too.
        compiled = torch.compile(model, fullgraph=True, backend="eager")(*inputs)
        torch.testing.assert_close(compiled.scores, model(*inputs).scores)


@pytest.mark.slow
def test_export_takes_any_batch_size_and_length():
    (images, (x,)), (words, (embeddings, mask)) = networks()
    images.eval()
    sizes = {0: Dim("batch"), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    exported = torch.export.export(images, (x,), dynamic_shapes=(sizes,)).module()
    for size in ((53, 71), (96, 96), (44, 43)):
        x = torch.rand(3, 2, *size)
        torch.testing.assert_close(exported(x).scores, images(x).scores)
    sizes = {0: Dim("batch"), 1: Dim("tokens")}
    exported = torch.export.export(words, (embeddings, mask), dynamic_shapes=(sizes, sizes)).module()
    for tokens in (3, 9):
        embeddings, mask = torch.randn(3, tokens, 2, 7), torch.rand(3, tokens) > 0.3
        torch.testing.assert_close(exported(embeddings, mask).scores, words(embeddings, mask).scores)


def test_bad_input():
    (images, (x,)), (words, (embeddings, mask)) = networks()
    message = r"expected images of shape \(batch, 2, height, width\), height and width at least 29, got "
    for bad, shape in (
        (x[:, :1], r"\(2, 1, 45, 50\)"),
        (x[0], r"\(2, 45, 50\)"),
        (x[..., :28], r"\(2, 2, 45, 28\)"),
    ):
        with pytest.raises(ValueError, match=message + shape):
            images(bad)
    assert images.eval()(x[..., :29, :29]).scores.shape == (2, 3)
    for bad, shape in ((embeddings[0], r"\(4, 2, 7\)"), (embeddings.mT, r"\(2, 4, 7, 2\)")):
        with pytest.raises(ValueError, match=r"expected embeddings of shape \(batch, tokens, 2, 7\), .*got " + shape):
            words(bad, mask)
    for bad, shape in ((mask[0], r"\(4,\)"), (mask.T, r"\(4, 2\)"), (mask[..., None], r"\(2, 4, 1\)")):
        with pytest.raises(ValueError, match=r"expected a mask of shape \(batch, tokens\) = \(2, 4\), got " + shape):
            words(embeddings, bad)


# What capsules are measured against


def test_the_mean_of_embeddings():
    torch.manual_seed(0)
    network = create_model("mean_pooled_sst", classes=3, layers=2, width=5).double()
    embeddings = torch.randn(3, 4, 2, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0.5, 0, 0]])
    expected = [embeddings[0].mean(0), embeddings[1, :2].mean(0), (2 * embeddings[2, 0] + embeddings[2, 1]) / 3]
    expected = network.classifier(torch.stack(expected).flatten(1))
    embeddings[mask == 0] = torch.nan
    torch.testing.assert_close(network(embeddings, mask).scores, expected)
    torch.testing.assert_close(network(embeddings[:1]).scores, expected[:1])
    torch.testing.assert_close(network(embeddings[1:], mask[1:] * 0).scores, network.classifier.bias.expand(2, 3))
    network(embeddings, mask).scores.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    assert network(embeddings.half(), mask.half()).scores.dtype == torch.float64
    half, large = network.half(), torch.full((1, 30, 2, 5), 3000.0, dtype=torch.float16)
    torch.testing.assert_close(half(large, torch.ones(1, 30)).scores, half(large).scores, rtol=1e-2, atol=1)
    network.double()
    with pytest.raises(ValueError, match="layers and width those of the encoder"):
        network(embeddings[:, :, :1])


def test_the_average_of_places():
    torch.manual_seed(0)
    network = create_model("average_pooled_smallnorb", channels=4).eval()
    images = torch.rand(2, 2, 40, 50)
    norm, _, _, linear = network.classifier
    maps = norm(network.features(with_coordinates(images)))
    assert maps.shape == (2, 4, 2, 3)
    torch.testing.assert_close(network(images).scores, linear(maps.mean((2, 3))))
    with pytest.raises(ValueError, match="height and width at least 29"):
        network(images[..., :20])
    of_capsules = heinsen_smallnorb(channels=4).features
    assert [p.shape for p in network.features.parameters()] == [p.shape for p in of_capsules.parameters()]
