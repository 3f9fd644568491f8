"""The base class of the routings: parameters, initial values, options, errors, watchers, and the loop."""

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleConv2d,
    CapsuleLinear,
    Capsules,
    CapsuleShared,
    CapsuleStack,
    DynamicRouting,
    EfficientRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RandomRouting,
    SelfRouting,
    SlotAttention,
    UniformRouting,
    VBRouting,
    VectorNormRouting,
    list_routings,
)
from torchcaps.ops import Dot, Gaussian, WeightedVotes
from torchcaps.routing import LayerShape, Routing


class ScaledAttention(Routing):
    """A routing as a user would write it: dot agreement with a learned temperature."""

    def __init__(self, iterations: int = 2, temperature: float = 1.0):
        super().__init__(iterations)
        self.temperature = temperature

    def build(self, shape: LayerShape) -> None:
        self.log_temperature = nn.Parameter(torch.full((shape.parents,), math.log(self.temperature)))

    def agreement(self, p: Tensor) -> Dot:
        return Dot(p * (-self.log_temperature).exp().unsqueeze(-1))

    def step(self, votes: WeightedVotes, p: Tensor | None, t: int) -> tuple[Capsules, Tensor]:
        p = votes.weighted_sum()
        return votes.capsules(p), p


class WithParts(Routing):
    """A routing with a parameter, a buffer and a module."""

    def __init__(self, iterations: int = 2):
        super().__init__(iterations)

    def build(self, shape: LayerShape) -> None:
        self.factor, self.shift = nn.Parameter(torch.ones(shape.parents, 1)), nn.Buffer(torch.randn(shape.parents, 1))
        self.mix = nn.Linear(shape.features, shape.features)

    def step(self, votes: WeightedVotes, dot: Dot | None, t: int) -> tuple[Capsules, Dot]:
        p = self.mix(votes.weighted_sum() * self.factor + self.shift).tanh()
        return votes.capsules(p), Dot(0.1 * p)


def shape_of(**sizes: int | None) -> LayerShape:
    return LayerShape(
        **({"groups": 6, "children": 6, "parents": 3, "rows": 2, "in_features": 4, "out_features": 5} | sizes)
    )


def test_a_layer_tells_its_routing_its_shape():
    layer = CapsuleLinear(6, 3, (2, 4), (2, 5), ScaledAttention())
    assert layer.routing.shape == layer.layer_shape == LayerShape(6, 6, 3, 2, 4, 5)
    assert layer.routing.shape.features == 10
    free = CapsuleLinear(None, None, 4, 5, DynamicRouting()).layer_shape
    assert free == LayerShape(1, None, 1, 1, 4, 5, any_children=True, any_parents=True)
    assert CapsuleLinear(2, 3, 4, 5, DynamicRouting(), share_positions=True).layer_shape.children is None
    shared = CapsuleLinear(2, 3, 4, 5, DynamicRouting(), share_positions=True, expected_children=72)
    assert (shared.layer_shape.groups, shared.layer_shape.children) == (2, 72)
    assert CapsuleConv2d(2, 3, 4, 5, (2, 3), DynamicRouting()).layer_shape == LayerShape(12, 12, 3, 1, 4, 5, window=6)


def test_buffers_and_modules_are_declared_like_parameters():
    routing = WithParts(2)
    layers = [CapsuleLinear(6, 3, 4, 5, routing) for _ in range(2)]
    names = {"factor", "shift", "mix.weight", "mix.bias"}
    assert set(layers[0].routing.state_dict()) == set(routing.for_layer(shape_of()).state_dict()) == names
    assert {name for name, _ in layers[0].routing.named_parameters()} == names - {"shift"}
    assert [name for name, _ in layers[0].routing.named_buffers()] == ["shift"]
    assert not routing.state_dict()
    assert not any(x is y for x in layers[0].state_dict().values() for y in layers[1].state_dict().values())
    assert not layers[0].routing.shift.equal(layers[1].routing.shift)
    layers[0](torch.randn(2, 6, 4)).poses.square().sum().backward()
    assert all(x.grad.any() for x in layers[0].parameters())
    with pytest.raises(RuntimeError, match="factor, shift, mix.*capsule layer"):
        routing(torch.randn(1, 2, 2, 2))


