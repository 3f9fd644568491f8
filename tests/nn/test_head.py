"""The heads for features of any network: their formulas, their inputs, their first passes, and that they learn."""

import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleHead,
    CapsuleLinear,
    CapsuleRegressor,
    Capsules,
    DynamicRouting,
    EfficientRouting,
    EMRouting,
    HeinsenRouting,
    HeinsenVectorRouting,
    InvertedAttentionRouting,
    RandomRouting,
    SelfRouting,
    SlotAttention,
    UniformRouting,
    VBRouting,
    VectorNormRouting,
)
from torchcaps.explain.controls import with_new_weights
from torchcaps.models.cnn import conv_features

# Every row of the README's table, with its default arguments but for the slots.
ROUTINGS = {
    "dynamic": DynamicRouting,
    "dynamic over children": lambda: DynamicRouting(softmax="children"),
    "vector norm": VectorNormRouting,
    "inverted attention": InvertedAttentionRouting,
    "em": EMRouting,
    "heinsen": HeinsenRouting,
    "self-routing": SelfRouting,
    "variational bayes": VBRouting,
    "efficient": EfficientRouting,
    "heinsen vector": HeinsenVectorRouting,
    "slot attention": lambda: SlotAttention(start="learned"),
    "uniform": UniformRouting,
    "random": RandomRouting,
}
every_routing = pytest.mark.parametrize("name", ROUTINGS)


def small(name: str, **changed) -> CapsuleHead:
    return CapsuleHead(5, 3, ROUTINGS[name](), **{"types": 4, "pose": 6} | changed).eval()


@every_routing
def test_the_formula_from_stored_numbers(name):
    """Primary capsules, their gates and the logits, written out; the layer between them has tests of its own."""
    head = small(name)
    features = torch.randn(2, 5, 3, 2)
    routing = head.capsules.layers[0].routing
    normal = (features - features.mean(1, keepdim=True)) / (features.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    conv = head.primary.pose_conv
    s = torch.einsum("oc,bchw->bhwo", conv.weight[:, :, 0, 0], normal) + conv.bias
    s = s.unflatten(-1, (4, 6)).permute(0, 3, 1, 2, 4)
    length = s.norm(dim=-1, keepdim=True)
    u = length / (1 + length**2) * s
    gates = torch.full((2, 4, 3, 2), 1 / 6)
    if routing.gives_scores:
        weight, bias = head.primary.score_conv.weight[:, :, 0, 0], head.primary.score_conv.bias
        gates = gates * (torch.einsum("tc,bchw->bthw", weight, normal) + bias[:, None, None]).sigmoid()
    children = head.primary_capsules(features)
    assert_close(children.poses, u)
    assert_close(children.scores.sigmoid(), gates)
    logits, parents, _ = head.predict(features)
    w = head.classifier.weight[0]
    expected = parents.poses @ w[:6]
    if routing.measures_presence:
        expected = expected + w[6] * parents.activations.log()
    assert_close(logits, expected)
    assert w.shape == (6 + routing.measures_presence,)


def test_a_single_logit_by_hand():
    """One feature map of one position, one type, one class: squash, then the mean vote, then the readout."""
    head = CapsuleHead(2, 2, UniformRouting(), types=1, pose=2)
    head.primary.pose_conv.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[..., None, None]
    head.primary.pose_conv.bias.data = torch.tensor([1.0, 2.0])
    head.capsules.layers[0].weight.data = torch.stack([torch.eye(2), 2 * torch.eye(2)])[None]
    head.classifier.weight.data = torch.tensor([[1.0, 2.0, 3.0]])
    # LayerNorm of (5, 3) is (1, -1). With the bias it is (2, 1), of length sqrt(5), and the squash takes sqrt(5) / 6.
    u = torch.tensor([2.0, 1.0]) * 5**0.5 / 6
    sums = [u / 2, u]  # each of two classes gets half of a vote
    poses = [s * s.norm() / (1 + s.norm() ** 2) for s in sums]
    expected = torch.stack([v @ torch.tensor([1.0, 2.0]) + 3 * v.norm().log() for v in poses])
    assert_close(head(torch.tensor([[5.0, 3.0]]))[0], expected, rtol=1e-4, atol=1e-5)  # eps of the LayerNorm


@every_routing
@pytest.mark.parametrize("parts", [None, 4])
def test_maps_tokens_and_vectors(name, parts):
    head = small(name, parts=parts)
    maps = torch.randn(2, 5, 3, 4)
    logits, capsules, _ = head.predict(maps, return_coefficients=True)
    assert logits.shape == (2, 3)
    assert capsules.poses.shape == (2, 3, 6)
    assert capsules.coefficients.shape == (2, 4 if parts else 4 * 12, 3)
    assert_close(head(maps), logits)
    assert_close(head(maps.flatten(2).transpose(1, 2)), logits)  # the same as tokens
    assert_close(head(maps.flip(2, 3)), logits)  # positions have no order
    assert_close(head(maps[:, :, 0, 0]), head(maps[:, :, :1, :1]))  # a vector is one position
    assert_close(head(1000 * maps), logits, rtol=1e-3, atol=1e-4)  # features of any scale


@every_routing
def test_padding_of_tokens_changes_nothing(name):
    head = small(name)
    tokens, mask = torch.randn(2, 4, 5), torch.tensor([[True, True, True, False], [True, False, True, True]])
    alone = torch.cat([head(x[m][None]) for x, m in zip(tokens, mask, strict=True)])
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 1e4])
    padded = torch.where(mask[..., None], tokens, garbage).requires_grad_()
    found = head(padded, mask)
    assert_close(found, alone)
    found.square().sum().backward()
    assert not padded.grad[~mask].any()
    assert padded.grad[mask].any()
    assert head(tokens, torch.zeros(2, 4, dtype=torch.bool)).isfinite().all()  # nothing but padding
    assert_close(head(tokens, torch.ones(2, 4, dtype=torch.bool)), head(tokens))


