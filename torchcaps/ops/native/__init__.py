"""The "native" backend: the reductions in C++ on the CPU, built with the package and loaded with ctypes.

The library does not depend on Python or PyTorch: it gets sizes, options and addresses. `torchcaps_run` in library.cpp
chooses the instruction set, `run` in kernels.cpp the precision and the agreement; the loop over children and samples is
in worker.h, what a reduction does in it in the file of its name.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Options, ParentTensors, Tensors
from torchcaps.ops.numerics import accumulator, sum_dtype

FOLDER = Path(__file__).parent
OPERATIONS = {"vote_sum": 0, "weighted_sum": 2, "moments": 4}  # the next number is that of the backward pass

_Interrupted = ctypes.CFUNCTYPE(ctypes.c_int)
_Number, _Tensor = ctypes.c_int64, ctypes.c_void_p


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Problem(ctypes.Structure):
    """`Problem` of problem.h, which says what the fields are."""

    _fields_ = [
        *_fields(_Number, "images types height width rows d groups down across parents h"),
        *_fields(_Number, "stride_down stride_across dilation_down dilation_across"),
        *_fields(_Number, "bias_groups bias_parents offset_groups betas_groups betas_parents"),
        *_fields(_Number, "over_children unit leaky threads"),
        ("eps", ctypes.c_double),
        *_fields(_Tensor, "poses weight bias gates target precision prior offset betas"),
        *_fields(_Tensor * 4, "results grads"),
        *_fields(_Tensor, "into_poses into_weight into_bias into_gates"),
        *_fields(_Tensor, "grad_target grad_precision grad_prior grad_offset grad_betas"),
        ("interrupted", _Interrupted),
    ]


class _PoolProblem(ctypes.Structure):
    """`PoolProblem` of problem.h."""

    _fields_ = [
        *_fields(_Number, "batch groups features children iterations threads"),
        *_fields(_Number * 4, "strides grad_strides"),
        ("sharpness", ctypes.c_double),
        *_fields(_Tensor, "poses present grad total grad_poses grad_sharpness"),
        ("interrupted", _Interrupted),
    ]


class _SquashProblem(ctypes.Structure):
    """`SquashProblem` of problem.h."""

    _fields_ = [
        *_fields(_Number * 4, "sizes strides"),
        *_fields(_Number, "threads"),
        *_fields(_Tensor, "x grad out"),
    ]


# Fields for the tensors of the children and of the parents, and for their gradients.
_GIVEN = ("poses", "weight", "bias", "gates", "target", "precision", "prior", "offset", "betas")
_GRADIENTS = (*(f"into_{name}" for name in _GIVEN[:4]), *(f"grad_{name}" for name in _GIVEN[4:]))


def _described(*structs: type[ctypes.Structure]) -> str:
    """Return names, places and sizes of all fields, as the library describes its own."""
    fields = [(name, getattr(struct, name)) for struct in structs for name, *_ in struct._fields_]
    return "".join(f"{name} {field.offset} {field.size}\n" for name, field in fields)


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library. Raise an OSError if it is missing or does not fit, and a ValueError if this machine lacks the
    instruction set that the environment variable TORCHCAPS_INSTRUCTIONS names."""
    library = ctypes.CDLL(str(FOLDER / "kernels.so"))
    fields = getattr(library, "torchcaps_fields", None)
    if fields is not None:
        fields.restype = ctypes.c_char_p
    if fields is None or fields().decode() != _described(_Problem, _PoolProblem, _SquashProblem):
        raise OSError("the kernels were built from another version of torchcaps: install it again")
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)  # from the OpenMP runtime that PyTorch has loaded
    library.torchcaps_use_openmp(parallel)
    library.torchcaps_instructions.restype = library.torchcaps_available.restype = ctypes.c_char_p
    library.torchcaps_run.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(_Problem)]
    library.torchcaps_routing_pool.argtypes = [ctypes.c_int64, ctypes.POINTER(_PoolProblem)]
    library.torchcaps_squash.argtypes = [ctypes.c_int64, ctypes.POINTER(_SquashProblem)]
    library.torchcaps_squash.restype = None
    name = os.environ.get("TORCHCAPS_INSTRUCTIONS")
    if name and not library.torchcaps_choose(name.encode()):
        available = library.torchcaps_available().decode()
        raise ValueError(f"TORCHCAPS_INSTRUCTIONS must be one of {available} on this machine, got {name!r}")
    return library


