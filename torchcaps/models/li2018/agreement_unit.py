"""Agreement unit: the divergence between a lower layer and what a generator makes of a higher one.

Li, Guo, Dai, Ouyang, Wang: Neural Network Encapsulation (2018), section 3.2 and appendix B.
:class:`torchcaps.FeedbackAgreement` attaches units to a network.

The numbers in the paper's formulas are lost in its text; epsilon and the number of iterations are those of the authors'
code (github.com/hli2020/nn_encapsulation). In appendix B the generator's convolution has as many groups as a capsule
has dimensions; here it has as many as there are types, like the master branch of the layers that it inverts. Its kernel
is 3x3 for strides 1 and 2. For larger strides it grows, so that every position gets a value.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from torchcaps.models.li2018.relu_squash import relu_squash
from torchcaps.models.li2018.transport import Cost, feature_kl, sinkhorn_divergence
from torchcaps.utils.arguments import Count, Positive, check_fields, check_input, checked
from torchcaps.utils.checks import check_choice

Divergence = Literal["sinkhorn", "kl"]


class MapShape(NamedTuple):
    """Shape of a layer's output seen as a feature map.

    Fields:
        channels, height, width: size of the map.
        types: number of capsule types, each of `channels // types` neighboring channels; None if there are no capsules.
    """

    channels: Count
    height: Count
    width: Count
    types: Count | None = None


class AgreementUnit(nn.Module):
    r"""Divergence between a lower layer's map and the map that a generator makes of a higher layer.

    With the maps y of the lower and z of the higher layer, one batch each,

    .. math::
        x = \text{squash}(\text{ReLU}(\text{BN}(\text{conv}^T(z)))), \quad
        \text{divergence} = D(\text{critic}(x), \text{critic}(y))

    where the critic consists of two 3x3 convolutions of stride 2, each followed by BN and ReLU: the first to a quarter
    of the channels, the second to one. Gradients flow to both sides, and all parameters are trained to make the
    divergence smaller, those of the critic too.

    Args:
        lower, higher: shapes of the maps; the higher map is at most as large as the lower.
        divergence: D, "sinkhorn" (:func:`torchcaps.functional.sinkhorn_divergence`) or "kl"
            (:func:`torchcaps.functional.feature_kl`).
        cost, eps, iterations, debias, plan_gradient: options of the Sinkhorn divergence.
        critic: use the critic; False compares the maps themselves.
        capsule_generator: squash the generated map if the lower layer has capsules and, if both layers have the same
            number of types, generate each type from its own. False is an ordinary generator.

    Shape:
        - Input: maps of the lower and of the higher layer, `(batch, channels, height, width)`.
        - Output: the divergence, a scalar.

    Raises:
        ValueError: if the types of a map do not divide its channels, if the lower map cannot be generated from the
            higher one, or if a sample is a single number, which only the Sinkhorn divergence with cost="l2" can
            compare; or if maps have other shapes.

    Reference:
        Li et al. 2018, section 3.2 and appendix B. Table 3 lists the options as KL_loss and d1 to d5.
    """

    @checked
    def __init__(
        self,
        lower: MapShape,
        higher: MapShape,
        divergence: Divergence = "sinkhorn",
        cost: Cost = "cosine",
        eps: Positive = 1.0,
        iterations: Count = 10,
        debias: bool = True,
        plan_gradient: bool = False,
        critic: bool = True,
        capsule_generator: bool = True,
    ):
        super().__init__()
        if divergence == "kl" and (cost, eps, iterations, debias, plan_gradient) != ("cosine", 1.0, 10, True, False):
            raise ValueError(
                "divergence='kl' has no cost, eps, iterations, debias or plan_gradient: leave them out, or use "
                "divergence='sinkhorn'"
            )
        for shape in (lower, higher):
            check_fields(shape)
            if shape.channels % (shape.types or 1):
                raise ValueError(
                    f"{_show(shape)} must have a multiple of {shape.types} as channels, as each type has as many"
                )
        self.lower, self.higher, self.divergence = lower, higher, divergence
        self.cost, self.eps, self.iterations = cost, eps, iterations
        self.debias, self.plan_gradient = debias, plan_gradient
        self.types = lower.types if capsule_generator else None
        self.generator = nn.Sequential(
            _upsampling(lower, higher, self.types if self.types == higher.types else None),
            nn.BatchNorm2d(lower.channels),
            nn.ReLU() if self.types is None else nn.Identity(),  # with capsules, generate applies ReLU and squash
        )
        _check_comparison(lower, critic, divergence, cost)
        self.critic: nn.Sequential | None = None
        if critic:
            quarter = max(1, lower.channels // 4)
            self.critic = nn.Sequential(*_reduction(lower.channels, quarter), *_reduction(quarter, 1))

    def generate(self, higher: Tensor) -> Tensor:
        """Generate a map of the lower layer's shape from the higher layer's map."""
        self._check_map("higher", higher, self.higher)
        generated = self.generator(higher)
        return generated if self.types is None else relu_squash(generated, self.lower.channels // self.types)

    def forward(self, lower: Tensor, higher: Tensor) -> Tensor:
        check_choice("divergence", self.divergence, get_args(Divergence))  # the attribute may have been set
        self._check_map("lower", lower, self.lower)
        x, y = self.generate(higher), lower
        if len(x) != len(y):
            raise ValueError(f"the maps must be those of one batch, got {len(y)} lower and {len(x)} higher maps")
        if self.critic is not None:
            x, y = self.critic(x), self.critic(y)
        if self.divergence == "kl":
            return feature_kl(x, y)
        return sinkhorn_divergence(x, y, self.eps, self.iterations, self.cost, self.debias, self.plan_gradient)

    def _check_map(self, which: str, x: Tensor, expected: MapShape) -> None:
        check_input(f"{which} layer's maps", x, next(self.parameters(), None))
        if tuple(x.shape[1:]) != expected[:3]:
            shape = ", ".join(map(str, expected[:3]))
            raise ValueError(f"expected the {which} layer's map of shape (batch, {shape}), got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        options = f"{_show(self.lower)} from {_show(self.higher)}, divergence={self.divergence!r}"
        if self.divergence == "kl":
            return options
        return options + (
            f", cost={self.cost!r}, eps={self.eps}, iterations={self.iterations}, debias={self.debias}, "
            f"plan_gradient={self.plan_gradient}"
        )


def _check_comparison(lower: MapShape, critic: bool, divergence: Divergence, cost: Cost) -> None:
    """Check that a sample has more than one number, unless the divergence can compare single numbers."""
    features = math.ceil(lower.height / 4) * math.ceil(lower.width / 4) if critic else math.prod(lower[:3])
    if features > 1 or (divergence == "sinkhorn" and cost == "l2"):
        return
    subject = f"the critic reduces {_show(lower)} to" if critic else f"{_show(lower)} is"
    what = "whose softmax is 1" if divergence == "kl" else "whose cosine is 0 or 1"
    ways = ["critic=False"] if critic else []
    ways.append("cost='l2'" if divergence == "sinkhorn" else "divergence='sinkhorn' with cost='l2'")
    raise ValueError(f"{subject} a single number, {what}: use {' or '.join(ways)}")


def _upsampling(lower: MapShape, higher: MapShape, groups: int | None) -> nn.ConvTranspose2d:
    """Return a transposed convolution from the higher layer's size to exactly the lower layer's size."""
    sides: list[tuple[int, int, int, int]] = []
    for low, high in zip(lower[1:3], higher[1:3], strict=True):
        stride = math.ceil(low / high)
        if math.ceil(low / stride) != high:
            raise ValueError(
                f"{_show(lower)} cannot be generated from {_show(higher)}: each side of the higher map must be "
                "ceil(lower side / stride) for some integer stride"
            )
        kernel = max(3, stride | 1)  # odd, and at least the stride, so that no position stays empty
        beyond = (high - 1) * stride + kernel - low
        padding = math.ceil(beyond / 2)  # 1, for strides of 1 and 2
        sides.append((kernel, stride, padding, 2 * padding - beyond))
    names = "kernel_size", "stride", "padding", "output_padding"
    sizes: Any = dict(zip(names, zip(*sides, strict=True), strict=True))
    return nn.ConvTranspose2d(higher.channels, lower.channels, **sizes, groups=groups or 1, bias=False)


def _reduction(channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False)
    return conv, nn.BatchNorm2d(out_channels), nn.ReLU()


def _show(shape: MapShape) -> str:
    types = "" if shape.types is None else f" ({shape.types} types of capsules)"
    return f"{shape.channels}x{shape.height}x{shape.width}{types}"