def first(routing, positions: int, classes: int = 10, kind: str = "normal") -> tuple[float, float]:
    """Return the mean length of the first class capsules, and how sharp their coefficients are: the number of
    alternatives over the effective number, 1 if all are equal."""
    lengths, sharpness = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        head = CapsuleHead(64, classes, routing)
        x = torch.randn(4, positions, 64)
        with torch.no_grad():
            capsules = head.predict(x.relu() if kind == "relu" else x, return_coefficients=True).capsules
        lengths.append(capsules.poses.norm(dim=-1).mean().item())
        dim = -1 if routing.softmax == "parents" else 1
        c = capsules.coefficients
        c = c / c.sum(dim, keepdim=True)
        effective = torch.special.entr(c).sum(dim).exp()
        sharpness.append((c.shape[dim] / effective).mean().item())
    return sum(lengths) / 3, sum(sharpness) / 3


@every_routing
@pytest.mark.parametrize("kind", ["normal", "relu"])
def test_first_lengths_and_sharpness_hold_for_any_number_of_positions(name, kind):
    torch.set_default_dtype(torch.float32)
    found = [first(ROUTINGS[name](), positions, kind=kind) for positions in (1, 16, 256)]
    for values in zip(*found, strict=True):
        assert max(values) <= 2 * min(values), found


@every_routing
@pytest.mark.parametrize("classes", [2, 26, 100])
def test_first_coefficients_are_soft_with_any_number_of_classes(name, classes):
    torch.set_default_dtype(torch.float32)
    routing = ROUTINGS[name]()
    head = CapsuleHead(64, classes, routing)
    coefficients = head.predict(torch.randn(8, 64, 4, 4), return_coefficients=True).capsules.coefficients
    uniform = 1 / coefficients.shape[-1 if routing.softmax == "parents" else 1]
    largest = coefficients.amax(-1 if routing.softmax == "parents" else 1).mean()
    assert largest < uniform + 0.3