def test_a_routing_without_a_layer_draws_nothing():
    votes, logits = torch.randn(2, 4, 3, 5), torch.randn(4, 3)
    before = torch.get_rng_state()
    RandomRouting().with_values(logits=logits)(votes)
    assert torch.get_rng_state().equal(before)


def test_a_routing_without_a_layer_compiles():
    votes = torch.randn(2, 4, 3, 5)
    for routing in (DynamicRouting(), RandomRouting().with_values(logits=torch.randn(4, 3))):
        compiled = torch.compile(lambda votes, routing=routing: routing(votes).poses, fullgraph=True, backend="eager")
        assert_close(compiled(votes), routing(votes).poses)


def test_the_routing_of_a_layer_takes_votes_of_its_sizes_only():
    own = CapsuleLinear(6, 3, 4, 5, VBRouting()).routing.eval()
    assert own(torch.randn(2, 6, 3, 5)).poses.shape == (2, 3, 5)
    for children, parents in ((6, 6), (6, 7), (4, 3), (12, 3), (5, 2)):
        with pytest.raises(ValueError, match=f" 6 children and 3 parents, got .* {children} .* {parents} "):
            own(torch.randn(2, children, parents, 5))
    types = CapsuleLinear(2, 3, 4, 5, DynamicRouting(), share_positions=True, expected_children=72).routing
    assert types(torch.randn(2, 8, 3, 5)).poses.shape == (2, 3, 5)
    with pytest.raises(ValueError, match="a multiple of 2 children and 3 parents, got votes of 7"):
        types(torch.randn(2, 7, 3, 5))
    free = CapsuleLinear(None, 3, 4, 5, DynamicRouting(), expected_children=1).routing
    assert free(torch.randn(2, 7, 3, 5)).poses.shape == (2, 3, 5)
    free = CapsuleLinear(None, None, 4, 5, DynamicRouting()).routing
    assert free(torch.randn(2, 7, 4, 5)).poses.shape == (2, 4, 5)


def test_random_routing_for_any_number_of_parents():
    with pytest.raises(ValueError, match="RandomRouting needs a number of parents: give the layer out_capsules"):
        CapsuleLinear(None, None, 4, 5, RandomRouting())
    layer = CapsuleLinear(None, None, 4, 5, DynamicRouting(1, start="random"))
    found = layer(torch.randn(2, 6, 4), out_capsules=3, return_coefficients=True).coefficients
    assert_close(found.sum(-1), torch.ones(2, 6))
    assert found.std() > 0.01


@pytest.mark.parametrize("start", ["random", "learned"])
def test_first_logits_that_change_nothing(start):
    over_children = DynamicRouting(1, softmax="children", start=start)
    with pytest.raises(ValueError, match=f"start='{start}' .* over the children are one number; .* two children"):
        CapsuleLinear(None, 3, 4, 5, over_children)
    with pytest.raises(ValueError, match=f"start='{start}' .* over the parents are one number; .* two parents"):
        CapsuleLinear(6, 1, 4, 5, DynamicRouting(start=start))
    poses = torch.randn(2, 6, 4)
    for layer in (CapsuleLinear(6, None, 4, 5, over_children), CapsuleLinear(2, 3, 4, 5, over_children)):
        if start == "learned":
            nn.init.normal_(layer.routing.first_logits)
        options = {"out_capsules": 3} if layer.out_capsules is None else {}
        coefficients = layer(poses[:, : layer.in_capsules], return_coefficients=True, **options).coefficients
        assert_close(coefficients.sum(1), torch.ones(2, 3))
        assert coefficients.std() > 0.01


def test_learned_first_logits_for_any_number_of_parents():
    with pytest.raises(ValueError, match="start='learned' changes nothing"):
        CapsuleLinear(6, None, 4, 5, DynamicRouting(start="learned"))
    layer = CapsuleLinear(6, None, 4, 5, DynamicRouting(1, start="learned", leaky=True))
    nn.init.constant_(layer.routing.first_logits, 1)
    found = layer(torch.randn(2, 6, 4), out_capsules=3, return_coefficients=True).coefficients
    assert_close(found, torch.full((2, 6, 3), math.e / (3 * math.e + 1)))


