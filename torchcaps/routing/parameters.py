"""Options and parameters of a routing: a layer's copy learns parameters, and without a layer tensors can be given."""

import contextlib
import copy
import functools
import inspect
import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from torchcaps.ops import Votes
from torchcaps.ops.children import check_device
from torchcaps.routing.shape import LayerShape
from torchcaps.utils.arguments import Kind, kinds_of, refusal, shown_with_type


class RoutingParameters(nn.Module):
    """Base of :class:`torchcaps.Routing`: everything that does not route.

    Attributes:
        shape: shape of the layer that this routing belongs to, or None.
        given_values: tensors in place of learned parameters, see `with_values`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shape: LayerShape | None = None
        self.given_values: dict[str, Tensor] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in vars(self) and name != "__dict__":  # DataParallel sets this one
            raise AttributeError(f"{type(self).__name__}.__init__ must call super().__init__() before it sets {name!r}")
        # An option that is changed later is checked like the argument of its name.
        cls: Any = type(self)
        kind = _kind_of(cls, name)
        if kind is not None and not isinstance(value, (Tensor, nn.Module)) and not kind.fits(value):
            raise refusal(name, value, kind)
        if name == "iterations" and value != 1 and not self.iterative:
            raise ValueError(f"{type(self).__name__} has no iterations, got {value}")
        if name in ("start", "gradient", "iterations"):
            options = vars(self) | {name: value}
            learned_and_last = (options.get("start"), options.get("gradient")) == ("learned", "last")
            if learned_and_last and options["iterations"] > 1 and not self.last_state_contains_first:
                raise ValueError(
                    "start='learned' gets no gradient from the last iteration alone: use gradient='unrolled'"
                )
        super().__setattr__(name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what `build` sets

    def for_layer(
        self, shape: LayerShape, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return a copy with the parameters that a layer of this shape needs."""
        if self.needs_poses and not shape.shared:
            raise ValueError(
                f"{type(self).__name__} takes the poses of the children as their votes: use it in a CapsuleShared"
            )
        if self.given_values:
            raise ValueError("a routing with_values is for votes without a layer: give the layer one without values")
        routing = copy.deepcopy(self)
        routing.shape = shape
        try:
            with contextlib.nullcontext() if device is None else torch.device(device):
                routing.build(shape)
        except KeyError as error:  # PyTorch's, for the name of an attribute
            raise ValueError(f"{type(self).__name__}.build: {error.args[0]}, choose another name") from error
        for name in _built(routing):
            if hasattr(type(self), name) or name in vars(self):
                raise ValueError(f"{type(self).__name__}.build: attribute {name!r} already exists, choose another name")
        for name, x in vars(routing).items():
            if isinstance(x, Tensor) and name not in vars(self):
                raise ValueError(
                    f"{type(self).__name__}.build: {name} is a plain tensor, which is neither saved nor moved: make it "
                    "an nn.Parameter or an nn.Buffer"
                )
        return routing.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the parameters and the buffers of the algorithm to their initial values."""
        if self.shape is not None:
            first = self.for_layer(self.shape, "cpu").state_dict()
            for name, x in self.state_dict().items():
                x.copy_(first[name])

    def with_values(self, **values: Tensor) -> Self:
        """Return a copy that uses the given tensors in place of learned parameters, to route votes without a layer:
        `EMRouting().with_values(beta_a=a, beta_u=u)(votes)`."""
        if self.shape is not None:  # without a layer the votes say which shapes there are, see `check_values`
            learned: dict[str, Any] = self._parameters | self._buffers
            for name, x in values.items():
                if name not in learned:
                    known = ", ".join(learned) or "nothing"
                    raise ValueError(f"this {type(self).__name__} learns no {name!r}, but {known}")
                _check_value(name, x, tuple(learned[name].shape), None)
        routing = copy.copy(self)
        routing.__dict__.update(values, given_values=self.given_values | values)
        return routing

    def check_values(self, votes: Votes) -> None:
        """Check the tensors of `with_values` against the parameters of a layer with votes of these sizes.

        Raises:
            RuntimeError: a parameter has no value.
            ValueError: a value has another name, shape or device.
            TypeError: a value is no tensor, or has another precision than the votes.
        """
        name, features = type(self).__name__, math.prod(votes.pose)
        without = copy.copy(self)
        without.given_values = {}
        for key in self.given_values:
            del without.__dict__[key]
        # On the meta device nothing is drawn, which would change the random numbers of what comes after.
        built = without.for_layer(
            LayerShape(votes.children, votes.children, votes.parents, 1, features, features), "meta"
        )
        missing = [x for x in _built(built) if not hasattr(self, x)]
        if missing:
            advice = "" if set(missing) & set(built._modules) else ", or set values by with_values"
            raise RuntimeError(f"{name} has no {', '.join(missing)} yet: give it to a capsule layer{advice}")
        for key, x in self.given_values.items():
            if key not in _built(built):
                learned = ", ".join(_built(built)) or "nothing"
                raise ValueError(f"{name} with these options learns no {key!r}, but {learned}")
            if key in built._modules:
                raise ValueError(f"{name}'s {key} is a module: give the routing to a capsule layer, which builds it")
            _check_value(key, x, tuple(getattr(built, key).shape), votes)

    def extra_repr(self) -> str:
        """Show the iterations, and the options that differ from their defaults."""
        parameters = inspect.signature(type(self)).parameters.items()
        options = [(name, getattr(self, name), x.default) for name, x in parameters if hasattr(self, name)]
        shown = [(name, value) for name, value, x in options if name == "iterations" or repr(value) != repr(x)]
        return ", ".join(f"{name}={getattr(value, '__name__', repr(value))}" for name, value in shown)


@functools.cache
def _kind_of(routing: type[nn.Module], name: str) -> Kind | None:
    """Return what an option may be: what the first constructor that has it says, if it checks its arguments."""
    for owner in routing.__mro__:
        init = vars(owner).get("__init__")
        if issubclass(owner, RoutingParameters) and init is not None and name in inspect.signature(init).parameters:
            return kinds_of(init).get(name) if getattr(init, "is_checked", False) else None
    return None


def _built(routing: nn.Module) -> list[str]:
    """Return the names of the parameters, buffers and modules of a routing."""
    return [*routing._parameters, *routing._buffers, *routing._modules]


def _check_value(name: str, x: Any, expected: tuple[int, ...], votes: Votes | None) -> None:
    """Check a tensor that takes the place of a parameter of the expected shape, also beside votes if there are some.
    Sizes of 1 are broadcast."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a tensor of floating-point numbers, got {shown_with_type(x, torch.is_tensor)}")
    sizes = tuple(x.shape)
    if len(sizes) != len(expected) or any(n not in (1, m) for n, m in zip(sizes, expected, strict=True)):
        raise ValueError(f"expected {name} of shape {expected}, got {sizes}")
    if votes is not None:
        check_device(name, x, "votes", votes.device)
        if torch.promote_types(x.dtype, votes.dtype) not in (votes.dtype, torch.float32):
            needed = torch.promote_types(votes.dtype, torch.float32)
            raise TypeError(f"{name} is {x.dtype} and the votes are {votes.dtype}: convert {name} by .to({needed})")