@pytest.mark.parametrize(
    ("features", "mask", "message"),
    [
        (torch.randn(2, 4), None, r"maps \(batch, 5, height, width\), tokens .*, got \(2, 4\): make .* in_features=4$"),
        (torch.randn(2, 7, 7, 5), None, r"got \(2, 7, 7, 5\): the channels come last, give features.movedim\(-1, 1\)"),
        (
            torch.randn(2, 5, 7),
            None,
            r"the tokens come last, give features.transpose\(1, 2\), or make the head with dims=1 if these are maps "
            r"\(batch, 5, length\)$",
        ),
        (torch.randn(2, 5, 7, 8, 9), None, "make the head with dims=3 for such maps$"),
        (torch.randn(2, 6, 7, 8, 9), None, r"got \(2, 6, 7, 8, 9\)$"),
        (torch.randn(2, 45), None, "these may be flattened maps, give the maps themselves"),
        (torch.randn(2, 8, 3, 3), None, "make the head with in_features=8 if these are the channels$"),
        (torch.randn(2, 3, 8), None, "make the head with in_features=8$"),
        (torch.randn(5), None, r"a single vector needs features.unsqueeze\(0\)$"),
        (
            torch.randn(5, 3, 3),
            None,
            r": a single map needs features.unsqueeze\(0\), tokens a head with in_features=3$",
        ),
        (torch.randn(2, 3, 1, 5), None, "the channels come last"),
        (torch.randn(2, 3, 5, 1), None, r": tokens with heads of attention need features.flatten\(2\)$"),
        (torch.randn(2, 5, 0, 3), None, r"got \(2, 5, 0, 3\)$"),
        (torch.randn(2, 7, 0, 5), None, r"got \(2, 7, 0, 5\)$"),
        (torch.randn(2, 0, 5), None, r"got \(2, 0, 5\)$"),
        (torch.randn(5), None, r"got \(5,\)"),
        (torch.randn(2, 5, 3, 3), torch.ones(2, 3).bool(), "a mask must be a bool tensor for tokens alone"),
        (torch.randn(2, 3, 5), torch.ones(2, 4).bool(), r"a mask must be a bool tensor of shape \(2, 3\)"),
    ],
)
def test_wrong_features_are_one_line(features, mask, message):
    with pytest.raises(ValueError, match=message) as error:
        small("dynamic")(features.double(), mask)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dims", "size", "expected", "advice"),
    [
        (
            0,
            (2, 5, 7),
            r"tokens \(batch, tokens, 5\) or vectors \(batch, 5\)",
            "the tokens come last, give .*dims=1 if",
        ),
        (
            0,
            (2, 5, 7, 8),
            r"tokens \(batch, tokens, 5\) or vectors \(batch, 5\)",
            "make the head with dims=2 for such maps$",
        ),
        (0, (5, 3, 3), "tokens .* or vectors .*", "make the head with in_features=3$"),
        (0, (2, 6, 7, 8, 9), "tokens .* or vectors .*", r"\(2, 6, 7, 8, 9\)$"),
        (0, (5,), "tokens .* or vectors .*", r"a single vector needs features.unsqueeze\(0\)$"),
        (0, (2, 3, 8), "tokens .* or vectors .*", "make the head with in_features=8$"),
        (
            1,
            (2, 7, 5),
            r"feature maps \(batch, 5, length\)",
            r"the channels come last, give features.movedim\(-1, 1\)$",
        ),
        (1, (5, 7), r"feature maps \(batch, 5, length\)", r"a single map needs features.unsqueeze\(0\)$"),
        (1, (2, 5, 7, 8), r"feature maps \(batch, 5, length\)", "make the head with dims=2 for such maps$"),
        (1, (2, 45), r"feature maps \(batch, 5, length\)", "these may be flattened maps, give the maps themselves$"),
        (
            1,
            (2, 8, 7),
            r"feature maps \(batch, 5, length\)",
            "make the head with in_features=8 if these are the channels$",
        ),
        (1, (2, 5, 0), r"feature maps \(batch, 5, length\)", r"\(2, 5, 0\)$"),
        (2, (2, 5, 7), r"feature maps \(batch, 5, height, width\)", "make the head with dims=1 for such maps$"),
        (
            3,
            (2, 7, 8, 9, 5),
            r"feature maps \(batch, 5, depth, height, width\)",
            r"the channels come last, give features.movedim",
        ),
        (
            3,
            (5, 7, 8, 9),
            r"feature maps \(batch, 5, depth, height, width\)",
            r"a single map needs features.unsqueeze\(0\)$",
        ),
        (
            3,
            (2, 8, 7, 8, 9),
            r"feature maps \(batch, 5, depth, height, width\)",
            "make the head with in_features=8 if these are",
        ),
        (3, (2, 5, 8), r"feature maps \(batch, 5, depth, height, width\)", "make the head with dims=1 for such maps$"),
        (3, (2, 8), r"feature maps \(batch, 5, depth, height, width\)", r"\(2, 8\)$"),
    ],
)
def test_wrong_features_for_the_dims_and_advice_that_is_right(dims, size, expected, advice):
    features = torch.randn(size)
    with pytest.raises(ValueError, match=rf"^expected {expected}, got .*{advice}") as error:
        small("dynamic", dims=dims)(features)
    text = str(error.value)
    assert "\n" not in text
    changed = {key: int(value) for key, value in re.findall(r"(dims|in_features)=(\d)", text)}
    way = re.search(r"features\.[a-z]+\([-\d, ]+\)", text)
    if way:
        assert small("dynamic", dims=dims)(eval(way[0])).shape[1] == 3
    if changed and "tokens come last" not in text:
        assert CapsuleHead(**{"in_features": 5, "classes": 3, "dims": dims, **changed})(features).shape == (size[0], 3)


