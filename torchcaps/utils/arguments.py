"""Checks of the arguments of public functions and constructors, made from their annotations.

    @checked
    def __init__(self, features: Count, sharpness: NotNegative = 1.0, softmax: Softmax = "parents"): ...

`features=2.5` then raises "features must be an int of at least 1, got 2.5 (float)", and so do "3", True, NaN and 0. An
argument needs no other check of its own type and range; checks of two arguments together, and of the values in a
tensor, stand in the functions.
"""

import collections.abc
import functools
import inspect
import math
import reprlib
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchcaps.utils.checks import counted, nearest
from torchcaps.utils.private import is_traced

HALF = (torch.float16, torch.bfloat16)
LARGEST = torch.finfo(torch.float32).max

F = TypeVar("F", bound=Callable[..., Any])


class Range(NamedTuple):
    """Range of a number, in `Annotated[int, Range(...)]`: from `least` to `most`, without the end named in `open`."""

    least: float = -math.inf
    most: float = math.inf
    open: Literal["", "least", "most"] = ""

    def __contains__(self, value: Any) -> bool:
        low = value > self.least if self.open == "least" else value >= self.least
        return low and (value < self.most if self.open == "most" else value <= self.most)

    def __repr__(self) -> str:
        if self.open == "" and math.isfinite(self.least + self.most):
            return f"from {self.least:g} to {self.most:g}"
        low = f"above {self.least:g}" if self.open == "least" else f"of at least {self.least:g}"
        high = f"below {self.most:g}" if self.open == "most" else f"of at most {self.most:g}"
        return " and ".join(text for text, end in ((low, self.least), (high, self.most)) if math.isfinite(end))


class FloatingPoint:
    """In `Annotated`, with a `torch.dtype` or a Tensor: no integers, bool or complex numbers."""

    def __repr__(self) -> str:
        return "floating point"


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
Positive = Annotated[float, Range(1e-30)]  # smaller numbers vanish in float32
NotNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Device = torch.device | str
FloatType = Annotated[torch.dtype, FloatingPoint()]
FloatTensor = Annotated[Tensor, FloatingPoint()]


class Kind(NamedTuple):
    """What an annotation allows.

    Fields:
        text: what is expected, as in "must be an int of at least 1".
        has_type: whether a value has the right type, though it may be out of range.
        fits: whether a value is allowed.
    """

    text: str
    has_type: Callable[[Any], bool]
    fits: Callable[[Any], bool]


def checked(function: F) -> F:
    """Check the arguments of a function against its annotations whenever it is called.

    The decorated function raises

    - TypeError: there is no argument of this name, or an argument has another type than its annotation. An int may
      stand for a float, a list for a tuple, a number of NumPy for one of Python; a bool is no number, and a class is no
      instance of itself.
    - ValueError: a number is out of its range, NaN or infinite, or a text is none of its choices.

    Code that PyTorch compiles runs without the checks.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional = [(p.name, p.default) for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    defaults = {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            args = tuple(map(as_python, args))
            kwargs = {name: as_python(value) for name, value in kwargs.items()}
            known = kinds_of(function)  # not earlier: annotations may name classes that are defined later
            for (name, default), value in zip(positional, args, strict=False):
                check(name, default, value, known)
            if rest is not None:
                for value in args[len(positional) :]:
                    check(rest, inspect.Parameter.empty, value, known)
            for name, value in kwargs.items():
                if name in defaults:
                    check(name, defaults[name], value, known)
                elif not takes_others:
                    is_class = function.__name__ == "__init__"
                    owner = type(args[0]).__name__ if is_class and args else function.__qualname__
                    raise TypeError(
                        f"{owner} has no argument {name!r}{nearest(name, [x for x in defaults if x != 'self'])}"
                    )
        return function(*args, **kwargs)

    def check(name: str, default: Any, value: Any, known: dict[str, Kind]) -> None:
        kind = known.get(name)
        if kind is not None and value is not default and not kind.fits(value):
            raise refusal(name, value, kind)

    wrapper.is_checked = True  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def as_python(value: Any) -> Any:
    """Return a number of NumPy as one of Python, which PyTorch takes everywhere."""
    is_numpy = type(value).__module__ == "numpy" and not hasattr(value, "__len__")
    return value.item() if is_numpy and hasattr(value, "item") else value


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass or of a named tuple against their annotations."""
    for name, kind in _kinds(get_type_hints(type(instance), include_extras=True)).items():
        if not kind.fits(getattr(instance, name)):
            raise refusal(name, getattr(instance, name), kind)


def refusal(name: str, value: Any, kind: Kind) -> Exception:
    """Return the error about an argument that is not what it must be."""
    wrong_value = kind.has_type(value)
    error = ValueError if wrong_value else TypeError
    got = shown(value) if wrong_value else shown_with_type(value, kind.fits)
    return error(f"{name} must be {kind.text}, got {got}")


