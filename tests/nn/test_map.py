"""Maps of capsules that vote by a convolution: against plain loops, in blocks and at once, in 1 to 3 dimensions."""

import itertools
import math
import re
import warnings

import pytest
import torch
from graphs import assert_compiles_for_a_gpu, needs_interpreter
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import (
    CapsuleMap,
    Capsules,
    DynamicRouting,
    EfficientRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    Routing,
    SelfRouting,
    SlotAttention,
    VBRouting,
    VectorNormRouting,
    create_model,
    use_backend,
)
from torchcaps.nn import map as map_module
from torchcaps.ops import StoredVotes

SEGCAPS = DynamicRouting(3, learn_bias=True)


@pytest.fixture
def rows(monkeypatch):
    """Blocks of one row of one sample."""
    monkeypatch.setattr(map_module, "BLOCK", 1)


def gradients(layer: CapsuleMap, x: Tensor, **options) -> tuple[Capsules, list[Tensor]]:
    """The parents of children, and gradients of all of the parents' numbers."""
    torch.manual_seed(1)
    parents = layer(x, **options)
    results = [part for part in parents[:3] if part is not None]
    total = sum((part * torch.randn(part.shape)).sum() for part in results)
    return parents, list(torch.autograd.grad(total, [x, *layer.parameters()]))


def routed_in_rows(layer: CapsuleMap, x: Tensor) -> tuple[Capsules, list[Tensor]]:
    assert not layer._stores_votes(x)
    assert len(layer._blocks(x)) > len(x)
    return gradients(layer, x)


def by_loops(layer: CapsuleMap, x: Tensor) -> Tensor:
    """The poses of the parents: votes by loops over types, positions and windows, routed by dynamic routing."""
    batch, types, *sides, _ = x.shape
    parents, h = layer.out_capsules, layer.out_pose
    kernel, stride, padding = layer.kernel_size, layer.stride, layer.padding
    weight = layer.weight.flatten(2) if not layer.transposed else layer.weight.transpose(0, 1).flatten(2)
    if layer.transposed:
        out = [(n - 1) * s + k - 2 * p for n, s, k, p in zip(sides, stride, kernel, padding, strict=True)]
    else:
        out = [(n + 2 * p - k) // s + 1 for n, s, k, p in zip(sides, stride, kernel, padding, strict=True)]
    votes = x.new_zeros(batch, types, *out, parents * h)
    for position in itertools.product(*map(range, out)):
        for place, offset in enumerate(itertools.product(*map(range, kernel))):
            if layer.transposed:
                steps = [o + p - k for o, p, k in zip(position, padding, offset, strict=True)]
                if any(step % s for step, s in zip(steps, stride, strict=True)):
                    continue
                child = [step // s for step, s in zip(steps, stride, strict=True)]
            else:
                child = [o * s + k - p for o, s, k, p in zip(position, stride, offset, padding, strict=True)]
            if all(0 <= c < n for c, n in zip(child, sides, strict=True)):
                votes[:, :, *position] += x[:, :, *child] @ weight[:, :, place].mT
    votes = votes.unflatten(-1, (parents, h))
    logits = x.new_zeros(batch, types, *out, parents)
    for _ in range(3):
        s = (logits.softmax(-1).unsqueeze(-1) * votes).sum(1) + layer.routing.bias
        length = s.norm(dim=-1, keepdim=True)
        v = length**2 / (1 + length**2) * s / length
        logits = logits + (votes * v.unsqueeze(1)).sum(-1)
    return v.movedim(-2, 1)


def test_a_case_by_hand():
    """Two types of one number; a window of three, of weights 1, 10 and 100, is summed before two parents route it."""
    layer = CapsuleMap(2, 1, 1, 1, 3, DynamicRouting(1), padding=1, dims=1)
    layer.weight.data = torch.tensor([[[1.0, 10.0, 100.0]]])
    x = torch.tensor([[[1.0], [2.0], [3.0]], [[0.0], [0.0], [1.0]]]).unsqueeze(0)
    # Type 1: 10 + 200, 1 + 20 + 300, 2 + 30; type 2: 0, 100, 10. One parent has coefficients of 1.
    s = torch.tensor([210.0, 321.0 + 100, 32.0 + 10])
    assert_close(layer(x).poses, (s**2 / (1 + s**2)).view(1, 1, 3, 1))
    assert_close(layer.votes(x).votes, torch.tensor([[210.0, 0], [321, 100], [32, 10]]).view(3, 2, 1, 1))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "transposed"),
    [(3, 1, 1, False), (3, 2, 1, False), (2, 3, 0, False), (1, 1, 0, False), (4, 2, 1, True), (3, 3, 0, True),
     (3, 1, 2, True)],
)  # fmt: skip
def test_votes_and_routing_are_those_of_loops(dims, kernel, stride, padding, transposed, rows):
    layer = CapsuleMap(2, 3, 2, 2, kernel, SEGCAPS, stride, padding, transposed, dims)
    x = torch.randn(2, 2, *(5, 4, 3)[:dims], 2, requires_grad=True)
    expected = by_loops(layer, x)
    torch.manual_seed(1)
    expected_grads = torch.autograd.grad((expected * torch.randn(expected.shape)).sum(), [x, *layer.parameters()])
    for parents, grads in (routed_in_rows(layer, x), gradients(layer, x, return_coefficients=True)):
        assert_close(parents.poses, expected, rtol=0, atol=1e-12)
        assert_close(grads, list(expected_grads), rtol=1e-10, atol=1e-10)
        assert parents.pose_dims == (None if dims == 2 else 1)
        assert_close(parents.activations, expected.norm(dim=-1))
    assert_close(parents.coefficients.sum(2), torch.ones(2, 2, *expected.shape[2:-1]))
    assert parents.coefficients.shape == (2, 2, 3, *expected.shape[2:-1])