def test_as_many_positions_as_channels_are_never_guessed():
    """Tokens and maps of one dimension have the same shape then, and other logits."""
    head, features = small("dynamic"), torch.randn(2, 5, 5)
    says = r"^features \(2, 5, 5\) may be tokens .* or maps .*: make the head with dims=0 .* dims=1 for maps$"
    with pytest.raises(ValueError, match=says):
        head(features)
    tokens, maps = small("dynamic", dims=0), small("dynamic", dims=1)
    for other in (tokens, maps):
        other.load_state_dict(head.state_dict())
    assert_close(tokens(features), maps(features.transpose(1, 2)))
    assert not torch.allclose(tokens(features), maps(features))
    assert_close(head(features, torch.ones(2, 5).bool()), tokens(features))  # only tokens have a mask
    assert head(features[:, :4]).shape == (2, 3)


@every_routing
def test_lines_and_volumes_are_their_positions(name):
    """Positions have no order in a head for classes: any map gives the logits of its flattened positions."""
    positions = torch.randn(2, 5, 24)
    heads = {dims: small(name, dims=dims, parts=4) for dims in (0, 1, 2, 3)}
    for head in heads.values():
        head.load_state_dict(heads[0].state_dict())
    expected = heads[0](positions.transpose(1, 2))
    for dims, sides in ((1, (24,)), (2, (4, 6)), (3, (2, 3, 4))):
        logits, capsules, _ = heads[dims].predict(positions.unflatten(2, sides), return_coefficients=True)
        assert_close(logits, expected)
        assert capsules.coefficients.shape == (2, 4, 3)
        with pytest.raises(ValueError, match="a mask must be a bool tensor for tokens alone"):
            heads[dims](positions.unflatten(2, sides), torch.ones(2, 24).bool())


def test_what_an_lstm_returns():
    """The advice for a PackedSequence gives the same logits as each sequence alone."""
    lstm, head = nn.LSTM(3, 5, batch_first=True), small("dynamic")
    sequences = [torch.randn(length, 3) for length in (2, 4, 3)]
    packed, _ = lstm(nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False))
    with pytest.raises(TypeError) as error:
        head(packed)
    names = {"packed": packed, "torch": torch, "pad_packed_sequence": nn.utils.rnn.pad_packed_sequence}
    said = r".*got a PackedSequence: give x of (.*), with the mask (.*), to a layer as torchcaps.Capsules\(x, mask\)"
    given, mask = re.fullmatch(said, str(error.value)).groups()
    exec(given, names)
    alone = [head(lstm(sequence.unsqueeze(0))[0])[0] for sequence in sequences]
    assert_close(head(names["x"], eval(mask, names)), torch.stack(alone))
    layer = CapsuleLinear(None, 2, 5, 4, DynamicRouting())
    with pytest.raises(TypeError, match="got a PackedSequence: give x of x, lengths = pad_packed"):
        layer(packed)
    assert layer(Capsules(names["x"], eval(mask, names))).poses.shape == (3, 2, 4)