def test_buffers_and_modules_are_reset_and_loaded():
    layer, twin = (CapsuleLinear(6, 3, 4, 5, WithParts()) for _ in range(2))
    kept = dict(layer.routing.state_dict(keep_vars=True))
    before = {name: value.detach().clone() for name, value in kept.items()}
    nn.init.zeros_(layer.routing.factor)
    layer.reset_parameters()
    assert_close(layer.routing.factor.data, torch.ones(3, 1))
    for name in ("shift", "mix.weight", "mix.bias"):  # drawn anew, in the same tensors
        assert layer.routing.state_dict(keep_vars=True)[name] is kept[name]
        assert not kept[name].equal(before[name])
    layer.load_state_dict(twin.state_dict())
    x = torch.randn(2, 6, 4)
    assert_close(layer(x).poses, twin(x).poses)


@pytest.mark.parametrize("make", [WithParts, VBRouting, RandomRouting])
def test_buffers_and_modules_on_another_device_and_in_another_precision(make):
    layer = CapsuleLinear(6, 3, 4, 5, make(), device="meta", dtype=torch.float64)
    values = layer.routing.state_dict()
    assert values
    assert all(x.is_meta and x.dtype in (torch.float64, torch.int64) for x in values.values())
    layer.to_empty(device="cpu").reset_parameters()
    fresh = make().for_layer(layer.layer_shape).state_dict()
    for name, value in layer.routing.state_dict().items():
        assert value.shape == fresh[name].shape
        assert value.isfinite().all()
        if fresh[name].unique().numel() == 1:  # not drawn at random
            assert_close(value, fresh[name].to(value.dtype))
    assert layer(torch.randn(4, 6, 4, dtype=torch.float64)).poses.isfinite().all()


class Wrong(Routing):
    """A routing whose `build` sets the given values."""

    def __init__(self, values: dict):
        super().__init__()
        self.values = values

    def build(self, shape: LayerShape) -> None:
        for name, value in self.values.items():
            setattr(self, name, value)

    step = ScaledAttention.step


@pytest.mark.parametrize("name", ["gain", "steps", "step", "softmax", "gradient", "training", "shape", "values"])
@pytest.mark.parametrize("value", [nn.Linear(1, 1), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))])
def test_build_sets_no_attribute_that_exists(name, value):
    with pytest.raises(
        ValueError, match=f"Wrong.build: attribute '{name}' already exists, choose another name"
    ) as error:
        CapsuleLinear(6, 3, 4, 5, Wrong({name: value}))
    assert "\n" not in str(error.value)
    CapsuleLinear(6, 3, 4, 5, Wrong({f"{name}_": value}))


class Stateless(DynamicRouting):
    """A routing without a state, whose argument is no attribute."""

    def __init__(self, **options):
        super().__init__(**options)

    def step(self, votes: WeightedVotes, state: None, t: int) -> tuple[Capsules, None]:
        return votes.capsules(votes.weighted_sum()), None


def test_a_routing_without_a_state():
    votes = torch.randn(2, 6, 3, 5)
    assert_close(Stateless()(votes).poses, votes.sum(1) / 3)
    assert "Stateless()" in repr(Stateless())


def test_an_argument_may_be_stored_as_something_else():
    class Own(DynamicRouting):
        def __init__(self, activation: str = "tanh"):
            super().__init__(2)
            self.activation = getattr(torch, activation)

    assert CapsuleLinear(6, 3, 4, 5, Own())(torch.randn(2, 6, 4)).poses.abs().max() <= 1


def test_what_step_and_agreement_may_return(monkeypatch):
    layer, x = CapsuleLinear(6, 3, 4, 5, ScaledAttention()), torch.randn(2, 6, 4)
    parents = layer(x)
    for found in (None, parents, (parents.poses, None), [parents, None], (parents, None, 0), (parents,)):
        monkeypatch.setattr(ScaledAttention, "step", lambda *rest, found=found: found)
        with pytest.raises(
            TypeError, match="ScaledAttention.step must return Capsules and the next state, got (?!.*give)"
        ) as error:
            layer(x)
        assert "\n" not in str(error.value)
    monkeypatch.undo()
    for found in (0, parents.poses, (parents.poses, None), parents):
        monkeypatch.setattr(ScaledAttention, "agreement", lambda *rest, found=found: found)
        with pytest.raises(TypeError, match="ScaledAttention.agreement must return an agreement, .*, got") as error:
            layer(x)
        assert "\n" not in str(error.value)


class Fit(NamedTuple):
    """A state of two tensors."""

    mean: Tensor
    score: Tensor