def test_unequal_sides_of_windows(rows):
    layer = CapsuleMap(2, 3, 2, 2, (3, 2), SEGCAPS, stride=(1, 2), padding=(1, 0))
    x = torch.randn(1, 2, 4, 7, 2, requires_grad=True)
    assert_close(routed_in_rows(layer, x)[0].poses, by_loops(layer, x))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("kernel", "stride"), [(5, 1), (5, 2), (4, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("size", [6, 7, 9])
def test_same_padding_is_that_of_keras(kernel, stride, size, transposed, rows):
    """In one dimension the votes are those of a map that is padded by hand, or of a result that is cut by hand."""
    layer = CapsuleMap(1, 1, 1, 1, kernel, DynamicRouting(1), stride, "same", transposed, dims=1)
    x = torch.randn(1, 1, size, 1)
    if transposed:
        total = kernel - stride
        votes = nn.functional.conv_transpose1d(x[..., 0], layer.weight, stride=stride)
        votes = votes[..., total // 2 : votes.shape[-1] - (total - total // 2)]
    else:
        total = max(0, (math.ceil(size / stride) - 1) * stride + kernel - size)
        padded = nn.functional.pad(x[..., 0], (total // 2, total - total // 2))
        votes = nn.functional.conv1d(padded, layer.weight, stride=stride)
    assert votes.shape[-1] == (size * stride if transposed else math.ceil(size / stride))
    assert_close(layer.votes(x).votes.flatten(), votes.flatten())
    assert_close(layer(x).poses.flatten(), layer.routing(layer.votes(x)).poses.flatten())


ROUTINGS = [
    SEGCAPS,
    DynamicRouting(3, softmax="children"),
    DynamicRouting(2, leaky=True, start="learned"),
    DynamicRouting(3, gradient="last"),
    EMRouting(),
    HeinsenRouting(),
    InvertedAttentionRouting(start="learned"),
    EfficientRouting(),
    VectorNormRouting(),
    VBRouting(),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_rows_are_routed_as_all_positions_at_once(routing, rows):
    """And as votes in a tensor of `StoredVotes`, whose sums are other functions."""
    layer = CapsuleMap(3, 2, 4, 5, 3, routing, padding="same")
    x = torch.randn(2, 3, 5, 4, 4, requires_grad=True)
    at_once = gradients(layer, x, return_coefficients=True)
    in_rows = gradients(layer, x) if isinstance(routing, VBRouting) else routed_in_rows(layer, x)
    for one, other in zip(at_once[0][:3], in_rows[0][:3], strict=True):
        assert_close(one, other)
    assert_close(at_once[1], in_rows[1], rtol=1e-8, atol=1e-10)
    stored = layer.routing(StoredVotes(layer.votes(x).votes))
    assert_close(stored.poses, at_once[0].poses.movedim(1, -2).flatten(0, 2))
    if isinstance(routing, VBRouting):  # its batch normalization needs all positions, in training
        assert layer._stores_votes(x)
        layer.eval()
        assert_close(routed_in_rows(layer, x)[0].poses, layer(x, return_coefficients=True).poses)


def test_gradients_are_those_of_differences(rows):
    layer = CapsuleMap(2, 2, 2, 2, 2, SEGCAPS)
    x = torch.randn(2, 2, 4, 3, 2, requires_grad=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values = {"weight": weight, "routing.bias": bias}
        return torch.func.functional_call(layer, values, (x,)).poses  # values that the layer has in this call alone

    assert not layer._stores_votes(x)
    inputs = [torch.randn_like(p).requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *inputs))
    with use_backend("reference"):
        assert torch.autograd.gradgradcheck(run, (x, *inputs))


def test_only_what_needs_a_gradient_gets_one(rows):
    layer = CapsuleMap(2, 2, 2, 2, 3, SEGCAPS, padding=1)
    x = torch.randn(1, 2, 4, 3, 2)
    layer(x).poses.sum().backward()
    grads = [p.grad for p in layer.parameters()]
    layer.weight.requires_grad_(False)
    layer.routing.bias.grad = None
    layer(x).poses.sum().backward()
    assert_close(layer.routing.bias.grad, grads[1])
    layer.requires_grad_(False)
    assert not layer(x).poses.requires_grad
    y = x.clone().requires_grad_()
    layer(y).poses.sum().backward()
    assert y.grad.abs().min() > 0


def test_scores_of_children_multiply_their_poses(rows):
    layer = CapsuleMap(2, 2, 2, 2, 3, SEGCAPS, padding=1)
    x, scores = torch.randn(1, 2, 4, 3, 2), torch.randn(1, 2, 4, 3)
    scores[0, 0, 1] = -torch.inf
    expected = layer(x * scores.sigmoid().unsqueeze(-1)).poses
    assert_close(layer(Capsules(x, scores)).poses, expected)
    mask = torch.rand(1, 2, 4, 3) > 0.5
    assert_close(layer(Capsules(x, mask)).poses, layer(x * mask.unsqueeze(-1)).poses)


def test_a_map_is_stored_where_it_is_small_or_the_routing_is_watched(rows, monkeypatch):
    layer = CapsuleMap(2, 3, 2, 2, 3, DynamicRouting(2), padding=1)
    x = torch.randn(1, 2, 4, 3, 2)
    seen = []
    with layer.routing.watched(seen.append):
        layer(x)
    assert [iteration.votes.coefficients().shape for iteration in seen] == [(12, 2, 3)] * 2
    with layer.routing.uniform():
        assert layer._stores_votes(x)
    random = CapsuleMap(2, 3, 2, 2, 3, DynamicRouting(2, start="random"), padding=1)
    assert random._stores_votes(x)
    assert not layer._stores_votes(x)
    monkeypatch.setattr(map_module, "BLOCK", 4 * 3 * 2 * 3 * 2)
    assert layer._stores_votes(x)
    assert [block.samples for block in layer._blocks(torch.cat([x, x]))] == [slice(0, 1), slice(1, 2)]
    monkeypatch.setattr(map_module, "BLOCK", 2 * 4 * 3 * 2 * 3 * 2 - 1)
    assert len(layer._blocks(torch.cat([x] * 3))) == 3
    assert layer(x[:0]).poses.shape == (0, 3, 4, 3, 2)


def test_half_precision_by_autocast_is_that_of_all_at_once(rows):
    layer = CapsuleMap(2, 3, 4, 4, 3, SEGCAPS, padding=1, dtype=torch.float32)
    x = torch.randn(1, 2, 4, 3, 4, dtype=torch.float32, requires_grad=True)
    results = []
    for backend in ("reference", "auto"):
        layer.backend = backend
        with torch.autocast("cpu", torch.bfloat16):
            poses = layer(x).poses
        assert poses.dtype == torch.bfloat16
        results.append((poses, *torch.autograd.grad(poses.float().square().sum(), [x, *layer.parameters()])))
    assert_close(*results, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_compiled_and_traced_code_stores_the_votes(rows, backend):
    layer = CapsuleMap(2, 3, 2, 2, 3, SEGCAPS, padding=1, backend=backend).eval()
    x = torch.randn(1, 2, 4, 3, 2)
    expected = layer(x).poses
    exported = torch.export.export(layer, (x,)).module()
    assert_close(exported(x).poses, expected)
    each = torch.func.vmap(lambda child: layer(child.unsqueeze(0)).poses[0])(torch.cat([x, 2 * x]))
    assert_close(each[:1], expected)


@needs_interpreter
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: CapsuleMap(2, 3, 4, 4, 3, EMRouting(), padding=1), (2, 2, 5, 5, 4)),
        (lambda: CapsuleMap(2, 3, 4, 4, 4, SEGCAPS, stride=2, padding=1, transposed=True), (2, 2, 5, 5, 4)),
        pytest.param(lambda: create_model("segcaps"), (1, 1, 32, 32), marks=pytest.mark.slow),
    ],
    ids=["map", "transposed", "segcaps"],
)
def test_compiled_for_a_gpu(module, shape):
    assert_compiles_for_a_gpu(module(), torch.randn(shape))


def test_second_derivatives_and_batched_gradients_are_refused_in_one_line(rows):
    layer = CapsuleMap(2, 3, 2, 2, 3, SEGCAPS, padding=1)
    x = torch.randn(1, 2, 4, 3, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no second derivatives \(create_graph=True\): use backend='reference'$"):
        torch.autograd.grad(layer(x).poses.sum(), x, create_graph=True)
    poses = layer(x).poses
    with pytest.raises(RuntimeError, match="no batched gradients: use backend='reference'$"):
        torch.autograd.grad(poses, x, torch.randn(2, *poses.shape), is_grads_batched=True)
    layer.backend = "reference"
    (grad,) = torch.autograd.grad(layer(x).poses.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.square().sum(), layer.weight)[0].any()


class Counting(Routing):
    """Counts the votes that it sees at most."""

    most = 0

    def step(self, votes, state, t):
        Counting.most = max(Counting.most, votes.votes.votes.numel())
        return votes.capsules(votes.weighted_sum()), None


def test_a_routing_sees_one_block_at_a_time_in_the_backward_pass_as_well(monkeypatch):
    monkeypatch.setattr(map_module, "BLOCK", 2 * 8 * 2 * 3 * 2)  # two rows
    layer = CapsuleMap(2, 3, 2, 2, 3, Counting(), padding=1)
    layer(torch.randn(2, 2, 9, 8, 2)).poses.sum().backward()
    assert Counting.most == 2 * 8 * 2 * 3 * 2


@pytest.mark.parametrize("transposed", [False, True])
def test_first_parents_are_gain_times_as_long_as_children(transposed):
    """Of random children: a parent of a transposed convolution gets votes of a part of the window."""
    torch.manual_seed(0)
    options = {"stride": 2, "transposed": True} if transposed else {}
    layer = CapsuleMap(4, 20, 16, 24, 4, InvertedAttentionRouting(1, layer_norm=False), padding="same", **options)
    x = torch.randn(4, 4, 24, 24, 16) / 4
    lengths = layer(x).poses[:, :, 4:-4, 4:-4].flatten(0, 3).norm(dim=-1)
    children = x.flatten(0, 3).norm(dim=-1)
    ratio = (lengths.square().mean() / children.square().mean()).sqrt().item()
    count = 4 * (4 if transposed else 16)
    assert ratio / count**0.5 == pytest.approx(layer.routing.gain / count**0.5, rel=0.1)


def test_what_cannot_learn_says_so_and_zeros_say_nothing(rows):
    layer = CapsuleMap(2, 3, 4, 4, 3, DynamicRouting(), padding=1)
    x = torch.randn(2, 2, 6, 5, 4)
    with pytest.warns(UserWarning, match="CapsuleMap.* starts dead"):
        layer(x * 1e-9)
    for children in (torch.zeros_like(x), x / 2):
        layer = CapsuleMap(2, 3, 4, 4, 3, DynamicRouting(), padding=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                layer(children)


def test_what_is_wrong_is_said_in_one_line():
    layer = CapsuleMap(2, 3, 4, 4, 3, SEGCAPS)
    right = torch.randn(1, 2, 5, 5, 4)
    cases = [
        (lambda: layer(right[0]), "expected poses of shape (batch, 2, height, width, 4), got (2, 5, 5, 4)"),
        (lambda: layer(right[..., :3]), "expected poses of shape (batch, 2, height, width, 4), got (1, 2, 5, 5, 3)"),
        (lambda: layer(right[:, :1]), "expected poses of shape (batch, 2, height, width, 4), got (1, 1, 5, 5, 4)"),
        (
            lambda: layer(right[:, :, :2]),
            "a map of 2x5 is too small for kernel_size=(3, 3) and padding=(0, 0): give a larger map, or use "
            "padding='same'",
        ),
        (
            lambda: layer(Capsules(right, torch.zeros(1, 2))),
            "expected scores of shape (1, 2, 5, 5), got (1, 2)",
        ),
        (
            lambda: CapsuleMap(2, 3, 4, 4, 2, SEGCAPS, stride=3, transposed=True),
            "a transposed convolution of kernel_size=2 and stride=3 leaves positions without votes: use a kernel_size "
            "of at least the stride",
        ),
        (lambda: CapsuleMap(2, 3, 4, 4, (3, 3, 3), SEGCAPS), "kernel_size must be an int or a pair, got (3, 3, 3)"),
        (
            lambda: CapsuleMap(2, 3, 4, 4, 3, SlotAttention()),
            "SlotAttention takes the poses of the children as their votes: use it in a CapsuleShared",
        ),
        (
            lambda: CapsuleMap(2, 3, 4, 4, 3, SelfRouting())(right),
            "this routing computes logits from the poses of the children, and a child of a CapsuleMap has a window of "
            "them: use a routing by votes, such as DynamicRouting",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()
    assert CapsuleMap(2, 3, 4, 4, 3, SEGCAPS, padding="same")(right[:, :, :2]).poses.shape == (1, 3, 2, 5, 4)


def test_the_repr_shows_what_is_not_the_default():
    layer = CapsuleMap(2, 3, 4, 5, 4, SEGCAPS, 2, "same", transposed=True, dims=1, backend="reference")
    assert layer.extra_repr() == (
        "2, 3, in_pose=4, out_pose=5, kernel_size=4, stride=2, padding='same', transposed=True, dims=1, "
        "backend='reference'"
    )
    assert CapsuleMap(2, 3, 4, 5, (3, 1), SEGCAPS).extra_repr() == "2, 3, in_pose=4, out_pose=5, kernel_size=(3, 1)"


class Dropped(Routing):
    """Draws random numbers in each iteration."""

    def step(self, votes, state, t):
        return votes.capsules(torch.nn.functional.dropout(votes.weighted_sum(), 0.5)), None


def test_random_numbers_of_a_routing_are_the_same_in_the_backward_pass(monkeypatch):
    """Votes are linear in weights and poses, so that each times its gradient sums to the sum of the parents."""
    monkeypatch.setattr("torchcaps.nn.map.BLOCK", 2**9)
    torch.manual_seed(0)
    layer = CapsuleMap(2, 3, 4, 4, 3, Dropped(), padding=1).double()
    poses = torch.randn(2, 2, 6, 7, 4, dtype=torch.float64, requires_grad=True)
    assert len(layer._blocks(poses)) > 2
    parents = layer(poses).poses
    state = torch.get_rng_state()
    parents.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    for x in (layer.weight, poses):
        torch.testing.assert_close((x * x.grad).sum(), parents.sum().detach())
