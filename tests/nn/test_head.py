"""The head for features of any network: its formula, its inputs, its first passes, and that it learns."""

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
        (torch.randn(2, 5, 7), None, r"the tokens come last, give features.transpose\(1, 2\)"),
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
