"""What a capsule layer says at its first pass in training mode: once, in one line, and only if it cannot learn."""

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchcaps import (
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleHead,
    CapsuleLinear,
    Capsules,
    CapsuleShared,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    SelfRouting,
    SlotAttention,
    UniformRouting,
    VBRouting,
    VectorNormRouting,
    create_model,
    squash,
)
from torchcaps.nn import first_pass
from torchcaps.ops import StoredVotes
from torchcaps.routing import Routing


def changed(routing: Routing, **attributes: float) -> Routing:
    for name, value in attributes.items():
        setattr(routing, name, value)
    return routing


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def said(run) -> list[str]:
    """Return the warnings of what runs, of which none is hidden."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = [x for x in caught if "Capsule" in str(x.message)]
    assert all(x.filename == __file__ for x in found)  # the line of the user's code
    return [str(x.message) for x in found]


def learn(layer: nn.Module, children: Tensor | Capsules) -> None:
    """A step of a training whose loss reads the lengths of the parents."""
    layer(children).activations.sum().backward()


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    )  # fmt: skip


def saturated(routing: Routing | None = None) -> tuple[CapsuleLinear, Tensor]:
    """Return what everybody tries first: 64 channels of a small CNN as 128 children of 8 numbers."""
    children = convolutions()(torch.rand(16, 1, 8, 8)).reshape(16, 128, 8).detach()
    return CapsuleLinear(128, 10, 8, 16, DynamicRouting() if routing is None else routing), children


def test_the_obvious_first_network_says_what_is_wrong():
    features, layer = convolutions(), CapsuleLinear(128, 10, 8, 16, DynamicRouting())
    optimizer = torch.optim.Adam([*features.parameters(), *layer.parameters()])

    def train():
        for _ in range(3):
            loss = F.cross_entropy(layer(features(torch.rand(16, 1, 8, 8)).reshape(16, 128, 8)).activations,
                                   torch.arange(16) % 10)  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    (message,) = said(train)
    assert message.startswith("CapsuleLinear(128, 10, in_pose=8, out_pose=16) starts saturated: the activations of its")
    assert "are 0.98" in message or "are 0.99" in message
    assert "Squash the children" in message
    assert "\n" not in message


def test_with_the_remedy_it_is_silent():
    layer, children = saturated()
    assert said(lambda: learn(layer, squash(children))) == []
    assert said(lambda: CapsuleHead(64, 10)(torch.rand(16, 64, 4, 4)).sum().backward()) == []


def test_it_is_said_once():
    layer, children = saturated()
    assert said(lambda: learn(layer.eval(), children)) == []
    assert len(said(lambda: learn(layer.train(), children))) == 1
    other, lengths = saturated()[0], []
    assert said(lambda: lengths.append(other(children).activations.sum())) == []
    assert len(said(lambda: [lengths[0].backward(retain_graph=True) for _ in range(2)])) == 1
    for again in (layer, copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert said(lambda again=again: learn(again, children)) == []
    assert not layer.routing.is_watched
    assert set(layer.state_dict()) == {"weight"}


def test_weights_that_were_loaded_are_not_first_weights():
    layer, children = saturated()
    other, _ = saturated()
    other.load_state_dict(layer.state_dict())
    assert said(lambda: learn(other, children)) == []
    both = nn.Sequential(nn.Linear(16, 16), layer)
    assert both.load_state_dict({f"1.{name}": value for name, value in other.state_dict().items()}, strict=False)
    assert layer.passes.is_over
    layer.reset_parameters()  # draws new first weights
    assert not layer.passes.is_over
    network = create_model("capsnet_small", pretrained="mnist").train()
    assert said(lambda: network(255 * torch.rand(4, 1, 28, 28))) == []


def test_a_shallow_copy_shares_the_first_pass():
    """nn.DataParallel makes such copies at every call."""
    layer, children = saturated()
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.routing = layer.weight, layer.routing
    assert len(said(lambda: learn(replica, children))) == 1
    assert said(lambda: learn(layer, children)) == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_says_nothing(use_reentrant):
    layer, children = saturated()

    def run():
        x = children.clone().requires_grad_()
        checkpoint(lambda x: layer(x).activations, x, use_reentrant=use_reentrant).sum().backward()

    assert len(said(run)) == 1
    assert said(run) == []


def test_only_the_first_process_says_it(monkeypatch):
    layer, children = saturated()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert said(lambda: learn(layer, children)) == []


LONG_VOTES = {"gain": 100.0, "max_difference": 100.0, "shared_variance": 0.0}


@pytest.mark.parametrize(
    ("routing", "size", "message"),
    [
        (DynamicRouting(), 1e-4, "starts dead: the largest activation of its parents is"),
        (DynamicRouting(init="paper"), 1e-6, "starts dead: .* Use a routing with init='fan_in'"),
        (InvertedAttentionRouting(layer_norm=False), 1e-6, "starts dead: the largest length of its parents is"),
        (EMRouting(), 1e-5, "starts dead: the largest length .* a larger routing.gain"),
        (DynamicRouting(), 100, "much longer .* root mean square of [89]"),
        (SelfRouting(), 100, "much longer"),
        (DynamicRouting(init="paper"), 100, "much longer"),
        (UniformRouting(), 4, "starts saturated: .* by 0.0"),
        (changed(VectorNormRouting(activation=squash), gain=20.0), 1, "starts saturated"),
        (changed(InvertedAttentionRouting(), **LONG_VOTES), 1, r"hard coefficients: the largest of a child is 0\.9"),
        (changed(VBRouting(init="fan_in"), **LONG_VOTES), 1, "hard coefficients: the largest of a child"),
        (changed(VectorNormRouting(sharpness=1000.0)), 1, "hard coefficients: the largest of a parent"),
    ],
    ids=str,
)
def test_every_problem_is_named(routing, size, message):
    layer, children = CapsuleLinear(64, 10, 8, 16, routing), size * torch.randn(4, 64, 8)
    (found,) = said(lambda: learn(layer, children))
    assert re.search(message, found), found


def test_what_is_no_problem():
    children = saturated()[1]
    alone = CapsuleLinear(64, 1, 8, 16, UniformRouting())
    assert said(lambda: learn(alone, 4 * torch.randn(16, 64, 8))) == []  # one class is always present
    assert said(lambda: learn(saturated(InvertedAttentionRouting())[0], children)) == []  # lengths of a LayerNorm
    assert said(lambda: learn(saturated(HeinsenRouting())[0], children)) == []
    shared = CapsuleShared(None, 4, 8, SlotAttention())
    assert said(lambda: shared(1000 * children)) == []  # it normalizes its children
    padded = Capsules(torch.cat([children, torch.full_like(children, 1e6)], 1), torch.arange(256).expand(16, -1) < 128)
    assert said(lambda: CapsuleLinear(None, 10, 8, 16, SelfRouting(), expected_children=128)(padded)) == []


def test_one_sample_has_no_spread():
    layer, children = saturated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of the standard deviation of one number
        learn(layer, children[:1])


def test_a_few_samples_may_be_of_one_class():
    layer = CapsuleLinear(64, 10, 8, 16, UniformRouting())
    assert said(lambda: layer(4 * torch.randn(1, 64, 8).expand(4, -1, -1)).poses.sum().backward()) == []


def above() -> CapsuleLinear:
    return CapsuleLinear(10, 4, 16, 8, DynamicRouting())


# Losses of poses (16, 10, 16) whose lengths are near 1, by who reads them.
LENGTHS = lambda parents: (parents.activations - 0.1).square().mean()  # noqa: E731
READERS = {
    "lengths": LENGTHS,
    "lengths and a decoder": lambda parents: LENGTHS(parents) + parents.poses[range(16), torch.arange(16) % 10].mean(),
    "a linear layer": lambda parents: nn.Linear(160, 3, dtype=parents.poses.dtype)(parents.poses.flatten(1)).mean(),
    "weights along the poses": lambda parents: (parents.poses * parents.poses[:1].detach()).mean(),
    "a capsule layer": lambda parents: LENGTHS(above().to(parents.poses.dtype)(parents)),
    "nobody": lambda parents: 0 * parents.poses.mean(),
}
DIRECTIONS = {
    "many": lambda: torch.randn(16, 64, 8),
    "a line": lambda: torch.randn(1, 64, 8) * torch.tensor([1.0, -1.0, -1.0, -1.0] * 4)[:, None, None],
    "one": lambda: torch.randn(1, 64, 8) + 1e-3 * torch.randn(16, 64, 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("passes", [1, 100])
@pytest.mark.parametrize(
    ("reader", "directions", "learns"),
    [
        ("lengths", "many", False),
        ("lengths and a decoder", "many", False),
        ("a linear layer", "many", True),
        ("a linear layer", "one", False),
        ("weights along the poses", "a line", True),
        ("a capsule layer", "many", True),
        ("nobody", "many", True),
    ],
)
def test_lengths_near_1_are_a_fault_where_nobody_reads_directions(reader, directions, learns, passes, dtype):
    torch.manual_seed(0)
    layer = CapsuleLinear(64, 10, 8, 16, UniformRouting(), dtype=dtype)
    layer.passes.count = passes - 1
    children = 4 * DIRECTIONS[directions]().to(dtype)
    messages = said(lambda: READERS[reader](layer(children)).backward())
    expected = "starts saturated" if passes == 1 else "has saturated since training began"
    assert [message for message in messages if expected in message] == messages
    assert len(messages) == (not learns)


def short_stack(schedule) -> CapsuleStack:
    layers = [CapsuleLinear(32, 32, 16, 16, HeinsenRouting(2)) for _ in range(3)]
    return CapsuleStack(*layers, schedule=schedule)


def test_lengths_that_saturate_later_are_said_once_at_the_hundredth_pass():
    layer, children = saturated()
    children = squash(children)
    assert said(lambda: [learn(layer, children) for _ in range(50)]) == []
    layer.weight.data *= 100  # one step with a learning rate that is too high
    assert said(lambda: [learn(layer, children) for _ in range(49)]) == []
    (message,) = said(lambda: [learn(layer, children) for _ in range(101)])
    assert "has saturated since training began: the lengths of its parents are 1.0000 on average" in message
    assert "Lower the learning rate" in message
    dead, _ = saturated()
    dead(children)
    dead.weight.data *= 1e-9
    (message,) = said(lambda: [dead(children) for _ in range(101)])
    assert "has died since training began" in message
    assert dead.passes.is_over


@pytest.mark.parametrize("schedule", ["sequential", "concurrent"])
def test_the_first_layer_of_a_stack_says_it_for_all(schedule):
    (message,) = said(lambda: short_stack(schedule)(1e-6 * torch.randn(4, 32, 16)))
    assert "starts dead" in message
    stack = short_stack(schedule)
    assert said(lambda: stack(torch.randn(4, 32, 16))) == []
    assert [layer.passes.count for layer in stack.layers] == [1, 1, 1]


def test_stacks_and_layers_that_follow_each_other_say_it_once():
    def dead() -> CapsuleLinear:
        return CapsuleLinear(32, 32, 16, 16, HeinsenRouting(2))

    for first, second in (
        (dead(), CapsuleStack(dead(), dead())),
        (CapsuleStack(dead(), dead()), dead()),
        (CapsuleStack(dead(), dead()), CapsuleStack(dead(), dead(), schedule="concurrent")),
    ):
        assert len(said(lambda first=first, second=second: second(first(1e-6 * torch.randn(4, 32, 16))))) == 1


def test_what_says_nothing_is_not_the_first_pass():
    layer, children = saturated()
    assert said(lambda: learn(layer, children[:0])) == []
    with pytest.raises(ValueError, match="expected"):
        layer(children[:, :5])
    with torch.no_grad():
        assert said(lambda: layer(children)) == []
    assert layer.passes.count == 0
    assert len(said(lambda: learn(layer, children))) == 1
    other, _ = saturated()
    other.load_state_dict({}, strict=False)
    assert len(said(lambda: learn(other, children))) == 1


def test_nan_zeros_and_lonely_children_are_no_problem_of_the_layer():
    layer, children = saturated()
    assert said(lambda: layer(torch.full_like(children, torch.nan))) == []
    assert said(lambda: saturated()[0](torch.zeros_like(children))) == []
    alone = Capsules(children, torch.arange(128).expand(16, -1) < 1)
    assert said(lambda: saturated(VectorNormRouting())[0](alone)) == []
    line = CapsuleConv1d(2, 3, 8, 8, 3, EMRouting(), padding=1)
    garbage = torch.cat([torch.randn(4, 2, 5, 8), torch.full((4, 2, 5, 8), 1e4)], 2)
    scores = torch.where(torch.arange(10) < 5, 0.0, -torch.inf).expand(4, 2, 10)
    assert said(lambda: line(Capsules(garbage, scores, pose_dims=1))) == []


class StoredLayer(CapsuleLinear):
    """A layer of somebody who stores the votes."""

    def votes(self, capsules, out_capsules=None):
        poses = capsules.poses if isinstance(capsules, Capsules) else capsules
        return StoredVotes(torch.einsum("bid,ijdh->bijh", poses, self.weight))


def test_stored_votes_are_looked_at_as_far_as_they_tell():
    children = saturated()[1]
    (message,) = said(lambda: learn(StoredLayer(128, 10, 8, 16, DynamicRouting()), children))
    assert message.startswith("StoredLayer(128, 10, in_pose=8, out_pose=16) starts saturated")


def test_padding_of_a_convolution_is_no_child():
    conv = CapsuleConv2d(4, 8, 8, 8, 3, EMRouting(), padding=1)
    (message,) = said(lambda: conv(100 * torch.randn(2, 4, 3, 3, 8)))
    assert "root mean square of" in message
    conv = CapsuleConv2d(4, 8, 8, 8, 3, EMRouting(), padding=1)
    assert said(lambda: conv(torch.randn(2, 4, 3, 3, 8))) == []


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_no_votes_are_kept_until_a_stack_ends(backend):
    """Only those in a few samples are, as copies."""
    layers = [CapsuleLinear(64, 64, 8, 8, DynamicRouting(2), backend=backend) for _ in range(2)]
    kept = []
    keep = first_pass._keep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_pass, "_keep", lambda last, *rest: (keep(last, *rest), kept.append(last)))
        CapsuleStack(*layers)(0.1 * torch.randn(64, 64, 8, requires_grad=True))
    for seen in kept[-1].values():
        votes = seen.votes.votes
        assert votes.batch == 8
        assert votes.poses.numel() == 8 * 64 * 8 == votes.poses.untyped_storage().size() // 4
        assert not votes.poses.requires_grad


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_looking_changes_nothing(backend):
    for routing in (DynamicRouting(), EMRouting(), SelfRouting(), VBRouting(), DynamicRouting(start="random")):
        torch.manual_seed(0)
        layer = CapsuleLinear(32, 4, 8, 8, routing, backend=backend)
        x = torch.randn(4, 32, 8, requires_grad=True)
        other = copy.deepcopy(layer)
        other.passes.is_over = True
        state = torch.get_rng_state()
        results = []
        for each in (layer, other):
            torch.set_rng_state(state)
            out = each(x)
            results.append([out.poses, *torch.autograd.grad(out.poses.square().sum(), [x, each.weight])])
            results[-1] += [*each.state_dict().values(), torch.get_rng_state()]
        assert layer.passes.count == 1
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


class Poses(nn.Module):
    """A layer whose output can be traced."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor) -> Tensor:
        return self.layer(poses).poses


def test_compiled_exported_and_transformed_layers_say_nothing():
    layer, children = saturated()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert said(lambda: compiled(children)) == []
    assert said(lambda: torch.export.export(layer, (children,))) == []
    assert said(lambda: torch.vmap(lambda x: layer(x[None]).poses)(children)) == []
    assert said(lambda: torch.jit.trace(Poses(layer), children, check_trace=False)) == []
    assert said(lambda: make_fx(lambda x: layer(x).poses)(children)) == []
    assert said(lambda: layer.to("meta")(children.to("meta"))) == []
    stack = CapsuleStack(saturated()[0], CapsuleLinear(10, 4, 16, 8, DynamicRouting()))
    assert said(lambda: torch.compile(stack, fullgraph=True, backend="eager")(children)) == []
    assert stack.layers[0].passes.count == 0
