"""Feedback agreement: a regulariser that asks of any two layers that the higher can draw the lower again.

Li, Guo, Dai, Ouyang, Wang: Neural Network Encapsulation (2018), section 3.2 and appendix B.

The text has lost the numbers of its formulas; epsilon and the number of iterations are those of the authors' code
(github.com/hli2020/nn_encapsulation). Appendix B has as many groups of the generator's convolution as a capsule has
dimensions; here they are as many as there are types, as in the master branch of the layers that it is to undo. Its
convolution is 3x3 of stride 1 or 2; for larger strides it grows, so that every position gets something.
"""

import contextlib
import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.nn.encapsulated import as_map
from torchcaps.nn.modes import evaluating
from torchcaps.nn.relu_squash import relu_squash
from torchcaps.nn.transport import Cost, check_transport, feature_kl, sinkhorn_divergence
from torchcaps.ops import at_least_float32

Divergence = Literal["sinkhorn", "kl"]


class MapShape(NamedTuple):
    """Of a layer's output as a feature map.

    Fields:
        channels, height, width: of the map.
        types: of capsules, each of `channels // types` neighbouring channels; None if they are no capsules.
    """

    channels: int
    height: int
    width: int
    types: int | None = None


class AgreementUnit(nn.Module):
    r"""How far a lower layer is from what a generator makes of a higher one.

    With y the lower layer's batch and z the higher layer's,

    .. math::
        x = \text{squash}(\text{ReLU}(\text{BN}(\text{conv}^T(z)))), \quad
        \text{divergence} = D(\text{critic}(x), \text{critic}(y))

    where the critic is twice a 3x3 convolution of stride 2, BN and ReLU: to a quarter of the channels, then to one.
    Both sides have gradients: all that is learned makes the divergence smaller, the critic too.

    Args:
        lower, higher: shapes of the maps; the higher layer's is at most as large as the lower's.
        divergence: D, "sinkhorn" (:func:`torchcaps.functional.sinkhorn_divergence`) or "kl"
            (:func:`torchcaps.functional.feature_kl`).
        cost, eps, iterations, debias, plan_gradient: of the Sinkhorn divergence.
        critic: False compares the maps themselves.
        capsule_generator: squash what is generated if the lower layer has capsules; and if both have as many types,
            generate each type from its own. False is an ordinary generator.

    Shape:
        - Input: the maps of the lower and of the higher layer, `(batch, channels, height, width)`.
        - Output: the divergence, a scalar.

    Reference:
        Li et al. 2018, section 3.2 and appendix B. Table 3 has the options as KL_loss and d1 to d5.
    """

    def __init__(
        self,
        lower: MapShape,
        higher: MapShape,
        divergence: Divergence = "sinkhorn",
        cost: Cost = "cosine",
        eps: float = 1.0,
        iterations: int = 10,
        debias: bool = True,
        plan_gradient: bool = False,
        critic: bool = True,
        capsule_generator: bool = True,
    ):
        super().__init__()
        if divergence not in ("sinkhorn", "kl"):
            raise ValueError(f"divergence must be 'sinkhorn' or 'kl', got {divergence!r}")
        check_transport(cost, eps, iterations)
        self.lower, self.higher, self.divergence = lower, higher, divergence
        self.cost, self.eps, self.iterations = cost, eps, iterations
        self.debias, self.plan_gradient = debias, plan_gradient
        self.types = lower.types if capsule_generator else None
        self.generator = nn.Sequential(
            _upsampling(lower, higher, self.types if self.types == higher.types else None),
            nn.BatchNorm2d(lower.channels),
            nn.ReLU() if self.types is None else nn.Identity(),  # which comes with the squash
        )
        _check_comparison(lower, critic, divergence, cost)
        self.critic: nn.Sequential | None = None
        if critic:
            quarter = max(1, lower.channels // 4)
            self.critic = nn.Sequential(*_reduction(lower.channels, quarter), *_reduction(quarter, 1))

    def generate(self, higher: Tensor) -> Tensor:
        """A map like the lower layer's from the higher layer's."""
        generated = self.generator(higher)
        return generated if self.types is None else relu_squash(generated, self.lower.channels // self.types)

    def forward(self, lower: Tensor, higher: Tensor) -> Tensor:
        for which, x, expected in (("lower", lower, self.lower), ("higher", higher, self.higher)):
            if tuple(x.shape[1:]) != expected[:3]:
                shape = ", ".join(map(str, expected[:3]))
                raise ValueError(f"expected the {which} layer's map of shape (batch, {shape}), got {tuple(x.shape)}")
        x, y = self.generate(higher), lower
        if self.critic is not None:
            x, y = self.critic(x), self.critic(y)
        if self.divergence == "kl":
            return feature_kl(x, y)
        return sinkhorn_divergence(x, y, self.eps, self.iterations, self.cost, self.debias, self.plan_gradient)

    def extra_repr(self) -> str:
        options = f"{_show(self.lower)} from {_show(self.higher)}, divergence={self.divergence!r}"
        if self.divergence == "kl":
            return options
        return options + (
            f", cost={self.cost!r}, eps={self.eps}, iterations={self.iterations}, debias={self.debias}, "
            f"plan_gradient={self.plan_gradient}"
        )


class FeedbackAgreement(nn.Module):
    """A network, and in training how far some of its layers are from what higher ones can make of them.

        feedback = FeedbackAgreement(model, pairs=[("features.4", "features.7")])
        optimizer = torch.optim.Adam([*model.parameters(), *feedback.parameters()])
        prediction, divergence = feedback(images)
        loss = criterion(prediction, labels) + divergence

    The network stays as it is: it is no part of this module, whose parameters and state are those of its units alone,
    and it is watched only while this module runs it in training. Move, save and switch to evaluation both.

    Args:
        model: any network of images.
        pairs: names of a lower and a higher layer each, as in `model.named_modules()`. A layer gives a map `(batch,
            channels, height, width)`, features `(batch, features)`, which are a map of one position, capsules, with or
            without a grid, of which the poses are compared, or a Prediction with capsules. Of a layer that runs several
            times the last output counts; what the network changes in place afterwards counts as changed. Of a network
            that `torch.compile` gave, training runs uncompiled; one that `model.compile()` compiled in place runs as
            it is.
        image_shape: of what the network is run on once, in evaluation, to learn the layers' shapes.
        weight: of the divergence in the loss, the paper's lambda.
        divergence, cost, eps, iterations, debias, plan_gradient, critic, capsule_generator: of each pair's
            :class:`AgreementUnit`.

    Shape:
        - Input: what the network takes.
        - Output: what the network gives, and the sum over the pairs times the weight, a scalar; in evaluation zero.

    Raises:
        TypeError: a layer gives something else; the message has its name.
        ValueError: a layer is not there, did not run, or has a size that its pair cannot be generated from.

    Reference:
        Li et al. 2018, section 3.2: two pairs in a module gave 4.55 % of errors on CIFAR-10, one 4.58 %, none 5.82 %.
    """

    def __init__(
        self,
        model: nn.Module,
        pairs: Iterable[Sequence[str]],
        image_shape: tuple[int, ...] = (3, 32, 32),
        weight: float = 10.0,
        divergence: Divergence = "sinkhorn",
        cost: Cost = "cosine",
        eps: float = 1.0,
        iterations: int = 10,
        debias: bool = True,
        plan_gradient: bool = False,
        critic: bool = True,
        capsule_generator: bool = True,
    ):
        super().__init__()
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight must be at least 0 and finite, got {weight}")
        self.pairs, self.weight = _check_pairs(pairs, model), weight
        self._model = (model,)  # in a tuple it is no submodule
        options = divergence, cost, eps, iterations, debias, plan_gradient, critic, capsule_generator
        shapes = self._shapes(image_shape)
        self.units = nn.ModuleList()
        for lower, higher in self.pairs:
            try:
                self.units.append(AgreementUnit(shapes[lower], shapes[higher], *options))
            except ValueError as error:
                raise ValueError(f"layers {lower!r} and {higher!r}: {error}") from error
        parameter = _parameter(model)
        if parameter is not None:
            self.to(parameter)

    def forward(self, *inputs: Any) -> tuple[Any, Tensor]:
        if not self.training:
            return self._model[0](*inputs), at_least_float32(next(self.parameters()).new_zeros(()))
        prediction, maps = self._watch(*inputs)
        divergences = [
            unit(maps[lower][0], maps[higher][0]) for unit, (lower, higher) in zip(self.units, self.pairs, strict=True)
        ]
        return prediction, self.weight * torch.stack(divergences).sum()

    def _shapes(self, image_shape: tuple[int, ...]) -> dict[str, MapShape]:
        parameter = _parameter(self._model[0])
        zeros = torch.zeros(2, *image_shape) if parameter is None else parameter.new_zeros(2, *image_shape)
        with torch.no_grad(), evaluating(self._model[0]):
            _, maps = self._watch(zeros)
        return {name: MapShape(x.shape[1], x.shape[2], x.shape[3], types) for name, (x, types) in maps.items()}

    def _watch(self, *inputs: Any) -> tuple[Any, dict[str, tuple[Tensor, int | None]]]:
        """What the network gives, and what the layers of all pairs gave meanwhile, see `_as_map`."""
        (model,) = self._model
        layers = dict(model.named_modules(remove_duplicate=False))
        names = list(dict.fromkeys(name for pair in self.pairs for name in pair))
        outputs: dict[str, Any] = {}
        with contextlib.ExitStack() as hooks:  # which takes them back, come what may
            for name in names:

                def keep(layer: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                    outputs[name] = output

                hooks.callback(layers[name].register_forward_hook(keep).remove)
            if any("_orig_mod" in name.split(".") for name in layers):
                # What was compiled without hooks would run again, and past these.
                hooks.enter_context(torch.compiler.set_stance("force_eager"))
            prediction = model(*inputs)
        for name in names:
            if name not in outputs:
                raise ValueError(f"layer {name!r} did not run: name one that the network calls")
        return prediction, {name: _as_map(outputs[name], name) for name in names}

    def extra_repr(self) -> str:
        pairs = ", ".join(f"{lower} from {higher}" for lower, higher in self.pairs)
        return f"{pairs}, weight={self.weight}"


def _check_pairs(pairs: Iterable[Sequence[str]], model: nn.Module) -> list[tuple[str, str]]:
    pairs = list(pairs)
    if not pairs or any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"pairs must be one or more names of a lower and a higher layer each, got {pairs}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in (name for pair in pairs for name in pair):
        if name not in names:
            nearest = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0)) or "none"
            raise ValueError(f"{type(model).__name__} has no layer {name!r}; the nearest are {nearest}")
    return [(lower, higher) for lower, higher in pairs]


def _check_comparison(lower: MapShape, critic: bool, divergence: Divergence, cost: Cost) -> None:
    features = math.ceil(lower.height / 4) * math.ceil(lower.width / 4) if critic else math.prod(lower[:3])
    if features > 1 or (divergence == "sinkhorn" and cost == "l2"):
        return
    of = f"of {_show(lower)} the critic leaves" if critic else f"{_show(lower)} is"
    what = "whose softmax is 1" if divergence == "kl" else "whose cosine is 0 or 1"
    ways = ["critic=False"] if critic else []
    ways.append("cost='l2'" if divergence == "sinkhorn" else "divergence='sinkhorn' with cost='l2'")
    raise ValueError(f"{of} a single number, {what}: use {' or '.join(ways)}")


def _upsampling(lower: MapShape, higher: MapShape, groups: int | None) -> nn.ConvTranspose2d:
    """From maps of the higher layer's size to exactly the lower layer's."""
    kernels, strides, paddings, rests = [], [], [], []
    for low, high in zip(lower[1:3], higher[1:3], strict=True):
        stride = math.ceil(low / high)
        if math.ceil(low / stride) != high:
            raise ValueError(
                f"{_show(lower)} cannot be generated from {_show(higher)}: the higher sizes must be ceil(lower sizes / "
                "stride), of any stride"
            )
        kernel = max(3, stride | 1)  # odd, and leaves out no position between strides
        beyond = (high - 1) * stride + kernel - low
        padding = math.ceil(beyond / 2)  # 1, for strides of 1 and 2
        kernels.append(kernel)
        strides.append(stride)
        paddings.append(padding)
        rests.append(2 * padding - beyond)
    return nn.ConvTranspose2d(
        higher.channels,
        lower.channels,
        (kernels[0], kernels[1]),
        (strides[0], strides[1]),
        (paddings[0], paddings[1]),
        (rests[0], rests[1]),
        groups=groups or 1,
        bias=False,
    )


def _reduction(channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False)
    return conv, nn.BatchNorm2d(out_channels), nn.ReLU()


def _as_map(output: Any, name: str) -> tuple[Tensor, int | None]:
    """A layer's output as a map, and how many types of capsules its channels are, see `MapShape`."""
    x = output.capsules if isinstance(output, Prediction) else output
    if isinstance(x, Tensor) and x.dim() in (2, 4):
        return (x if x.dim() == 4 else x[..., None, None]), None
    if isinstance(x, Tensor) and x.dim() in (5, 6):
        x = Capsules(x)
    if not isinstance(x, Capsules):
        got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(output).__name__}"
        raise TypeError(
            f"layer {name!r} gives {got}; expected a map (batch, channels, height, width), features (batch, features) "
            "or capsules: name another layer"
        )
    if x.pose_dims is not None:  # a line is a grid of height 1
        x = Capsules(x.poses.unsqueeze(2))
    if x.poses.dim() < 5:
        return x.poses.flatten(1)[..., None, None], x.poses.shape[1]
    return as_map(x.poses.flatten(4)), x.poses.shape[1]


def _parameter(model: nn.Module) -> Tensor | None:
    """One that says on which device and in which precision the network is."""
    return next((p for p in model.parameters() if p.is_floating_point()), None)


def _show(shape: MapShape) -> str:
    types = "" if shape.types is None else f" ({shape.types} types of capsules)"
    return f"{shape.channels}x{shape.height}x{shape.width}{types}"