@functools.cache
def kinds_of(function: Callable[..., Any]) -> dict[str, Kind]:
    """Return what the arguments of a function allow, by name, without those whose annotations cannot be checked."""
    try:
        hints = get_type_hints(inspect.unwrap(function), include_extras=True)
    except NameError:  # a name that only type checkers import
        return {}
    return _kinds({name: hint for name, hint in hints.items() if name != "return"})


def _kinds(hints: dict[str, Any]) -> dict[str, Kind]:
    kinds = {name: kind_of(hint) for name, hint in hints.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def kind_of(annotation: Any) -> Kind | None:
    """Return what an annotation allows, or None if it allows everything or cannot be checked."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        base, *conditions = arguments
        return _with_condition(base, conditions[0])
    if origin is Literal:
        return _choice(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in (list, collections.abc.Sequence):
        return _sequence(arguments[0])
    if origin is collections.abc.Callable:
        return _function(arguments[-1])
    if annotation in (None, types.NoneType):
        return Kind("None", lambda x: x is None, lambda x: x is None)
    if annotation is int:
        # PyTorch takes no larger ints.
        return Kind("an int", _is_int, lambda x: _is_int(x) and -(2**63) <= x < 2**63)
    if annotation is float:
        # Computations are in float32, where larger numbers are infinite; PyTorch takes ints of 64 bits.
        def fits(x: Any) -> bool:
            most = 2**63 - 1 if isinstance(x, int) else LARGEST
            return _is_number(x) and -most <= x <= most

        return Kind("a finite number", _is_number, fits)
    if annotation is bool:
        return Kind("True or False", lambda x: isinstance(x, bool), lambda x: isinstance(x, bool))
    cls = origin or annotation
    if isinstance(cls, type) and cls is not object:
        return Kind(_a(cls), lambda x: isinstance(x, cls), lambda x: isinstance(x, cls))
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool)


def _with_condition(base: Any, condition: Any) -> Kind | None:
    kind = kind_of(base)
    if kind is None:
        return None
    if isinstance(condition, Range):
        noun = "a finite number" if base is float and condition.most == math.inf else kind.text.replace("finite ", "")
        return Kind(f"{noun} {condition}", kind.has_type, lambda x: kind.fits(x) and x in condition)
    if isinstance(condition, FloatingPoint):
        noun = "a floating-point tensor" if base is Tensor else "a floating-point type, such as torch.float32"
        return Kind(noun, lambda x: False, lambda x: kind.fits(x) and _is_floating(x))
    return kind


def _is_floating(x: Any) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else x.is_floating_point


def _choice(choices: tuple[Any, ...]) -> Kind:
    def fits(value: Any) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in choices)

    kinds = tuple({type(choice) for choice in choices})
    return Kind(f"one of {', '.join(map(repr, choices))}", lambda x: isinstance(x, kinds), fits)


def _union(alternatives: tuple[Any, ...]) -> Kind | None:
    kinds = [kind_of(alternative) for alternative in alternatives]
    if torch.device in alternatives and str in alternatives:
        kinds = [_DEVICE, *(k for a, k in zip(alternatives, kinds, strict=True) if a not in (torch.device, str))]
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    return Kind(
        _joined([kind.text for kind in known]),
        lambda x: any(kind.has_type(x) for kind in known),
        lambda x: any(kind.fits(x) for kind in known),
    )


def _joined(texts: list[str]) -> str:
    if texts[-1] == "None":
        return f"{_joined(texts[:-1])}, or None"
    return " or ".join(texts)


def _is_device(value: Any) -> bool:
    if not isinstance(value, (torch.device, str)):
        return False
    try:
        torch.device(value)
    except RuntimeError:
        return False
    return True


_DEVICE = Kind("a device such as 'cpu' or 'cuda:0'", lambda x: isinstance(x, (torch.device, str)), _is_device)


def _tuple(items: tuple[Any, ...]) -> Kind | None:
    if len(items) == 2 and items[1] is Ellipsis:
        return _sequence(items[0])
    kinds = [kind_of(item) for item in items]
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    same = len({kind.text for kind in known}) == 1
    inside = f"{counted(len(known), 'item')}, each {known[0].text}" if same else ", ".join(kind.text for kind in known)

    def fits(value: Any) -> bool:
        return is_row(value) and len(value) == len(known) and all(k.fits(x) for k, x in zip(known, value, strict=True))

    return Kind(f"a tuple of {inside}", is_row, fits)


def _sequence(item: Any) -> Kind | None:
    kind = kind_of(item)
    if kind is None:
        return Kind("a tuple or list", is_row, is_row)
    return Kind(f"a tuple, each item {kind.text}", is_row, lambda x: is_row(x) and all(map(kind.fits, x)))


def is_row(value: Any) -> bool:
    """Return whether a value is a tuple or a list. A named tuple such as Capsules is something else."""
    return isinstance(value, (tuple, list)) and not hasattr(value, "_fields")


def _function(result: Any) -> Kind:
    def fits(value: Any) -> bool:
        # A class makes an instance of itself: torch.optim.Adam makes an optimizer, but nn.ReLU no tensor.
        if isinstance(value, type):
            return not isinstance(result, type) or issubclass(value, result)
        return callable(value)

    return Kind("a function", fits, fits)


def _a(cls: type) -> str:
    if cls is str:
        return "text"
    name = "tensor" if cls is Tensor else cls.__name__
    if name.endswith("s") and not name.endswith("ss"):  # Capsules, Votes
        return name
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def shown(value: Any) -> str:
    """Return a value as an error message shows it, in one line."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    return " ".join(_short.repr(value).split())


def shown_with_type(value: Any, fits: Callable[[Any], bool] = lambda x: False) -> str:
    """Return a value of a wrong type as an error message shows it, with its fields that are what is expected.

    Args:
        value: the value.
        fits: whether another value is what is expected.
    """
    if isinstance(value, type):
        return f"the class {value.__name__}: create an instance, {value.__name__}(...)"
    if isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    if isinstance(value, PackedSequence) and fits(value.data):
        mask = "(torch.arange(x.shape[1]) < lengths[:, None]).to(x.device)"
        unpacked = "x, lengths = pad_packed_sequence(packed, batch_first=True)"
        return (
            f"a PackedSequence: give x of {unpacked}, with the mask {mask}, to a layer as torchcaps.Capsules(x, mask)"
        )
    if hasattr(type(value), "_fields"):  # Capsules or Prediction, whose tensors would fill many lines
        fields = [name for name, x in zip(type(value)._fields, value, strict=True) if fits(x)]
        return f"{_a(type(value))}{': give its ' if fields else ''}{' or its '.join(fields)}"
    return shown(value) if value is None or isinstance(value, Tensor) else f"{shown(value)} ({type(value).__name__})"


def check_input(name: str, x: Tensor, weight: Tensor | None, takes_half: bool = False) -> None:
    """Check the type, the device and the precision of the input of a layer.

    Args:
        name: what the input is, in the plural, for the message.
        x: the input.
        weight: weights of the layer, or None if it has none. The input needs their device and, except under autocast,
            their precision.
        takes_half: whether the layer also takes inputs in half precision, whatever its weights are.

    Raises:
        TypeError: the input is no tensor, or its numbers are integers, complex or of another precision.
        ValueError: it is on another device.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown_with_type(x, torch.is_tensor)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating-point numbers, got {x.dtype}: {_as_floats(name, x)}")
    if weight is None:
        return
    if x.device != weight.device:
        raise ValueError(
            f"the {name} are on {x.device} and the weights on {weight.device}: move the {name} by "
            f".to({str(weight.device)!r}), or the weights by .to({str(x.device)!r})"
        )
    if x.dtype != weight.dtype and not (takes_half and x.dtype in HALF) and not _autocast(x, weight):
        raise TypeError(
            f"the {name} are {x.dtype} and the weights {weight.dtype}: convert the {name} by .to({weight.dtype})"
        )


def _as_floats(name: str, x: Tensor) -> str:
    """Return what to do about inputs that are no floating-point numbers."""
    if x.is_complex():
        return "give real numbers, such as torch.view_as_real(x).flatten(-2) or x.abs()"
    if x.dtype == torch.uint8:
        return "convert bytes by .float() / 255"
    if x.dtype == torch.bool or name in ("images", "scores"):
        return "convert them by .float()"
    if name == "embeddings":
        return "give the hidden states of an encoder, not its tokens"
    return "give token ids to an nn.Embedding first, and convert other numbers by .float()"


def _autocast(x: Tensor, weight: Tensor) -> bool:
    """Return whether autocast converts an input and weights of different precisions."""
    device, low = x.device.type, (*HALF, torch.float32)
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return autocast and x.dtype in low and weight.dtype in low


def apply(name: str, function: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
    """Apply a function that a user gave as an argument, and check that it keeps the shape; None is the identity."""
    if function is None:
        return x
    y = function(x)
    if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
        given = f"{tuple(x.shape)} and {x.dtype}"
        raise ValueError(f"{name} must return a tensor of the shape that it is given, {given}, got {shown(y)}")
    return y


def can_read(x: Tensor) -> bool:
    """Return whether reading the values of a tensor costs no waiting and breaks no trace: it is on the CPU, and the
    running code is neither compiled, traced nor transformed."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and not is_traced()