def test_heads_of_attention_before_the_tokens():
    head = CapsuleHead(6, 3)
    with pytest.raises(ValueError, match=r"need features.transpose\(1, 2\).flatten\(2\)$"):
        head(torch.randn(2, 2, 7, 3))
    assert head(torch.randn(2, 2, 7, 3).transpose(1, 2).flatten(2)).shape == (2, 3)


def test_a_mask_of_numbers_is_one_line():
    """Integers are those of a tokenizer; 0.0 may be a token, in a mask that is added to logits, or padding."""
    for mask, advice in (
        (torch.ones(2, 3).long(), r"got torch.int64: use mask.bool\(\) if 1 is a token and 0 is padding$"),
        (torch.ones(2, 3).byte(), r"got torch.uint8: use mask.bool\(\) if"),
        (torch.zeros(2, 3), "got torch.float64: give True and False themselves$"),
    ):
        with pytest.raises(TypeError, match=f"^a mask must be bool, True for a token and False for padding, {advice}"):
            small("dynamic")(torch.randn(2, 3, 5).double(), mask)


@every_routing
def test_every_parameter_learns(name):
    head = small(name, parts=4).train()
    loss = F.binary_cross_entropy_with_logits(head(torch.randn(6, 5, 2, 2)), torch.rand(6, 3))
    loss.backward()
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


def test_compiled_and_exported_with_tokens_of_any_number():
    torch.set_default_dtype(torch.float32)
    head = small("em")
    tokens, mask = torch.randn(2, 4, 5), torch.tensor([[True] * 4, [True, False, True, True]])
    expected = head(tokens, mask)
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    assert_close(compiled(tokens, mask), expected)
    any_number = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(head, (tokens, mask), dynamic_shapes=({1: any_number}, {1: any_number})).module()
    more = torch.randn(2, 7, 5)
    assert_close(program(more, torch.ones(2, 7).bool()), head(more))


