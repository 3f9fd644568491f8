"""Laws that every routing algorithm must obey, as assertions for your own tests.

    def test_laws():
        assert_routing_laws(MyRouting())
        assert_stacks_are_alive(MyRouting())

The laws alone are not enough: a softmax over the wrong axis obeys all but `assert_coefficients_sum_to_one`. Test a new
algorithm on a case worked out by hand and against an oracle in plain loops as well.

Each assertion builds small capsule layers with the routing, in float64 on the CPU, with random parameters and buffers
as after some training. The layers are in evaluation mode, because a batch norm in training mode makes the samples of a
batch depend on each other; only `assert_stacks_are_alive` takes initial weights, in training mode. An assertion raises
an AssertionError that names the broken law.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.testing import assert_close

from torchcaps.capsules import Capsules
from torchcaps.nn import CapsuleConv2d, CapsuleLinear, CapsuleShared
from torchcaps.nn.first_pass import HARD
from torchcaps.nn.pose import Pose
from torchcaps.ops import Backend
from torchcaps.ops import backends as available
from torchcaps.routing import Gradient, Routing

BATCH, CHILDREN, PARENTS, POSE, OUT_POSE = 3, 5, 4, (2, 3), (2, 2)
# Children, parents and entries of a pose in the layers that `propose_gain` measures, and what it measures there.
SIZES = ((16, 10, 16), (128, 10, 16), (1152, 10, 16), (32, 32, 16), (32, 100, 8))
SOFT = 0.5
GAINS, SHARED_VARIANCES = (0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 2.8), (0.0, 0.9, 0.98)


def assert_routing_laws(routing: Routing) -> None:
    """Assert all laws below but that of deep stacks. The routing must not draw random numbers when it is called."""
    assert_attributes_are_true(routing)
    assert_coefficients_sum_to_one(routing)
    assert_children_have_no_order(routing)
    assert_parents_have_no_order(routing)
    assert_samples_are_independent(routing)
    assert_padding_changes_nothing(routing)
    assert_all_parameters_learn(routing)
    assert_backends_agree(routing)


def assert_attributes_are_true(routing: Routing) -> None:
    """Assert that `gives_scores` says whether the parents have scores."""
    with _set_float64_and_seed():
        scores = _layer(routing)(_children()).scores
    if routing.gives_scores != (scores is not None):
        raise AssertionError(f"gives_scores is {routing.gives_scores}, but the parents' scores are {scores}")


def assert_all_parameters_learn(routing: Routing) -> None:
    """Assert that all parameters of the routing have gradients: through all iterations, and through the last alone."""
    ways: list[Gradient] = ["unrolled", "last"]
    if not routing.last_state_contains_first and getattr(routing, "start", None) == "learned":
        ways = ["unrolled"]  # the routing refuses the other, in which its start learns nothing
    for gradient in ways:
        with _set_float64_and_seed():
            layer = _layer(routing)
            layer.routing.gradient = gradient
            _loss(layer(_children())).backward()
            for name, parameter in layer.routing.named_parameters():
                if parameter.grad is None or not parameter.grad.any():
                    raise AssertionError(f"{name} has no gradient with gradient={gradient!r}")


def assert_coefficients_sum_to_one(routing: Routing) -> None:
    """Assert that coefficients are not negative and sum to one over the parents of each child, or over the children of
    each parent; with a leak they sum to less."""
    with _set_float64_and_seed():
        coefficients = _layer(routing)(_children(), return_coefficients=True).coefficients
    assert coefficients is not None
    if not (coefficients >= 0).all():
        raise AssertionError(f"a coefficient is negative: {coefficients.min().item()}")
    sums = coefficients.sum(-1 if routing.softmax == "parents" else -2)
    if routing.leaky:
        if not (sums < 1).all():
            raise AssertionError(f"coefficients leave nothing to the leak: they sum to {sums.max().item()}")
        return
    over = f"coefficients do not sum to one over the {routing.softmax}"
    _assert_close(sums, torch.ones_like(sums), over)


def assert_children_have_no_order(routing: Routing) -> None:
    """Assert that the order of children that share their weights does not change the parents."""
    with _set_float64_and_seed():
        layer, (poses, scores, *_) = _layer(routing), _children()
        assert scores is not None
        order = torch.arange(CHILDREN).roll(2)
        _assert_same(
            layer(Capsules(poses[:, order], scores[:, order])), layer(Capsules(poses, scores)), "the order of children"
        )


def assert_parents_have_no_order(routing: Routing) -> None:
    """Assert that parents reordered with their parameters give the same results, reordered."""
    with _set_float64_and_seed():
        layer, children = _layer(routing), _children()
        expected = layer(children)
        order = torch.arange(PARENTS).roll(1)
        shape = layer.layer_shape
        more = routing.for_layer(shape._replace(parents=shape.parents + 1)).state_dict()
        for name, value in layer.routing.state_dict(keep_vars=True).items():
            for dim, (size, larger) in enumerate(zip(value.shape, more[name].shape, strict=True)):
                if larger == size + 1:
                    value.data = value.data.index_select(dim, order)
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                parameter.data = parameter.data[:, order]
        reordered = Capsules(*(None if x is None else x[:, order] for x in expected[:3]))  # type: ignore[arg-type]
        _assert_same(layer(children), reordered, "the order of parents")


def assert_samples_are_independent(routing: Routing) -> None:
    """Assert that each sample of a batch is routed as if it were alone."""
    with _set_float64_and_seed():
        layer, children = _layer(routing), _children()
        alone = [layer(Capsules(children.poses[i : i + 1], children.scores[i : i + 1])) for i in range(BATCH)]  # type: ignore[index]
        fields = [None if alone[0][k] is None else torch.cat([x[k] for x in alone]) for k in range(3)]
        _assert_same(layer(children), Capsules(*fields), "another sample of the batch")  # type: ignore[arg-type]


def assert_padding_changes_nothing(routing: Routing, backend: Backend = "auto") -> None:
    """Assert that children with score -inf change neither parents nor gradients, wherever they stand in the list, and
    that a sample of padding alone has finite results."""
    present = torch.tensor(
        [[0, 0, 1, 1, 0, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1]]
    ).bool()
    with _set_float64_and_seed():
        layer, (poses, scores, *_) = _layer(routing, backend), _children()
        padded = [1e4 * torch.randn(*present.shape, *POSE), torch.full(present.shape, -torch.inf)]
        assert scores is not None
        for padding, x in zip(padded, (poses, scores), strict=True):
            padding[present] = x.flatten(0, 1)
        results = []
        for children in ([poses, scores], padded):
            leaves = [x.requires_grad_() for x in children] + list(layer.parameters())
            out = layer(Capsules(children[0], children[1]), return_coefficients=True)
            results.append((out, torch.autograd.grad(_loss(out), leaves, allow_unused=True, materialize_grads=True)))
        (expected, expected_grads), (actual, grads) = results
        _assert_same(actual, expected, "padding")
        assert expected.coefficients is not None
        assert actual.coefficients is not None
        same = actual.coefficients[present].view_as(expected.coefficients)
        _assert_close(same, expected.coefficients, "padding changes the coefficients")
        for padded_grad, child_grad in zip(grads[:2], expected_grads[:2], strict=True):
            _assert_close(
                padded_grad[present].view_as(child_grad), child_grad, "padding changes the children's gradients"
            )
            if padded_grad[~present].any():
                raise AssertionError("padding has gradients of its own")
        for actual_grad, expected_grad in zip(grads[2:], expected_grads[2:], strict=True):
            _assert_close(actual_grad, expected_grad, "padding changes the gradients of parameters")
        nobody = layer(Capsules(poses, torch.full_like(scores, -torch.inf)))
        for x in (nobody.poses, nobody.scores, nobody.variances):
            if x is not None and not x.isfinite().all():
                raise AssertionError("a sample of padding alone gives numbers that are not finite")


def assert_backends_agree(routing: Routing) -> None:
    """Assert that all backends that this CPU can run compute the same parents, coefficients and gradients: with and
    without scores, in layers whose children share weights or not, and in convolutions."""
    flat = (BATCH, CHILDREN, *POSE)
    layers: tuple[tuple[Callable[..., Any], tuple[int, ...]], ...] = (
        (lambda **kw: CapsuleLinear(CHILDREN, PARENTS, POSE, OUT_POSE, bias=True, **kw), flat),
        (lambda **kw: CapsuleLinear(2, 2, 3, 4, share_positions=True, bias=True, **kw), (2, 2, 2, 3, 3)),
        (
            lambda **kw: CapsuleConv2d(2, PARENTS, POSE, OUT_POSE, (2, 3), stride=(1, 2), padding=1, bias=True, **kw),
            (2, 2, 3, 4, *POSE),
        ),
    )
    if routing.needs_poses:
        layers = tuple((partial(_shared, count), flat) for count in (CHILDREN, None))
    cpu: tuple[Backend, ...] = ("reference", "tiled", "native")
    backends = [name for name in cpu if available()[name] is None]
    for make, shape in layers:
        for scored in (False, True):
            results = []
            for backend in backends:
                with _set_float64_and_seed():
                    layer = _random(make(routing=routing, backend=backend))
                    poses = torch.randn(shape).requires_grad_()
                    scores = torch.randn(shape[: len(shape) - len(layer.in_pose)]).requires_grad_() if scored else None
                    out = layer(Capsules(poses, scores), return_coefficients=True)
                    leaves = [poses, *layer.parameters(), *([] if scores is None else [scores])]
                    grads = torch.autograd.grad(_loss(out), leaves, allow_unused=True, materialize_grads=True)
                    results.append([*(x for x in out[:4] if x is not None), *grads])
            for backend, result in zip(backends[1:], results[1:], strict=True):
                for x, y in zip(result, results[0], strict=True):
                    _assert_close(x, y, f"the backends {backends[0]} and {backend} disagree")


def assert_stacks_are_alive(routing: Routing, layers: int = 5) -> None:
    """Assert that capsules stay alive through a stack of layers with initial weights: fully connected or convolutional,
    wide or narrow, with vectors or matrices as poses.

    In each layer the mean length of the poses must be between 0.01 and 1, and different samples must have different
    parents. Where the length does not say how present a capsule is, it is divided by the root of the number of entries.
    The first coefficients must not be nearly hard: the largest is at most 0.9 on average.

    Args:
        layers: number of layers in a stack.

    Raises:
        ValueError: the routing has no vote weights (`needs_poses`).
    """
    _check_vote_weights(routing)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for name, stack, children in _stacks(routing, layers):
            for depth, layer in enumerate(stack, 1):
                children, size, spread, largest = _measured(layer, children)
                where = f"layer {depth} of {layers}, {name}"
                if not 0.01 <= size <= 1.001:
                    raise AssertionError(
                        f"capsules do not stay alive: their size is {size:.2g} in {where}; look at the routing's "
                        f"averages={routing.averages}, gain={routing.gain}, shared_variance={routing.shared_variance}"
                    )
                if not spread > 0.1:
                    raise AssertionError(f"capsules forget their input: all samples are alike in {where}")
                if largest > HARD:
                    raise AssertionError(
                        f"the first coefficients are nearly hard: the largest is {largest:.2g} on average in {where}; "
                        "torchcaps.testing.propose_gain(routing) proposes values for gain and shared_variance"
                    )


def _check_vote_weights(routing: Routing) -> None:
    if routing.needs_poses:
        raise ValueError(
            f"{type(routing).__name__} takes the poses as votes: it has no vote weights, gain and shared_variance"
        )


def _measured(layer: Any, children: Capsules) -> tuple[Capsules, float, float, float]:
    """Return the parents that a layer makes of children; their mean length, divided by the root of the number of
    entries where it does not say how present they are; their spread between samples, relative to their size; and the
    mean of the largest coefficient of a child, or of a parent where the softmax is over the children."""
    layer.passes.is_over = True  # what it would warn of is measured here
    parents = layer(children, return_coefficients=True)
    poses, routing = parents.poses.flatten(-len(layer.out_pose)), layer.routing
    size = vector_norm(poses, dim=-1).mean().item()
    if routing.gives_scores or not routing.measures_presence:
        size /= poses.shape[-1] ** 0.5
    spread = (poses.std(0).mean() / poses.abs().mean().clamp_min(1e-30)).item()
    coefficients: Any = parents.coefficients
    over: tuple[int, ...] = (-1,)
    if routing.softmax == "children":  # in a convolution the types and places of a window
        over = tuple(range(1 if coefficients.dim() == 3 else 3, coefficients.dim() - 1))
    return parents, size, spread, coefficients.amax(over).mean().item()


class Pass(NamedTuple):
    """What the first passes of a stack of layers look like with one gain and one shared variance.

    Fields:
        gain, shared_variance: the attributes of the routing.
        shortest, longest: least and greatest mean length of the parents in a layer. Where the length does not say how
            present a capsule is, it is divided by the root of the number of entries.
        spread: least standard deviation of the parents' poses between samples in a layer, relative to their size.
        largest: greatest mean of the largest coefficient of a child, or of a parent where the softmax is over the
            children: near 1 the coefficients are hard.
    """

    gain: float
    shared_variance: float
    shortest: float
    longest: float
    spread: float
    largest: float


def propose_gain(
    routing: Routing,
    gains: Sequence[float] = GAINS,
    shared_variances: Sequence[float] = SHARED_VARIANCES,
    layers: int = 3,
) -> Pass:
    """Measure the first passes of new layers over gain and shared variance, print them as a table, and propose values.

    The stacks have 16 to 1152 children and 10 to 100 parents, with poses of 8 and 16 entries, and children of length
    1/2 in random directions. Proposed is the row whose lengths are nearest to 1/2 in all layers, among those that pass
    `assert_stacks_are_alive`; rows with soft coefficients (the largest at most 1/2 on average) come first.

    Args:
        routing: the routing, which keeps its own values.
        gains, shared_variances: values to measure; those of the routing are measured too.
        layers: number of layers in a stack.

    Returns:
        The proposed row.

    Raises:
        ValueError: the routing has no vote weights (`needs_poses`), or no row keeps stacks alive; then try others, or
            bound the first votes by `max_difference`.
    """
    _check_vote_weights(routing)
    print("   gain   shared variance   lengths          spread   largest coefficient")
    rows = []
    pairs = {(routing.gain, routing.shared_variance), *itertools.product(gains, shared_variances)}
    for gain, shared_variance in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        row = measure_first_pass(routing, gain, shared_variance, layers)
        rows.append(row)
        mark = "  <- now" if (gain, shared_variance) == (routing.gain, routing.shared_variance) else ""
        lengths = f"{row.shortest:.2g} to {row.longest:.2g}"
        print(f"{gain:7.3g} {shared_variance:17.3g}   {lengths:16} {row.spread:6.2f} {row.largest:10.2f}{mark}")
    reasons = []
    for row in sorted(rows, key=lambda row: (row.largest > SOFT, _distance(row))):
        tried = _with(routing, row.gain, row.shared_variance)
        try:
            assert_stacks_are_alive(tried)
        except AssertionError as error:
            reasons.append(f"with gain {row.gain:g} and shared_variance {row.shared_variance:g}, {error}")
            continue
        print(f"proposed: gain = {row.gain:g}, shared_variance = {row.shared_variance:g}")
        return row
    raise ValueError(
        "no gain and shared variance keep stacks alive: try others, bound the first votes by max_difference, such as "
        f"0.3, or soften the logits, such as by 1 / D; {reasons[0]}"
    )


def _distance(row: Pass) -> float:
    """Return how far lengths are from 1/2, in any layer."""
    return max(abs(math.log(2 * max(x, 1e-30))) for x in (row.shortest, row.longest))


def _with(routing: Routing, gain: float, shared_variance: float) -> Routing:
    routing = copy.deepcopy(routing)
    routing.gain, routing.shared_variance, routing.init = gain, shared_variance, "fan_in"
    return routing


def measure_first_pass(routing: Routing, gain: float, shared_variance: float, layers: int = 3) -> Pass:
    """Measure the first passes with one gain and one shared variance, see `propose_gain`."""
    routing = _with(routing, gain, shared_variance)
    lengths, spreads, largest = [], [], []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for count, parents, pose in SIZES:
            children = Capsules(torch.randn(8, count, pose) / (2 * pose**0.5))
            for before in [count] + [parents] * (layers - 1):
                layer = CapsuleLinear(before, parents, pose, pose, routing)
                children, size, spread, hardest = _measured(layer, children)
                lengths.append(size)
                spreads.append(spread)
                largest.append(hardest)
    return Pass(gain, shared_variance, min(lengths), max(lengths), min(spreads), max(largest))


def _stacks(routing: Routing, layers: int) -> Iterator[tuple[str, list[Any], Capsules]]:
    """Yield stacks of layers of usual sizes, and children with lengths around one half: name, layers, children."""
    poses: tuple[tuple[Pose, int], ...] = ((8, 32), ((4, 4), 16), (16, 10))
    for pose, width in poses:
        first = CapsuleLinear(20 * width, width, pose, pose, routing)
        others = [CapsuleLinear(width, width, pose, pose, routing) for _ in range(layers - 1)]
        shared = [CapsuleLinear(None, width, pose, pose, routing, expected_children=width) for _ in range(layers)]
        conv = [CapsuleConv2d(8, 8, pose, pose, 3, routing, padding=1) for _ in range(layers)]
        kinds: tuple[tuple[str, list[Any], tuple[int, ...]], ...] = (
            ("connected", [first, *others], (8, 20 * width)),
            ("with shared weights", shared, (8, width)),
            ("convolutional", conv, (4, 8, 6, 6)),
        )
        for kind, stack, size in kinds:
            children = torch.randn(*size, *stack[0].in_pose)
            features = math.prod(stack[0].in_pose)
            yield f"{kind}, with poses of {pose}", stack, Capsules(children / (2 * features**0.5))


def _layer(routing: Routing, backend: Backend = "auto") -> Any:
    """Return a layer whose children share their weights, so that it takes any number of them."""
    if routing.needs_poses:
        return _random(_shared(None, routing, backend))
    return _random(CapsuleLinear(None, PARENTS, POSE, OUT_POSE, routing, bias=True, backend=backend))


def _shared(count: int | None, routing: Routing, backend: Backend) -> CapsuleShared:
    return CapsuleShared(count, PARENTS, POSE, routing, OUT_POSE if routing.transforms else None, backend=backend)


def _random(layer: Any) -> Any:
    """Draw the parameters and buffers of a layer at random, and put it into evaluation mode."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 1.5)  # it may be a variance
    return layer.eval()


def _children() -> Capsules:
    return Capsules(torch.randn(BATCH, CHILDREN, *POSE), torch.randn(BATCH, CHILDREN))


@contextlib.contextmanager
def _set_float64_and_seed() -> Iterator[None]:
    """Set float64 and a fixed random seed within this context, and restore both afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)


def _loss(parents: Capsules) -> Tensor:
    """Return a loss in which every number of the parents has a weight of its own."""
    fields = [x for x in parents[:3] if x is not None]
    return torch.stack([(torch.linspace(0.5, 1.5, x.numel()).view_as(x) * x.sin()).sum() for x in fields]).sum()


def _assert_same(actual: Capsules, expected: Capsules, what: str) -> None:
    for field in ("poses", "scores", "variances"):
        x, y = getattr(actual, field), getattr(expected, field)
        if y is not None:
            _assert_close(x, y, f"{what} changes the {field}")


def _assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    assert_close(actual, expected, msg=lambda m: f"{what}: {m}")