@functools.cache
def why_not() -> str | None:
    """Return why the kernels cannot be used here, or None if they can."""
    try:
        load()
    except (OSError, AttributeError) as error:  # the library is missing, or of another machine or version
        note = FOLDER / "why_not.txt"
        if (FOLDER / "kernels.so").exists():
            return str(error)
        if note.exists():
            return f"they were not built: {note.read_text().strip()}"
        return "they were not built: install torchcaps where there is a C++ compiler"
    return None


def instructions() -> str:
    """Return the name of the instruction set that was chosen for this machine."""
    return load().torchcaps_instructions().decode()


def reduce(
    operation: int,
    grads: Tensors,
    results: Tensors,
    children: Children,
    parents: ParentTensors,
    options: Options,
    into: tuple[Tensor | None, ...] = (None,) * 4,
) -> tuple[Tensor | None, ...]:
    """Run one of OPERATIONS, or its backward pass. Forward it writes `results`. Backward it reads them, adds to `into`,
    and returns the gradients of the parents' tensors."""
    poses, weight, bias, _ = children
    offset, betas = parents.offset, parents.betas
    images, types, height, width, rows, d = poses.shape
    groups, down, across, count, _, h = weight.shape
    dtype = sum_dtype(poses.dtype)
    problem = _Problem(
        images=images,
        types=types,
        height=height,
        width=width,
        rows=rows,
        d=d,
        groups=groups,
        down=down,
        across=across,
        parents=count,
        h=h,
        stride_down=options.stride[0],
        stride_across=options.stride[1],
        dilation_down=options.dilation[0],
        dilation_across=options.dilation[1],
        bias_groups=0 if bias is None else bias.shape[0],
        bias_parents=1 if bias is None else bias.shape[3],
        offset_groups=0 if offset is None else offset.shape[0],
        betas_groups=0 if betas is None else betas.shape[0],
        betas_parents=1 if betas is None else betas.shape[3],
        over_children=options.softmax == "children",
        unit=options.unit,
        leaky=options.leaky,
        threads=torch.get_num_threads(),
        eps=options.eps,
    )
    # These references keep the tensors alive during the call: the library has only their addresses.
    tensors = [(name, _plain(x, dtype)) for name, x in zip(_GIVEN, (*children, *parents), strict=True) if x is not None]
    results, grads = tuple([_plain(x, dtype) for x in results]), tuple([_plain(x, dtype) for x in grads])
    problem.results, problem.grads = (tuple([x.data_ptr() for x in given]) for given in (results, grads))
    added = [None if x is None else x.contiguous() for x in into]
    parent_grads = [None if x is None or not grads else x.new_empty(x.shape, dtype=dtype) for x in parents]
    for of_rows in parent_grads[3:]:  # samples share these rows: the kernels add to them, and write the others
        if of_rows is not None:
            of_rows.zero_()
    tensors += [(name, x) for name, x in zip(_GRADIENTS, (*added, *parent_grads), strict=True) if x is not None]
    for name, x in tensors:
        setattr(problem, name, x.data_ptr())
    _call(functools.partial(load().torchcaps_run, operation, dtype.itemsize), problem)
    for x, y in zip(into, added, strict=True):
        if x is not None and y is not None and x is not y:
            x.copy_(y)
    return tuple(parent_grads)


