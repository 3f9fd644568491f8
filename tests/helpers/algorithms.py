"""The routing algorithms under test. Each entry is tested for every law, on every backend, with padding, gradients,
compiling and export.

An entry's oracle is written from the paper in plain loops. It gets the numbers of a layer as nested lists: the
children's poses, the votes, the gates and the learned parameters.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import oracles
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchcaps import (
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EfficientRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RandomRouting,
    Routing,
    SelfRouting,
    UniformRouting,
    VBRouting,
    VectorNormRouting,
    squash,
)
from torchcaps.ops import Votes


class Numbers(NamedTuple):
    """Input of an oracle, in nested lists of floats.

    Fields:
        votes: votes `[b][i][j][k]`.
        poses: poses of the children, `[b][i][r][d]`.
        gates: gates of the children, `[b][i]`, or None.
        learned: learned parameters by name; rows of groups are repeated, so that each child has its own.
    """

    votes: list
    poses: list
    gates: list | None
    learned: dict[str, list]


class Algorithm(NamedTuple):
    """An algorithm under test.

    Fields:
        make: function that builds the routing; it takes `iterations` and `gradient` if the routing's class does.
        oracle: function that computes the same in plain loops from the routing and the numbers.
        stable: whether the initial weights can keep the scale of the poses through many layers.
    """

    make: Callable[..., Routing]
    oracle: Callable[[Any, Numbers], oracles.Routed]
    stable: bool = True


def dynamic(routing: DynamicRouting, x: Numbers) -> oracles.Routed:
    options = {"softmax": routing.softmax, "leaky": routing.leaky, "gates": x.gates}
    given = {"bias": x.learned.get("bias"), "start": x.learned.get("first_logits")}
    return oracles.dynamic_routing(x.votes, routing.iterations, **options, **given)


def vector_norm(routing: VectorNormRouting, x: Numbers) -> oracles.Routed:
    activation = None if routing.activation is None else oracles.squash
    sharpness = x.learned.get("learned_sharpness", routing.sharpness)
    return oracles.vector_norm_routing(x.votes, routing.iterations, sharpness, activation=activation, gates=x.gates)


def inverted_attention(routing: InvertedAttentionRouting, x: Numbers) -> oracles.Routed:
    norm = partial(oracles.layer_norm, weight=x.learned.get("weight"), bias=x.learned.get("bias"))
    return oracles.inverted_attention_routing(
        x.votes,
        routing.iterations,
        normalize=norm if routing.layer_norm and len(x.votes[0][0][0]) > 1 else list,
        gates=x.gates,
        start=x.learned["first_poses"][0] if "first_poses" in x.learned else None,
        betas=(x.learned["beta_a"], x.learned["beta_u"]) if routing.activations else None,
    )


def em(routing: EMRouting, x: Numbers) -> oracles.Routed:
    numbers = x.learned["beta_a"], x.learned["beta_u"], routing.iterations, routing.inverse_temperature, routing.decay
    options = {"schedule": routing.schedule, "cost_range": routing.cost_range}
    return oracles.em_routing(x.votes, *numbers, gates=x.gates, **options)


def heinsen(routing: HeinsenRouting, x: Numbers) -> oracles.Routed:
    betas = x.learned["beta_use"], x.learned["beta_ignore"]
    return oracles.heinsen_routing(x.votes, *betas, routing.iterations, model=routing.model, gates=x.gates)


def self_routing(routing: SelfRouting, x: Numbers) -> oracles.Routed:
    children = [list(zip(votes, poses, strict=True)) for votes, poses in zip(x.votes, x.poses, strict=True)]
    return oracles.self_routing(children, x.learned["route_weight"], x.learned["route_bias"], gates=x.gates)


def variational_bayes(routing: VBRouting, x: Numbers) -> oracles.Routed:
    names = [f"{norm}.running_{value}" for norm in ("pose_norm", "score_norm") for value in ("mean", "var")]
    running = None if routing.training else tuple(x.learned[name] for name in names)
    return oracles.variational_bayes_routing(x.votes, routing.iterations, running, gates=x.gates)


def uniform(routing: UniformRouting, x: Numbers) -> oracles.Routed:
    activation = None if routing.activation is None else oracles.squash
    return oracles.uniform_routing(x.votes, x.learned.get("logits"), activation, gates=x.gates)


def efficient(routing: EfficientRouting, x: Numbers) -> oracles.Routed:
    return oracles.efficient_routing(x.votes, x.learned["coefficient_bias"], gates=x.gates)


ALGORITHMS: dict[str, Algorithm] = {
    "dynamic": Algorithm(DynamicRouting, dynamic),
    "dynamic_bias_leaky": Algorithm(lambda **kw: DynamicRouting(learn_bias=True, leaky=True, **kw), dynamic),
    "dynamic_learned_start": Algorithm(lambda **kw: DynamicRouting(start="learned", leaky=True, **kw), dynamic),
    "dynamic_over_children": Algorithm(lambda **kw: DynamicRouting(softmax="children", learn_bias=True, **kw), dynamic),
    "vector_norm": Algorithm(VectorNormRouting, vector_norm),
    "vector_norm_squash": Algorithm(
        lambda **kw: VectorNormRouting(sharpness=2.0, activation=squash, learn_sharpness=True, **kw), vector_norm
    ),
    "inverted_attention": Algorithm(InvertedAttentionRouting, inverted_attention),
    "inverted_attention_no_norm": Algorithm(
        # Its logits grow with the square of the poses, which therefore explode or vanish.
        lambda **kw: InvertedAttentionRouting(layer_norm=False, **kw),
        inverted_attention,
        stable=False,
    ),
    "inverted_attention_scores": Algorithm(
        lambda **kw: InvertedAttentionRouting(activations=True, **kw), inverted_attention
    ),
    "em": Algorithm(lambda **kw: EMRouting(inverse_temperature=1.0, **kw), em),
    "em_linear_lambda": Algorithm(
        # Costs rescaled to a range of 10 let a few parents take nearly all votes.
        lambda **kw: EMRouting(inverse_temperature=1.0, schedule="linear", cost_range=10, **kw),
        em,
        stable=False,
    ),
    "heinsen": Algorithm(HeinsenRouting, heinsen),
    # Unstable for the same reason as inverted attention without a norm.
    "heinsen_kmeans": Algorithm(lambda **kw: HeinsenRouting(model="kmeans", **kw), heinsen, stable=False),
    "self_routing": Algorithm(SelfRouting, self_routing),
    "efficient": Algorithm(EfficientRouting, efficient),
    "variational_bayes": Algorithm(VBRouting, variational_bayes),
    "uniform": Algorithm(UniformRouting, uniform),
    "uniform_no_activation": Algorithm(lambda: UniformRouting(activation=None), uniform),
    "random": Algorithm(RandomRouting, uniform),
}


def make(name: str, iterations: int | None = None, gradient: str = "unrolled") -> Routing:
    """Build the routing of an entry, with these options if its class takes them."""
    routing = ALGORITHMS[name].make()
    options = {"gradient": gradient} if iterations is None else {"iterations": iterations, "gradient": gradient}
    own = inspect.signature(type(routing)).parameters
    return ALGORITHMS[name].make(**{key: value for key, value in options.items() if key in own})


def route(routing: Routing, votes: Tensor | Votes, scores: Tensor | None = None, **values: Tensor) -> Capsules:
    """Route votes without a layer, with these values in place of learned ones, and return the coefficients too."""
    return routing.with_values(**values)(votes, scores, return_coefficients=True)


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    """Draw all parameters and buffers at random, as after some training, and put the module into evaluation mode.

    In training mode a batch norm makes the samples of a batch depend on each other.
    """
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5, 1.5)  # it may be a variance
    return module.eval()


def expected_of(name: str, layer: CapsuleLinear, poses: Tensor, scores: Tensor | None = None) -> oracles.Routed:
    """Run an entry's oracle on a layer's children."""
    rows = poses.unsqueeze(2) if poses.dim() == 3 else poses
    votes = oracles.votes_from_poses(
        rows.tolist(), layer.weight.tolist(), None if layer.bias is None else layer.bias.tolist()
    )
    # Repeat the parameters of groups for each child. They are those whose shape changes with the number of groups.
    shape, children = layer.layer_shape, poses.shape[1]
    other = layer.routing.for_layer(shape._replace(groups=shape.groups + 1)).state_dict()
    learned = {
        key: value.repeat_interleave(children // shape.groups, 0) if other[key].shape != value.shape else value
        for key, value in layer.routing.state_dict().items()
    }
    gates = None if scores is None else scores.sigmoid().tolist()
    lists = {key: value.tolist() for key, value in learned.items()}
    return ALGORITHMS[name].oracle(layer.routing, Numbers(votes, rows.tolist(), gates, lists))


def loss_of(results: Iterable[Tensor]) -> Tensor:
    """Return a loss in which every entry has a weight of its own."""
    return sum(
        (torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view_as(x) * (x + x.square())).sum()
        for x in results
    )


class Largest(TorchDispatchMode):
    """Keeps the number of entries of the largest tensor that an operator returns within this context."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_iter(result) if isinstance(x, Tensor))])
        return result