class OfAnyState(Routing):
    """A routing whose state is a tensor, a NamedTuple, an agreement or, with uniform coefficients, None."""

    def __init__(self, state: str, iterations: int = 3):
        super().__init__(iterations)
        self.state = state

    def agreement(self, state: Tensor | Fit | Gaussian) -> Gaussian:
        if isinstance(state, Gaussian):
            return state
        mean, score = (state[..., :-1], state[..., -1]) if isinstance(state, Tensor) else state
        return Gaussian(mean, torch.ones_like(mean), score)

    def step(self, votes: WeightedVotes, state: Any, t: int) -> tuple[Capsules, Any]:
        mass, mean, *_ = votes.moments()
        after = {
            "tensor": lambda: torch.cat([mean, mass.unsqueeze(-1)], -1),
            "tuple": lambda: Fit(mean, mass),
            "agreement": lambda: Gaussian(mean, torch.ones_like(mean), mass),
            "none": lambda: None,
        }
        return votes.capsules(mean, mass), after[self.state]()


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
def test_states_of_any_kind(schedule):
    layers = [CapsuleLinear(n, 3, 4, 4, OfAnyState("tensor", 100)).double() for n in (6, 3)]
    x, results = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True), []
    for state in ("tensor", "tuple", "agreement"):
        for layer in layers:
            layer.routing.state = state
        out = CapsuleStack(*layers, schedule=schedule)(x)
        loss = out.poses.pow(3).sum() + out.scores.square().sum()
        results.append([out.poses, out.scores, *torch.autograd.grad(loss, [x, layers[0].weight])])
    for found in results[1:]:
        assert_close(found, results[0], rtol=1e-6, atol=1e-8)


def test_without_a_state_all_iterations_are_uniform():
    layer, x = CapsuleLinear(6, 3, 4, 4, OfAnyState("none")), torch.randn(2, 6, 4)
    out = layer(x, return_coefficients=True)
    assert_close(out.coefficients, torch.full((2, 6, 3), 1 / 3))
    with layer.routing.uniform():
        assert_close(layer(x).poses, out.poses)


@pytest.mark.parametrize(
    ("routing", "missing"),
    [(EMRouting(), "beta_a, beta_u"), (VBRouting(), "pose_norm, score_norm"), (RandomRouting(), "logits")],
)
def test_a_routing_without_a_layer_says_what_it_misses(routing, missing):
    with pytest.raises(RuntimeError, match=f"{missing}.*capsule layer"):
        routing(torch.randn(1, 2, 2, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScaledAttention(0), "iterations.*1.*0"),
        (lambda: DynamicRouting(0), "iterations.*1.*0"),
        (lambda: VectorNormRouting(-1), "iterations.*0.*-1"),
        (lambda: DynamicRouting(softmax="children", leaky=True), "leaky.*softmax='parents'"),
        (
            lambda: CapsuleShared(None, 2, 4, routing=SlotAttention(2)).routing.with_values(
                **{"query.weight": torch.zeros(4, 4)}
            ),
            "learns no 'query.weight'",
        ),
        (lambda: VectorNormRouting(0, learn_sharpness=True), "learn_sharpness.*iterations=0"),
        (
            lambda: SelfRouting().with_values(route_weight=torch.zeros(2, 2, 1, 2), route_bias=torch.zeros(2, 2))(
                torch.randn(1, 2, 2, 2)
            ),
            "poses.*capsule layer",
        ),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [InvertedAttentionRouting, SlotAttention])
def test_a_start_that_the_last_iteration_cannot_learn(make):
    """It is refused from the beginning, and when an option is changed later."""
    with pytest.raises(ValueError, match="start='learned' gets no gradient .* use gradient='unrolled'"):
        make(start="learned", gradient="last")
    one, last, learned = make(1, start="learned", gradient="last"), make(3, gradient="last"), make(3, start="learned")
    for routing, option, value in ((one, "iterations", 2), (last, "start", "learned"), (learned, "gradient", "last")):
        with pytest.raises(ValueError, match="start='learned' gets no gradient"):
            setattr(routing, option, value)
    assert learned.gradient == "unrolled"
    DynamicRouting(start="learned", gradient="last")  # whose logits add up, from the first on


