"""A child with score -inf changes nothing, in every routing, layer and backend, wherever it stands."""

import math
from collections.abc import Callable

import pytest
import torch
from algorithms import loss_of
from torch import Tensor
from torch.testing import assert_close

import torchcaps.functional as F
from torchcaps import (
    CapsuleLinear,
    Capsules,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    Equilibrium,
    HeinsenRouting,
    InvertedAttentionRouting,
    Routing,
    VectorNormRouting,
    create_model,
    use_backend,
)
from torchcaps.ops import tiled

EXACT = {"rtol": 1e-10, "atol": 1e-10}

ROUTINGS: dict[str, Callable[..., Routing]] = {
    "dynamic": DynamicRouting,
    "dynamic, bias, leaky": lambda **kw: DynamicRouting(bias=True, leaky=True, **kw),
    "dynamic, random start": lambda **kw: DynamicRouting(start="random", **kw),
    "dynamic, learned start": lambda **kw: DynamicRouting(start="learned", **kw),
    "dynamic over children": lambda **kw: DynamicRouting(softmax="children", bias=True, **kw),
    "dynamic over children, random start": lambda **kw: DynamicRouting(softmax="children", start="random", **kw),
    "dynamic over children, learned start": lambda **kw: DynamicRouting(softmax="children", start="learned", **kw),
    "vector norm": lambda **kw: VectorNormRouting(sharpness=2.0, learn_sharpness="gradient" not in kw, **kw),
    "vector norm, squash": lambda **kw: VectorNormRouting(activation=F.squash, **kw),
    "inverted attention": InvertedAttentionRouting,
    "inverted attention, no norm": lambda **kw: InvertedAttentionRouting(layer_norm=False, **kw),
    "inverted attention, activations": lambda **kw: InvertedAttentionRouting(activations=True, **kw),
    "inverted attention, random start": lambda **kw: InvertedAttentionRouting(start="random", **kw),
    "inverted attention, learned start": lambda **kw: InvertedAttentionRouting(start="learned", **kw),
    "em": lambda **kw: EMRouting(inverse_temperature=1.0, **kw),
    "em, constant lambda": lambda **kw: EMRouting(inverse_temperature=0.5, decay=0.0, **kw),
    "em, linear lambda": lambda **kw: EMRouting(inverse_temperature=1.0, schedule="linear", cost_range=10, **kw),
    "heinsen": HeinsenRouting,
    "heinsen, single beta": lambda **kw: HeinsenRouting(single_beta=True, **kw),
    "heinsen, k-means": lambda **kw: HeinsenRouting(model="kmeans", **kw),
    "heinsen, no eps": lambda **kw: HeinsenRouting(eps=0.0, **kw),
}
routings = pytest.mark.parametrize("name", ROUTINGS)

# By how the votes are computed and lie in memory: the backend, and the numbers of samples and parents.
WAYS = {"reference": ("reference", 2, 4), "tiled": ("tiled", 2, 4), "tiled, samples innermost": ("tiled", 3, 2)}
ways = pytest.mark.parametrize("way", WAYS)
backends = pytest.mark.parametrize("backend", ["reference", "tiled"])

# Where the children of each sample stand: whole blocks before, between and after them are padding.
PRESENT = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 1, 1, 1, 1]]).bool()
CHILDREN, PADDED = 4, 9


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK", 16)
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def nobody(*shape: int) -> Tensor:
    return torch.full(shape, -math.inf, dtype=torch.float64)


def among(padding: Tensor, x: Tensor, present: Tensor) -> Tensor:
    padding = padding.clone()
    padding[present] = x.detach().flatten(0, 1)
    return padding


def routed(run: Callable[..., Capsules], children: list[Tensor], parameters: list[Tensor]):
    """What comes out, and the gradients of children and parameters."""
    torch.manual_seed(1)  # for random starts
    out = run(*(x.requires_grad_() for x in children))
    leaves = [*children, *parameters]  # of which some may have no say
    loss = loss_of(x for x in out[:3] if x is not None)  # not of the coefficients, which padding has, too
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return out, gradients[: len(children)], gradients[len(children) :]


