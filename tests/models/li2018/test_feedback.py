"""Feedback agreement: one unit step by step, the layers it attaches to, and that the network stays unchanged."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from torchcaps import CapsuleConv2d, Capsules, DynamicRouting, FeedbackAgreement, Prediction, create_model
from torchcaps.functional import sinkhorn_divergence
from torchcaps.models.li2018 import AgreementUnit, MapShape
from torchcaps.nn import CapsuleLinear, PrimaryCapsules

PAIR = [("lower", "higher")]


class Net(nn.Module):
    """Network of a stem, a lower and a higher layer, and a classifier."""

    def __init__(self, lower: nn.Module, higher: nn.Module, stem: nn.Module | None = None):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1) if stem is None else stem
        self.lower, self.higher = lower, higher
        self.classifier = nn.LazyLinear(5)
        self(torch.zeros(2, 3, 8, 8))

    def forward(self, images):
        x = self.higher(self.lower(self.stem(images)))
        x = x.poses if isinstance(x, Capsules) else x
        return self.classifier(x.flatten(1))


def plain(stride=2, channels=8) -> Net:
    block = nn.Sequential(nn.Conv2d(channels, 6, 3, stride, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    return Net(nn.Sequential(nn.Conv2d(4, channels, 3, padding=1), nn.ReLU()), block)


def capsules(types=3, pose=2) -> Net:
    """3 types of 4 features on 8x8, then `types` types of `pose` features on 4x4."""
    higher = CapsuleConv2d(3, types, 4, pose, kernel_size=3, stride=2, padding=1, routing=DynamicRouting(2))
    return Net(PrimaryCapsules(4, 3, 4), higher)


def images(batch=6):
    return torch.rand(batch, 3, 8, 8)


def attach(model, pairs=PAIR, **options) -> FeedbackAgreement:
    return FeedbackAgreement(model, pairs, (3, 8, 8), **options)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# One unit


def batch_norm(x, module):
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt() * module.weight.view(-1, 1, 1) + module.bias.view(-1, 1, 1)


def transported(x, y, cost, eps=1.0, iterations=10):
    """W(x, y), computed without logarithms."""
    c = torch.stack(
        [torch.stack([1 - F.cosine_similarity(a, b, 0) if cost == "cosine" else (a - b).norm() for b in y]) for a in x]
    )
    k = (-c.detach() / eps).exp()
    v = torch.full((len(y),), 1 / len(y))
    for _ in range(iterations):
        u = 1 / len(x) / (k @ v)
        v = 1 / len(y) / (k.T @ u)
    return (u[:, None] * k * v * c).sum()


@pytest.mark.parametrize("cost", ["cosine", "l2"])
@pytest.mark.parametrize("debias", [False, True])
def test_capsules_step_by_step(debias, cost):
    """From 3 types of 2 features on 4x4 to 3 types of 4 features on 8x8, written out."""
    model, x = capsules(), images()
    feedback = attach(model, cost=cost, debias=debias, weight=0.5)
    (unit,) = feedback.units
    for parameter in unit.parameters():
        nn.init.normal_(parameter, mean=0.3, std=0.5)
    prediction, divergence = feedback(x)
    assert_close(prediction, model(x))

    children = model.lower(model.stem(x))
    y = children.poses.permute(0, 1, 4, 2, 3).reshape(6, 12, 8, 8)
    z = model.higher(children).poses.permute(0, 1, 4, 2, 3)  # (batch, types, features, rows, columns)
    conv, norm, _ = unit.generator
    generated = []
    for t in range(3):
        weight = conv.weight[2 * t : 2 * t + 2]
        generated.append(F.conv_transpose2d(z[:, t], weight, stride=2, padding=1, output_padding=1))
    generated = batch_norm(torch.cat(generated, 1), norm).relu().reshape(6, 3, 4, 8, 8)
    length = generated.square().sum(2, keepdim=True).sqrt()
    generated = (generated * length / (1 + length**2)).reshape(6, 12, 8, 8)

    def critic(maps):
        for conv, norm in ((unit.critic[0], unit.critic[1]), (unit.critic[3], unit.critic[4])):
            maps = batch_norm(F.conv2d(maps, conv.weight, stride=2, padding=1), norm).relu()
        return maps.reshape(6, 4)

    a, b = critic(generated), critic(y)
    expected = transported(a, b, cost)
    if debias:
        expected = 2 * expected - transported(a, a, cost) - transported(b, b, cost)
    assert divergence.item() > 0.01
    assert_close(divergence, 0.5 * expected)
    learned = [*model.stem.parameters(), *model.lower.parameters(), *model.higher.parameters(), *unit.parameters()]
    ours, theirs = (torch.autograd.grad(value, learned) for value in (divergence, 0.5 * expected))
    assert all(g.any() for g in ours)
    assert_close(ours, theirs)


# The layers of a pair


def flat(types=None) -> nn.Module:
    class Flat(nn.Module):
        def forward(self, x):
            x = x.poses if isinstance(x, Capsules) else x
            x = x.flatten(1)[:, :24]
            return x if types is None else Capsules(x.unflatten(1, (types, -1)))

    return Flat()


class Rearranged(nn.Module):
    """Layer that returns a map as capsules on a grid, with poses of any shape, wrapped or as a plain tensor."""

    def __init__(self, types: int, pose: tuple[int, ...], wraps: bool = False):
        super().__init__()
        self.types, self.pose, self.wraps = types, pose, wraps

    def forward(self, x):
        poses = x.unflatten(1, (self.types, -1)).movedim(2, -1).unflatten(-1, self.pose)
        return Capsules(poses, pose_dims=len(self.pose)) if self.wraps else poses


def halved() -> nn.Module:
    return nn.Conv2d(4, 12, 3, 2, padding=1)


@pytest.mark.parametrize(
    ("make", "lower", "higher", "groups"),
    [
        (plain, (8, 8, 8), (6, 4, 4), 1),
        (lambda: plain(stride=1), (8, 8, 8), (6, 8, 8), 1),
        (capsules, (12, 8, 8, 3), (6, 4, 4, 3), 3),
        (lambda: capsules(types=4), (12, 8, 8, 3), (8, 4, 4, 4), 1),
        (lambda: capsules(pose=(1, 5)), (12, 8, 8, 3), (15, 4, 4, 3), 3),
        (lambda: Net(PrimaryCapsules(4, 3, 4), flat()), (12, 8, 8, 3), (24, 1, 1), 1),
        (lambda: Net(flat(), nn.Linear(24, 7)), (24, 1, 1), (7, 1, 1), 1),
        (lambda: Net(flat(4), CapsuleLinear(4, 4, 6, 3, DynamicRouting())), (24, 1, 1, 4), (12, 1, 1, 4), 4),
        (lambda: Net(nn.Conv2d(4, 8, 1), flat(6)), (8, 8, 8), (24, 1, 1, 6), 1),
        (lambda: Net(halved(), Rearranged(3, (4,))), (12, 4, 4), (12, 4, 4, 3), 1),
        (lambda: Net(nn.Sequential(halved(), Rearranged(3, (2, 2))), Flattened()), (12, 4, 4, 3), (192, 1, 1), 1),
    ],
)
def test_kinds_of_layers(make, lower, higher, groups):
    model = make()
    feedback = attach(model, critic=False)
    (unit,) = feedback.units
    assert unit.lower == MapShape(*lower)
    assert unit.higher == MapShape(*higher)
    assert unit.generator[0].groups == groups
    assert unit.types == unit.lower.types
    x = images()
    prediction, divergence = feedback(x)
    assert_close(prediction, model(x))
    divergence.backward()
    assert divergence > 0
    assert all(p.grad.isfinite().all() for p in [*feedback.parameters(), *model.stem.parameters()])
    assert model.stem.weight.grad.any()


class Flattened(nn.Module):
    def forward(self, x):
        return x.flatten(1)


def test_capsules_are_neighboring_channels():
    """Capsules become channels in their original order, whatever the pose."""
    x = images()
    for pose in ((4,), (2, 2)):
        model = Net(halved(), Rearranged(3, pose, wraps=True))
        _, maps = attach(model, critic=False)._watch(x)
        (lower, none), (higher, types) = maps["lower"], maps["higher"]
        assert (none, types) == (None, 3)
        assert_close(lower, higher, rtol=0, atol=0)


def test_a_prediction_stands_for_its_capsules():
    class Classifier(nn.Module):
        def forward(self, poses):
            return Prediction(activations=poses.norm(dim=-1), capsules=Capsules(poses))

    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Unflatten(1, (4, 6)), Classifier())
    feedback = attach(model, [("1", "")], critic=False)
    assert feedback.units[0].higher == MapShape(24, 1, 1, 4)
    prediction, divergence = feedback(images())
    assert isinstance(prediction, Prediction)
    assert divergence > 0


def test_a_layer_that_runs_twice_counts_at_last():
    model = two_convolutions()
    model.append(model[0])
    x = images()
    _, maps = attach(model, [("1", "0"), ("1", "2")])._watch(x)
    assert_close(maps["0"][0], model(x))
    assert_close(maps["2"][0], model(x))  # the same layer's other name
    assert_close(maps["1"][0], model[1](model[0](x)))


def test_what_is_changed_in_place_counts_as_changed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    feedback = attach(model, [("0", "2")])
    assert_close(feedback._watch(images())[1]["0"][0].min(), torch.tensor(0.0))
    feedback(images())[1].backward()
    assert model[0].weight.grad.any()


def test_a_plain_resnet_of_this_library():
    model = create_model("resnet18_cifar")
    feedback = FeedbackAgreement(model, [("features.1.5", "features.1.7"), ("features.1.7", "features.1.8")])
    first, second = feedback.units
    assert (first.lower, first.higher) == (MapShape(128, 16, 16), MapShape(256, 8, 8))
    assert (second.lower, second.higher) == (MapShape(256, 8, 8), MapShape(256, 8, 8))
    critics = 9 * 128 * 32 + 9 * 32 + 9 * 256 * 64 + 9 * 64 + 2 * (32 + 64 + 1 + 1)
    assert count(feedback) == 9 * 256 * (128 + 256) + 2 * (128 + 256) + critics
    prediction, divergence = feedback(torch.rand(4, 3, 32, 32))
    (F.cross_entropy(prediction.scores, torch.arange(4)) + divergence).backward()
    assert all(p.grad is not None for p in [*model.parameters(), *feedback.parameters()])
    assert model.features[1][8].conv2.weight.grad.any()
    assert "features.1.5 from features.1.7, features.1.7 from features.1.8, weight=10.0" in repr(feedback)
    assert "128x16x16 from 256x8x8, divergence='sinkhorn', cost='cosine', eps=1.0" in repr(feedback)


def test_pairs_add_up_and_weigh():
    model, x = plain(), images()
    pairs = [("lower", "higher"), ("lower.0", "lower.1")]
    both = attach(model, pairs, weight=3.0)
    singles = [attach(model, [pair], weight=1.0) for pair in pairs]
    for unit, single in zip(both.units, singles, strict=True):
        single.units[0].load_state_dict(unit.state_dict())
    assert_close(both(x)[1], 3 * sum(single(x)[1] for single in singles))
    assert attach(model).weight == 10


# Table 3, d1 to d5


def same_weights(feedback, model, **options):
    other = attach(model, **options)
    other.load_state_dict(feedback.state_dict(), strict=False)
    return other


def test_without_critic_the_maps_are_compared():
    model, x = capsules(), images()
    feedback = attach(model)
    other = same_weights(feedback, model, critic=False)
    assert count(feedback) - count(other) == 9 * 12 * 3 + 9 * 3 + 2 * (3 + 1)
    generated = other.units[0].generate(other._watch(x)[1]["higher"][0])
    lower = other._watch(x)[1]["lower"][0]
    assert_close(other(x)[1], 10 * sinkhorn_divergence(generated, lower))


def test_generators_of_capsules_and_plain_ones():
    model = capsules()
    capsule_wise, vanilla = (attach(model, capsule_generator=g) for g in (True, False))
    assert count(capsule_wise) - count(vanilla) == 9 * 6 * 12 // 3 - 9 * 6 * 12
    assert (capsule_wise.units[0].generator[0].groups, vanilla.units[0].generator[0].groups) == (3, 1)
    z = torch.randn(4, 6, 4, 4) * 10

    def lengths(feedback):
        return feedback.units[0].generate(z).unflatten(1, (3, 4)).norm(dim=2)

    assert lengths(capsule_wise).max() < 1
    assert lengths(vanilla).max() > 1
    # Each type from its own.
    only = torch.zeros_like(z)
    only[:, 2:4] = z[:, 2:4]
    generated = capsule_wise.units[0].generator[0](only)
    assert generated[:, 4:8].all()
    assert not torch.cat([generated[:, :4], generated[:, 8:]], 1).any()


# Effects on the network


def test_evaluation_adds_nothing():
    model, x = plain(), images()
    feedback = attach(model).eval()
    model.eval()

    def unwanted(*_):
        raise AssertionError("units must not run")

    feedback.units[0].forward = unwanted
    model.lower.register_forward_pre_hook(lambda *_: seen.append(hooks(model)))
    seen: list[int] = []
    prediction, divergence = feedback(x)
    assert seen == [1]  # this one
    assert_close(prediction, model(x), rtol=0, atol=0)
    assert divergence.item() == 0
    assert divergence.shape == ()
    assert not divergence.requires_grad
    with pytest.raises(AssertionError, match="must not run"):
        feedback.train()(x)
    assert not model.training


def test_it_holds_its_units_alone_and_the_network_nothing():
    model, x = plain(), images()
    keys, values = list(model.state_dict()), copy.deepcopy(model.state_dict())
    feedback = attach(model)
    assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)
    assert all(name.startswith("units.0.") for name in feedback.state_dict())
    assert {id(m) for m in feedback.modules()}.isdisjoint(id(m) for m in model.modules())
    assert {id(p) for p in feedback.parameters()}.isdisjoint(id(p) for p in model.parameters())
    feedback(x)[1].backward()
    assert list(model.state_dict()) == keys
    assert hooks(model) == 0
    assert not [name for name in vars(model) if "feedback" in name]
    with torch.no_grad():
        expected = model.eval()(x)
        exported = torch.export.export(model, (x,))
        assert not [node for node in exported.graph.nodes if "transpose" in str(node.target)]
        assert_close(exported.module()(x), expected)
        assert set(exported.state_dict) == set(keys)
        assert_close(copy.deepcopy(model)(x), expected, rtol=0, atol=0)


def test_modes_and_buffers_are_restored():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            raise AssertionError("train() is the user's")

    model = plain()
    model.eval()
    model.higher = Frozen(*model.higher)
    model.higher[1].training = True
    modes = [m.training for m in model.modules()]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    seen = []
    handle = model.higher.register_forward_hook(lambda *_: seen.append([m.training for m in model.modules()]))
    attach(model)
    handle.remove()
    assert not any(seen[0])
    assert [m.training for m in model.modules()] == modes
    assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def test_a_network_that_raises_keeps_no_hooks():
    model = plain()
    feedback = attach(model)
    with pytest.raises(RuntimeError):
        feedback(torch.rand(2, 1, 8, 8))
    assert hooks(model) == 0
    model.training = True
    with pytest.raises(ValueError, match="image_shape"):
        FeedbackAgreement(model, PAIR, (5, 8, 8))
    assert hooks(model) == 0
    assert all(m.training for m in model.modules())


def test_it_is_in_the_network_s_precision_and_can_be_moved():
    model = plain().to(torch.bfloat16)
    feedback = attach(model)
    assert {p.dtype for p in feedback.parameters()} == {torch.bfloat16}
    prediction, divergence = feedback(images().bfloat16())
    assert prediction.dtype == torch.bfloat16
    assert divergence.dtype == torch.float32
    assert divergence.isfinite()
    assert feedback.eval()(images().bfloat16())[1].dtype == torch.float32
    model.float()
    feedback.train().to(torch.float32)
    x = images().float()
    assert_close(feedback(x), same_weights(feedback, model)(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, divergence = feedback(x)
    assert divergence.dtype == torch.float32
    divergence.backward()
    assert attach(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), [("0", "1")])(x.double())[1] >= 0  # no parameters


# Bad input


def idle() -> Net:
    model = plain()
    model.spare = nn.ReLU()
    return model


def without_its_layer():
    model = two_convolutions()
    feedback = attach(model, [("0", "1")])
    del model[1]
    feedback(images())


def two_convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: attach(plain(), [("lower.2", "higher")]),
            ValueError,
            r"has no layer 'lower.2'; the nearest are lower",
        ),
        (lambda: attach(plain(), []), ValueError, "pairs of names, a lower and a higher layer each, got \\[\\]"),
        (
            lambda: FeedbackAgreement(plain(), PAIR, (1, 8, 8)),
            ValueError,
            r"^Net does not run on images of image_shape=\(1, 8, 8\) \(.*\): set image_shape to [^\n]*$",
        ),
        (without_its_layer, ValueError, "Sequential has no layer '1'; the nearest are 0"),
        (
            lambda: attach(plain(), [("higher", "lower")]),
            ValueError,
            "layers 'higher' and 'lower': 6x4x4 cannot be generated from 8x8x8",
        ),
        (
            lambda: attach(capsules(), [("higher", "higher")]),
            ValueError,
            r"the critic reduces 6x4x4 \(3 types of capsules\) to a single number, whose cosine is 0 or 1: "
            "use critic=False or cost='l2'",
        ),
        (lambda: attach(idle(), [("lower", "spare")]), ValueError, "layer 'spare' did not run: name a layer that"),
        (
            lambda: attach(two_convolutions(), [("0", "1")])(torch.rand(2, 3, 8, 10)),
            ValueError,
            r"expected the lower layer's map of shape \(batch, 3, 8, 8\), got \(2, 3, 8, 10\)",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_single_numbers_have_distances_and_two_a_cosine():
    feedback = attach(plain(), [("higher", "higher")], cost="l2")
    assert feedback(images())[1] > 0
    assert feedback.units[0].critic is not None
    for size in ((5, 4), (4, 5)):
        unit = AgreementUnit(MapShape(4, *size), MapShape(2, *size))
        maps = torch.rand(3, 4, *size)
        assert unit.critic(maps).numel() == 3 * 2
        assert unit(maps, maps[:, :2]).isfinite()


def test_a_compiled_network_is_watched_after_an_evaluation_too():
    """Code that was compiled without hooks must not run where hooks are needed."""
    model = plain().eval()
    compiled = torch.compile(model, backend="eager")
    feedback = attach(compiled, [("_orig_mod.lower", "_orig_mod.higher")])
    same = attach(model)
    same.load_state_dict(feedback.state_dict())
    x = images()
    for _ in range(2):
        for mode in (True, False):
            feedback.train(mode)
            same.train(mode)
            for ours, eager in zip(feedback(x), same(x), strict=True):
                assert_close(ours, eager)