def test_iterations_without_meaning_are_no_arguments():
    assert not SelfRouting.iterative
    with pytest.raises(TypeError, match="iterations"):
        SelfRouting(iterations=2)
    with pytest.raises(ValueError, match="SelfRouting has no iterations, got 5"):
        SelfRouting().iterations = 5
    with pytest.raises(ValueError, match="decay is of schedule='saturating'"):
        EMRouting(schedule="linear", decay=0.5)
    assert repr(SelfRouting()) == "SelfRouting()"
    assert repr(DynamicRouting(2, leaky=True)) == "DynamicRouting(iterations=2, leaky=True)"
    assert repr(VectorNormRouting(activation=nn.functional.relu)) == "VectorNormRouting(iterations=3, activation=relu)"


@pytest.mark.parametrize("gradient", ["unrolled", "last"])
def test_iterations_hand_on_their_state(gradient, monkeypatch):
    layer, x = CapsuleLinear(4, 3, 3, 3, DynamicRouting(3, gradient=gradient)), torch.randn(2, 4, 3)
    seen: list[tuple[Any, Any, float, bool]] = []
    step = DynamicRouting.step

    def record(self, votes, state, t):
        parents, after = step(self, votes, state, t)
        seen.append((state, after, t, torch.is_grad_enabled()))
        return parents, after

    monkeypatch.setattr(DynamicRouting, "step", record)
    layer(x)
    assert [t for *_, t, _ in seen] == [0, 1, 2]
    assert [grad for *_, grad in seen] == [gradient == "unrolled"] * 2 + [True]
    assert seen[0][0] is None
    assert seen[1][0] is seen[0][1]
    assert seen[2][0] is seen[1][1]


def test_gates_that_votes_have_count_whether_or_not_scores_are_given():
    layer = CapsuleLinear(4, 3, 2, 2, EMRouting())
    children = Capsules(torch.randn(2, 4, 2), torch.randn(2, 4))
    votes = layer.votes(children)
    expected = layer(children)
    assert_close(layer.routing(votes).poses, expected.poses)
    ungated = layer.votes(children.poses)
    assert_close(layer.routing(ungated, children.scores).poses, expected.poses)
    assert not torch.allclose(layer.routing(ungated).poses, expected.poses)


@pytest.mark.parametrize(
    ("routing", "sizes", "std"),
    [
        (DynamicRouting(), {"children": 100}, 2.2 * 3 / (100 * 5) ** 0.5),
        (DynamicRouting(softmax="children"), {"children": 100}, 1.2 * 100 / (100 * 5) ** 0.5),
        (DynamicRouting(), {"children": None}, 2.2 * 3 / (16 * 5) ** 0.5),
        (InvertedAttentionRouting(), {"children": 100}, 3 / (100 * 5) ** 0.5),
        (SelfRouting(), {"children": 100}, 100 / (100 * 5) ** 0.5),
        (InvertedAttentionRouting(init="paper"), {"children": 72, "groups": 1}, (3 / (4 * 72)) ** 0.5),
        (InvertedAttentionRouting(init="paper"), {"children": None, "groups": 8}, (3 / (4 * 8)) ** 0.5),
        (EfficientRouting(init="paper"), {"children": 72, "groups": 1}, (2 / (4 * 3 * 72)) ** 0.5),
        (EfficientRouting(init="paper"), {"children": None, "groups": 8}, (2 / (4 * 3 * 8)) ** 0.5),
        (HeinsenRouting(init="paper"), {}, 1 / 4),
    ],
    ids=str,
)
def test_first_vote_weights(routing, sizes, std):
    weight = torch.empty(400, 3, 4, 5)
    routing.reset_weight(weight, shape_of(**sizes))
    assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert abs(weight.mean().item()) < 0.1 * std
    own = (weight - weight.mean(1, keepdim=True)).square().mean().item() * 3 / 2  # unbiased variance over 3 parents
    assert own == pytest.approx((1 - routing.shared_variance) * std**2 if routing.init == "fan_in" else std**2, rel=0.1)


def test_the_authors_dynamic_weights():
    weight = torch.empty(400, 3, 4, 5)
    DynamicRouting(init="paper").reset_weight(weight, shape_of())
    assert weight.abs().max() <= 0.2
    assert weight.std().item() == pytest.approx(0.088, rel=0.03)  # a normal with 0.1, cut at 0.2