def routing_pool(
    poses: Tensor,
    iterations: int,
    sharpness: float,
    present: Tensor | None,
    grad_total: Tensor | None = None,
    grad_poses: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `torchcaps.ops.pool.pool_by_agreement`, or its backward pass if there is a gradient of its result.

    Args:
        poses: float32, float64 or bfloat16 with any strides, `(batch, groups, features, children)`.
        grad_poses: tensor like `poses` that the backward pass writes, with strides of its own.

    Returns:
        The sums, `(batch * groups, features)` in float32 at least, in the forward pass; the gradient of the sharpness,
        which is 0 in the forward pass.
    """
    batch, groups, features, children = poses.shape
    total = accumulator(poses, batch * groups, features)
    of_sharpness = torch.zeros((), dtype=torch.float64, device="cpu")
    grad_total = _plain(grad_total, total.dtype)
    present = None if present is None else _plain(present.expand(len(total), children), torch.bool)
    problem = _PoolProblem(
        batch=batch,
        groups=groups,
        features=features,
        children=children,
        iterations=iterations,
        threads=torch.get_num_threads(),
        strides=poses.stride(),
        grad_strides=(poses if grad_poses is None else grad_poses).stride(),
        sharpness=sharpness,
        poses=poses.data_ptr(),
        present=_address(present),
        grad=_address(grad_total),
        total=total.data_ptr(),
        grad_poses=_address(grad_poses),
        grad_sharpness=of_sharpness.data_ptr(),
    )
    _call(functools.partial(load().torchcaps_routing_pool, poses.element_size()), problem)
    return total, of_sharpness


def squash(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """Squash vectors along the last dimension of a tensor in float32 or float64, or return the gradient of them for a
    gradient of the result. The result is contiguous; the gradient lies in memory as the vectors do."""
    x, sizes, strides = _vectors(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format if grad is None else torch.preserve_format)
    threads = max(1, min(torch.get_num_threads(), x.numel() >> 16))  # each has some tens of microseconds of work
    grad = _plain(grad, x.dtype)  # kept alive: the library has only addresses
    problem = _SquashProblem(sizes, strides, threads, x.data_ptr(), _address(grad), out.data_ptr())
    load().torchcaps_squash(x.element_size(), problem)
    return out


def _vectors(x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return vectors with their sizes and strides as `squash` of the library takes them, (outer, middle, inner,
    entries). Those of a convolution are taken as they lie, in either order of memory, others are copied."""
    if x.is_contiguous():
        return x, (1, 1, x.numel() // x.shape[-1], x.shape[-1]), (0, 0, x.shape[-1], 1)
    sizes, strides = [1, 1, 1], [0, 0, 0]
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if strides[-1] == size * stride:  # follows the dimension before
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        elif size > 1:
            sizes, strides = [*sizes, size], [*strides, stride]
    known = len(sizes) < 7 and 1 in (strides[-1], x.stride(-1))
    if not known or torch.empty_like(x).stride() != x.stride():  # such as vectors that share memory
        return _vectors(x.contiguous())
    return x, (*sizes[-3:], x.shape[-1]), (*strides[-3:], x.stride(-1))


class _Asking:
    """What the library calls now and then, to run the handlers of signals.

    Attributes:
        raised: exceptions of the handlers.
        interrupted: the function, which returns 1 if there is one.
    """

    def __init__(self) -> None:
        self.raised: list[BaseException] = []
        self.interrupted = _Interrupted(_started(_asking(self.raised)).__next__)


# Those that no call uses. To make one takes longer than a small kernel; a call in another thread, or in the handler of
# a signal, needs its own.
_idle: list[_Asking] = []


def _call(run: Callable[[Any], int], problem: Any) -> None:
    """Call the library with a problem, which runs the handlers of signals now and then."""
    try:
        asking = _idle.pop()
    except IndexError:
        asking = _Asking()
    problem.interrupted = asking.interrupted
    status = run(ctypes.byref(problem))
    if asking.raised:
        raise asking.raised[0]
    _idle.append(asking)
    if status != 0:
        raise MemoryError("there is not enough memory for the reductions over the votes: use smaller batches")


def _started(generator: Iterator[int]) -> Iterator[int]:
    next(generator)
    return generator


def _asking(raised: list[BaseException]) -> Iterator[int]:
    """Yield 1 if the handler of a signal has raised an exception, else 0; the library asks now and then.

    Python runs signal handlers when it continues to run Python code. In a function that is before the first line,
    outside of any `try`; in a generator it is at the `yield`, inside the `try`.
    """
    while not raised:
        try:
            yield 0
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
    while True:
        yield 1


def _plain(x: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a tensor as the library reads it: contiguous, of this type."""
    if x is None or (x.dtype == dtype and x.is_contiguous() and not x.is_neg()):
        return x
    return x.detach().to(dtype).contiguous().resolve_neg()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