def assert_padding_is_nothing(
    run: Callable[..., Capsules],
    children: list[Tensor],
    padding: list[Tensor],
    present: Tensor,
    parameters: list[Tensor],
    tolerance: dict[str, float] = EXACT,
) -> tuple[Capsules, Capsules]:
    """`run` gives the same for children alone and among padding, and no gradient goes to the padding, or comes from it.

    Returns what it gives.
    """
    padded = [among(*of, present) for of in zip(padding, children, strict=True)]
    expected, found = routed(run, children, parameters), routed(run, padded, parameters)
    for field, e, f in zip(("poses", "scores", "variances"), expected[0], found[0], strict=False):
        if e is not None:
            assert_close(f, e, **tolerance, msg=lambda m, field=field: f"{field}: {m}")
    for e, f in zip(expected[2], found[2], strict=True):
        assert_close(f, e, **tolerance, msg=lambda m: f"gradient of a parameter: {m}")
    assert expected[1][0].any()
    for e, f in zip(expected[1], found[1], strict=True):
        assert_close(f[present].view_as(e), e, **tolerance, msg=lambda m: f"gradient of the children: {m}")
        assert (f[~present] == 0).all()
    return expected[0], found[0]


def layer_of(routing: Routing, children: int | None, parents: int, backend: str) -> CapsuleLinear:
    """As after some training: no parameter is zero, none is like another."""
    layer = CapsuleLinear(children, parents, (2, 2), (2, 2), routing, bias=True, backend=backend).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@ways
@routings
def test_layers(name, way):
    backend, samples, parents = WAYS[way]
    layer, present = layer_of(ROUTINGS[name](), None, parents, backend), PRESENT[:samples]
    alone, padded = assert_padding_is_nothing(
        lambda poses, scores: layer(Capsules(poses, scores), return_coefficients=True),
        [randn(samples, CHILDREN, 2, 2), randn(samples, CHILDREN)],
        [1e4 * randn(samples, PADDED, 2, 2), nobody(samples, PADDED)],
        present,
        list(layer.parameters()),
    )
    assert_close(padded.coefficients[present].view_as(alone.coefficients), alone.coefficients, **EXACT)
    of_padding = padded.coefficients[~present]
    if layer.routing.softmax == "children":
        assert (of_padding == 0).all()
    elif not getattr(layer.routing, "leaky", False):  # they sum to one, of a child that does not count
        assert_close(of_padding.sum(1), torch.ones(len(of_padding), dtype=torch.float64))