@pytest.mark.parametrize(
    ("routing", "first"),
    [
        (DynamicRouting(learn_bias=True, start="learned"), {"bias": 0.1, "first_logits": 0}),
        (VectorNormRouting(sharpness=2.0, learn_sharpness=True), {"learned_sharpness": 2}),
        (
            InvertedAttentionRouting(activations=True, start="learned"),
            {"weight": 1, "bias": 0, "first_poses": 0, "beta_a": 0, "beta_u": 0},
        ),
        (EMRouting(), {"beta_a": 0, "beta_u": 0}),
        (HeinsenRouting(), {"beta_use": 0, "beta_ignore": 0}),
        (SelfRouting(), {"route_weight": 0, "route_bias": 0}),
    ],
    ids=str,
)
def test_first_values(routing, first):
    found = routing.for_layer(shape_of()).state_dict()
    assert found.keys() == first.keys()
    for name, value in found.items():
        assert_close(value, torch.full_like(value, first[name]))


def test_random_coefficients():
    x = torch.randn(5, 6, 4)
    fixed, anew = (CapsuleLinear(6, 3, 4, 5, x) for x in (RandomRouting(), DynamicRouting(1, start="random")))
    first = fixed(x, return_coefficients=True).coefficients
    assert fixed(x, return_coefficients=True).coefficients.equal(first)
    assert_close(first, fixed.routing.logits.softmax(-1).expand(5, -1, -1))
    before = fixed.routing.logits.clone()
    fixed.reset_parameters()
    assert (fixed.routing.logits != before).all()

    assert not anew.routing.state_dict()
    torch.manual_seed(1)
    drawn = anew(x, return_coefficients=True).coefficients
    assert_close(drawn, drawn[:1].expand(5, -1, -1))  # the same for all samples
    assert not torch.allclose(anew(x, return_coefficients=True).coefficients, drawn)
    torch.manual_seed(1)
    assert_close(drawn[0], torch.randn(6, 3).softmax(-1))
    logits = torch.cat([RandomRouting().for_layer(shape_of()).logits.flatten() for _ in range(100)])
    assert abs(logits.mean()) < 0.1
    assert logits.std().item() == pytest.approx(1, rel=0.1)


def test_uniform_routing_is_the_first_iteration_of_dynamic_routing():
    layer, other = CapsuleLinear(6, 3, 4, 5, UniformRouting()), CapsuleLinear(6, 3, 4, 5, DynamicRouting(1))
    other.load_state_dict(layer.state_dict())
    x = Capsules(torch.randn(2, 6, 4), torch.randn(2, 6))
    assert_close(layer(x).poses, other(x).poses)
    assert not UniformRouting(activation=None).measures_presence
    with pytest.raises(ValueError, match="activation must return a tensor of the shape"):
        CapsuleLinear(6, 3, 4, 5, RandomRouting(activation=torch.sum))(x)


def test_routings_have_names():
    assert set(list_routings()) >= {"DynamicRouting", "EMRouting", "SelfRouting", "ScaledAttention"}
    assert "Routing" not in list_routings()


class Bare(Routing):
    """A routing that does nothing but one step."""

    def step(self, votes, state, t):
        v = votes.weighted_sum()
        return votes.capsules(v), v


def test_mistakes_in_a_routing_of_ones_own_are_named():
    class Early(Bare):
        def __init__(self):
            self.temperature = 1.0

    class Plain(Bare):
        def build(self, shape):
            self.table = torch.zeros(shape.parents)

    with pytest.raises(AttributeError, match=r"Early.__init__ must call super\(\).__init__\(\) before it sets 'temper"):
        Early()
    with pytest.raises(ValueError, match="Plain.build: table is a plain tensor, which is neither saved nor moved"):
        CapsuleLinear(5, 3, 4, 4, Plain())
    with pytest.raises(TypeError, match=r"Bare has no agreement: write agreement\(state\), or let step return"):
        CapsuleLinear(5, 3, 4, 4, Bare(iterations=2))(torch.randn(2, 5, 4))
    with pytest.raises(TypeError, match="^CapsuleConv2d has no argument 'groups'"):
        CapsuleConv2d(2, 3, 4, 4, 3, routing=Bare(), groups=2)


def test_a_copy_with_values_leaves_the_original_alone():
    routing = DynamicRouting(learn_bias=True)
    given = routing.with_values(bias=torch.zeros(2, 2))
    assert given(torch.randn(1, 2, 2, 2)).poses.shape == (1, 2, 2)
    with pytest.raises(RuntimeError, match="bias"):
        routing(torch.randn(1, 2, 2, 2))
    assert copy.deepcopy(given).bias.shape == (2, 2)