@pytest.mark.slow
@every_routing
@pytest.mark.parametrize("seed", range(3))
def test_digits_are_learned_in_a_plain_loop(name, seed):
    """At least 97 % of the digits behind two convolutions, within 1,500 steps of Adam with its defaults."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    convolutions += [nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    network = nn.Sequential(*convolutions, CapsuleHead(64, 10, ROUTINGS[name]()))
    optimizer = torch.optim.Adam(network.parameters())
    best = 0.0
    for step in range(1, 1501):
        batch = torch.tensor(train)[torch.randint(len(train), (64,))]
        loss = F.cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 300 == 0:
            network.eval()
            with torch.no_grad():
                best = max(best, (network(images[test]).argmax(1) == labels[test]).float().mean().item())
            network.train()
    assert best >= 0.97


def test_sizes_by_default():
    head = CapsuleHead(64, 10)
    assert "64, classes=10" in repr(head)
    assert head.primary.pose_conv.weight.shape == (16 * 16, 64, 1, 1)
    for part in reversed(list(head.modules())):  # the order that the docs ask for
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for fresh in (head, with_new_weights(head)):
        assert fresh.primary.pose_conv.bias.std().item() == pytest.approx(0.7, rel=0.2)


def test_large_scores_have_finite_gradients():
    torch.set_default_dtype(torch.float32)
    head = CapsuleHead(5, 3, EMRouting())
    head.primary.score_conv.bias.data.fill_(200.0)
    head(torch.randn(4, 5)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in head.parameters())


# ---------------------------------------------------------------- numbers


def regressor(name: str = "heinsen vector", **changed) -> CapsuleRegressor:
    return CapsuleRegressor(5, 3, ROUTINGS[name](), **{"types": 4, "pose": 6} | changed).eval()


@every_routing
@pytest.mark.parametrize("sides", [(7,), (3, 2), (2, 3, 4)])
def test_the_formula_of_numbers(name, sides):
    """Features and places, primary capsules, gates and numbers, written out for each position."""
    head, features = regressor(name, dims=len(sides)), torch.randn(2, 5, *sides)
    head.standardize(torch.randn(9, 3) * torch.tensor([1.0, 50.0, 1e-3]) + torch.tensor([0.0, 2000.0, 7.0]))
    positions = features.flatten(2)
    mean, variance = positions.mean(1, keepdim=True), positions.var(1, unbiased=False, keepdim=True)
    normal = (positions - mean) / (variance + 1e-5).sqrt()
    centers = torch.tensor(
        [
            [(2 * i + 1) / n - 1 for i, n in zip(place, sides, strict=True)]
            for place in itertools.product(*map(range, sides))
        ]
    )
    seen = torch.cat([normal, centers.T.expand(2, -1, -1)], dim=1)
    u = torch.einsum("oc,bcp->bpo", head.primary.pose_conv.weight[:, :, 0, 0], seen) + head.primary.pose_conv.bias
    children = head.primary_capsules(features)
    assert_close(children.poses.flatten(2, 3), u.unflatten(-1, (4, 6)).transpose(1, 2))
    gates = torch.full((2, 4, len(centers)), 1 / len(centers))
    if head.capsules.layers[0].routing.gives_scores:
        weight, bias = head.primary.score_conv.weight[:, :, 0, 0], head.primary.score_conv.bias
        gates = gates * (torch.einsum("tc,bcp->btp", weight, seen) + bias[:, None]).sigmoid()
    assert_close(children.scores.sigmoid().flatten(2), gates)
    numbers, parents, _ = head.predict(features, return_coefficients=True)
    for k in range(3):
        expected = parents.poses[:, k] @ head.weight[k] + head.bias[k]
        assert_close(numbers[:, k], head.mean[k] + head.deviation[k] * expected)
    assert parents.coefficients.shape == (2, 4 * len(centers), 3)
    assert_close(head(features), numbers)
    assert_close(head(1000 * features), numbers, rtol=1e-3, atol=1e-3)


def test_places_on_a_small_map_by_hand():
    places = CapsuleRegressor(5, 1)._places(torch.Size((1, 4)), torch.zeros(2, 5, 1, 4))
    assert_close(places, torch.tensor([[[[0.0] * 4], [[-0.75, -0.25, 0.25, 0.75]]]]))


@pytest.mark.parametrize("dims", [None, 0])
def test_numbers_of_tokens_and_vectors(dims):
    """They have no places: their order changes nothing, and neither does padding."""
    head = regressor(dims=dims)
    tokens, mask = torch.randn(2, 4, 5), torch.tensor([[True, True, True, False], [True, True, True, True]])
    assert_close(head(tokens.flip(1)), head(tokens))
    padded = tokens.where(mask[..., None], torch.nan)
    assert_close(head(padded, mask)[0], head(tokens[:1, :3])[0])
    assert_close(head(tokens[:, 0]), head(tokens[:, :1]))
    if dims is None:
        maps = torch.randn(2, 5, 3, 4)
        assert not torch.allclose(head(maps.flip(3)), head(maps))


def test_numbers_without_coordinates_do_not_depend_on_places():
    head, maps = regressor(coordinates=False), torch.randn(2, 5, 3, 4)
    assert head.primary.pose_conv.weight.shape[1] == 5
    assert_close(head(maps.flip(3)), head(maps))


def test_standardize():
    head, targets = regressor("em"), torch.tensor([[1.0, 10.0, -1.0], [3.0, 30.0, -1.5], [2.0, 20.0, 0.5]])
    x = torch.randn(2, 5, 3, 3)
    before = head(x)
    assert_close(head.state_dict()["mean"], torch.zeros(3))
    assert_close(head.state_dict()["deviation"], torch.ones(3))
    head.standardize(targets)
    assert_close(head.mean, torch.tensor([2.0, 20.0, -2 / 3]))
    assert_close(head.deviation, torch.tensor([2 / 3, 200 / 3, 13 / 18]).sqrt())
    assert_close(head(x), head.mean + head.deviation * before)
    other = regressor("em")
    other.load_state_dict(head.state_dict())
    assert_close(other(x), head(x))
    assert_close(copy.deepcopy(head)(x), head(x))
    head.reset_parameters()
    assert_close(head.mean, torch.zeros(3))
    assert_close(head.deviation, torch.ones(3))
    low = CapsuleRegressor(5, 1)
    low.standardize(torch.tensor([[2047.0], [2048.0], [2048.0]], dtype=torch.float16))  # the mean has more digits
    assert_close(low.mean, torch.tensor([2047 + 2 / 3]))
    assert_close(low.deviation, torch.tensor([2 / 9]).sqrt())


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (torch.zeros(4), ValueError, r"^expected targets of shape \(samples, 3\), got \(4,\)$"),
        (torch.zeros(4, 2), ValueError, r"^expected targets of shape \(samples, 3\), got \(4, 2\)$"),
        (torch.zeros(0, 3), ValueError, r"^expected targets of shape \(samples, 3\), got \(0, 3\)$"),
        (torch.zeros(4, 3).long(), TypeError, "^targets must be a floating-point tensor, got a tensor"),
        ([[1.0, 2.0, 3.0]], TypeError, "^targets must be a floating-point tensor, got"),
        (
            torch.tensor([[0.0, 1, 2], [1, 1, 3]]),
            ValueError,
            "^the targets of number 1 are all 1: there is nothing to learn",
        ),
        (
            torch.tensor([[0.0, 1, 2], [1, 2, torch.nan]]),
            ValueError,
            "^the targets of number 2 are not all finite: leave out",
        ),
        (torch.tensor([[torch.inf, 1, 2], [1, 2, 3]]), ValueError, "^the targets of number 0 are not all finite"),
    ],
)
def test_targets_that_cannot_be_standardized(targets, error, message):
    head = regressor()
    with pytest.raises(error, match=message) as raised:
        head.standardize(targets)
    assert "\n" not in str(raised.value)
    assert_close(head.deviation, torch.ones(3))


@every_routing
@pytest.mark.parametrize("numbers", [1, 3])
def test_every_parameter_learns_numbers(name, numbers):
    head = CapsuleRegressor(5, numbers, ROUTINGS[name](), types=4, pose=6).train()
    head.standardize(100 * torch.randn(20, numbers))
    (head(torch.randn(6, 5, 2, 3)) - 100 * torch.randn(6, numbers)).square().mean().backward()
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        idle = numbers == 1 and ".routing." in key  # a softmax over a single parent is constant
        assert parameter.grad.any() or idle, key


@pytest.mark.parametrize(
    ("name", "dims", "sides", "more"),
    [
        ("heinsen vector", 1, (9,), (14,)),
        ("em", 2, (4, 5), (6, 3)),
        ("heinsen vector", 3, (2, 3, 4), (3, 3, 5)),
    ],
)
def test_numbers_compiled_and_exported_for_other_sizes(name, dims, sides, more):
    torch.set_default_dtype(torch.float32)
    head, x, other = regressor(name, dims=dims), torch.randn(2, 5, *sides), torch.randn(3, 5, *more)
    assert_close(torch.compile(head, fullgraph=True, backend="eager")(x), head(x))
    sizes = {0: torch.export.Dim("batch"), **{2 + k: torch.export.Dim(f"side{k}", min=2, max=99) for k in range(dims)}}
    program = torch.export.export(head, (x,), dynamic_shapes=(sizes,)).module()
    assert_close(program(other), head(other))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_places_are_learned_as_well_as_by_a_layer_on_all_positions(seed):
    """A blob's place, behind three convolutions: at most 1.5 times the error of flatten and linear."""
    torch.set_default_dtype(torch.float32)
    targets = 4 + 16 * torch.rand(1500, 2, generator=torch.Generator().manual_seed(0))
    x, y = targets.view(-1, 2, 1, 1).unbind(1)
    pixels = torch.arange(24.0)
    images = (-((pixels - x) ** 2 + (pixels.view(-1, 1) - y) ** 2) / 8).exp().unsqueeze(1)
    errors = []
    for end in (nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 2)), CapsuleRegressor(32, 2)):
        torch.manual_seed(seed)
        network = nn.Sequential(conv_features(1, 32, [2, 2, 1], 3), end)
        if isinstance(end, CapsuleRegressor):
            end.standardize(targets[:1200])
        mean, scale = (0, 1) if isinstance(end, CapsuleRegressor) else (targets.mean(0), targets.std(0))
        optimizer = torch.optim.Adam(network.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 400)  # the last errors hardly change
        for _ in range(400):
            batch = torch.randint(1200, (64,))
            loss = (((mean + scale * network(images[batch])) - targets[batch]) / 4.6).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            errors.append((mean + scale * network(images[1200:]) - targets[1200:]).square().mean().sqrt().item())
    assert errors[1] <= 1.5 * errors[0], errors