# With parameters of every child, `rows` `(2, children, parents)`, of which padding has its own; and of every parent
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Capsules]] = {
    "dynamic": lambda v, s, rows, of: F.dynamic_routing(v, bias=of[..., None, None] * v.new_ones(2, 2), scores=s),
    "dynamic, start": lambda v, s, rows, of: F.dynamic_routing(v, scores=s, start=rows[0]),
    "dynamic, leaky, start": lambda v, s, rows, of: F.dynamic_routing(v, scores=s, start=rows[0], leaky=True),
    "dynamic over children, start": lambda v, s, rows, of: F.dynamic_routing(v, 3, "children", scores=s, start=rows[0]),
    "vector norm": lambda v, s, rows, of: F.vector_norm_routing(v, sharpness=of.square().sum(), scores=s),
    "inverted attention": lambda v, s, rows, of: F.inverted_attention_routing(v, scores=s),
    "inverted attention, start": lambda v, s, rows, of: F.inverted_attention_routing(
        v, scores=s, start=of[None, :, None] * v.new_ones(4)
    ),
    "inverted attention, activations": lambda v, s, rows, of: F.inverted_attention_routing(
        v, scores=s, beta_a=of, beta_u=of + 1
    ),
    "em": lambda v, s, rows, of: F.em_routing(v, s.sigmoid(), of, of + 1, inverse_temperature=1.0),
    "em, linear lambda": lambda v, s, rows, of: F.em_routing(
        v, s.sigmoid(), of, of + 1, inverse_temperature=1.0, schedule="linear", cost_range=10
    ),
    "heinsen": lambda v, s, rows, of: F.heinsen_routing(v, s, rows[0], rows[1]),
    "heinsen, single beta": lambda v, s, rows, of: F.heinsen_routing(v, s, rows[0]),
    "heinsen, k-means": lambda v, s, rows, of: F.heinsen_routing(v, s, rows[0], rows[1], model="kmeans"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    of_parents = randn(3).requires_grad_()
    alone, padded = assert_padding_is_nothing(
        lambda votes, scores, rows: FUNCTIONS[name](votes, scores, rows, of_parents),
        [randn(2, CHILDREN, 3, 2, 2), randn(2, CHILDREN), randn(2, CHILDREN, 3)],
        [1e4 * randn(2, PADDED, 3, 2, 2), nobody(2, PADDED), 100 * randn(2, PADDED, 3)],
        PRESENT[:1].expand(2, -1),
        [of_parents],
    )
    assert_close(padded.coefficients[:, PRESENT[0]], alone.coefficients, **EXACT)


@ways
@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "heinsen, no eps"])  # whose formulas have 0 / 0
def test_a_sample_of_padding_alone(name, way):
    """It is finite, whatever is there, and nothing to the others."""
    backend, samples, parents = WAYS[way]
    layer = layer_of(ROUTINGS[name](), None, parents, backend)
    poses, scores = randn(samples, CHILDREN, 2, 2), randn(samples, CHILDREN)
    scores[0] = -math.inf
    other = poses.clone()
    other[0] = 1e4 * randn(CHILDREN, 2, 2)
    results = []
    for x in (poses, other):
        out, of_children, of_parameters = routed(
            lambda *children: layer(Capsules(*children)), [x, scores], list(layer.parameters())
        )
        assert (of_children[0][0] == 0).all()
        results.append([*(y for y in out if y is not None), *of_children, *of_parameters])
        assert all(y.isfinite().all() for y in results[-1])
    for first, second in zip(*results, strict=True):
        assert_close(second, first, **EXACT)
    if "random" not in name:  # which a sample alone would draw anew
        assert_close(layer(Capsules(poses[1:], scores[1:])).poses, results[0][0][1:], **EXACT)


@backends
@routings
def test_networks(name, backend):
    """What a mask hides is nothing to a network of two layers, be it NaN."""
    sizes = {"classes": 3, "layers": 2, "width": 5, "features": 4, "pose": 3, "parts": 4}
    model, present = create_model("heinsen_sst", routing=ROUTINGS[name](), **sizes).double(), PRESENT[:2]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)

    def run(embeddings: Tensor) -> Capsules:
        with use_backend(backend):
            prediction = model(embeddings, present if embeddings.shape[1] == PADDED else None)
        return prediction.capsules._replace(scores=prediction.scores)

    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e4, math.nan], dtype=torch.float64).expand(2, PADDED, 2, 5)
    assert_padding_is_nothing(run, [randn(2, CHILDREN, 2, 5)], [garbage], present, list(model.parameters()))


@backends
@pytest.mark.parametrize(
    ("schedule", "name"),
    [("concurrent", name) for name in ("dynamic", "vector norm", "inverted attention, activations", "em", "heinsen")]
    + [("equilibrium", name) for name in ("inverted attention", "inverted attention, activations", "em", "heinsen")],
)
def test_stacks(name, schedule, backend):
    concurrent = schedule == "concurrent"
    layers = [layer_of(ROUTINGS[name](), children, 3, backend) for children in (None, 3)]
    stack = CapsuleStack(*layers, schedule=schedule if concurrent else Equilibrium(1e-12, max_iterations=300))

    def run(poses: Tensor, scores: Tensor) -> Capsules:
        out = stack(Capsules(poses, scores))
        assert all(found.forward[-1] <= 1e-12 for found in stack.convergence)
        return out

    assert_padding_is_nothing(
        run,
        [randn(2, CHILDREN, 2, 2), randn(2, CHILDREN)],
        [1e4 * randn(2, PADDED, 2, 2), nobody(2, PADDED)],
        PRESENT[:2],
        list(stack.parameters()),
        EXACT if concurrent else {"rtol": 1e-6, "atol": 1e-6},
    )
