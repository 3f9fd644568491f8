"""The "native" backend: the reductions in C++ on the CPU, built with the package and loaded with ctypes.

The library does not depend on Python or PyTorch: it gets sizes, options and addresses. `torchcaps_run` in library.cpp
chooses the instruction set, `run` in kernels.cpp the precision, the sizes that are known when compiling and the
agreement; the loop over children and samples is in worker.h, what a reduction does in it in the file of its name.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.children import Children, Options, ParentTensors, Tensors
from torchcaps.ops.numerics import accumulator

FOLDER = Path(__file__).parent
OPERATIONS = {"vote_sum": 0, "weighted_sum": 2, "moments": 4}  # the next number is that of the backward pass

_Interrupted = ctypes.CFUNCTYPE(ctypes.c_int)


def _struct(name: str, numbers: int, tensors: int) -> type[ctypes.Structure]:
    """Return a struct of problem.h: so many sizes and options, a real number, and so many addresses."""
    fields = (
        ("numbers", ctypes.c_int64 * numbers),
        ("real", ctypes.c_double),
        ("tensors", ctypes.c_void_p * tensors),
        ("interrupted", _Interrupted),
    )
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Problem, _PoolProblem = _struct("Problem", 24, 26), _struct("PoolProblem", 14, 6)


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library. Raise an OSError if it is missing or does not fit."""
    library = ctypes.CDLL(str(FOLDER / "kernels.so"))
    library.torchcaps_problem_size.restype = ctypes.c_int64
    if library.torchcaps_problem_size() != ctypes.sizeof(_Problem) + ctypes.sizeof(_PoolProblem):
        raise OSError("the kernels were built from another version of torchcaps: install it again")
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)  # from the OpenMP runtime that PyTorch has loaded
    library.torchcaps_use_openmp(parallel)
    library.torchcaps_instructions.restype = ctypes.c_char_p
    library.torchcaps_run.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(_Problem)]
    library.torchcaps_routing_pool.argtypes = [ctypes.c_int64, ctypes.POINTER(_PoolProblem)]
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
    parent_grads = tuple(accumulator(x, *x.shape) if grads and x is not None else None for x in parents)
    dtype = torch.promote_types(poses.dtype, torch.float32)
    added = [None if x is None else x.contiguous() for x in into]
    # These references keep the tensors alive during the call: the library has only their addresses.
    tensors = (
        *(_plain(x, dtype) for x in (*children, *parents)),
        *_four(_plain(x, dtype) for x in results),
        *_four(_plain(x, dtype) for x in grads),
        *added,
        *parent_grads,
    )
    numbers = (
        *poses.shape,
        *weight.shape[:4],
        weight.shape[5],
        *options.stride,
        *options.dilation,
        *((0, 1) if bias is None else (bias.shape[0], bias.shape[3])),
        0 if offset is None else offset.shape[0],
        *((0, 1) if betas is None else (betas.shape[0], betas.shape[3])),
        options.softmax == "children",
        options.unit,
        options.leaky,
        torch.get_num_threads(),
    )
    run = functools.partial(load().torchcaps_run, operation, dtype.itemsize)
    _call(run, _Problem, numbers, options.eps, tensors)
    for x, y in zip(into, added, strict=True):
        if x is not None and y is not None and x is not y:
            x.copy_(y)
    return parent_grads


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
    tensors = (poses, present, grad_total, total, grad_poses, of_sharpness)
    strides = (*poses.stride(), *(poses if grad_poses is None else grad_poses).stride())
    numbers = (*poses.shape, iterations, torch.get_num_threads(), *strides)
    run = functools.partial(load().torchcaps_routing_pool, poses.element_size())
    _call(run, _PoolProblem, numbers, sharpness, tensors)
    return total, of_sharpness


def _call(
    run: Callable[[Any], int],
    struct: type[ctypes.Structure],
    numbers: tuple[int, ...],
    real: float,
    tensors: tuple[Tensor | None, ...],
) -> None:
    """Call the library with a problem, which runs the handlers of signals now and then."""
    raised: list[BaseException] = []
    asking = _asking(raised)
    next(asking)
    addresses = tuple(None if x is None else x.data_ptr() for x in tensors)
    status = run(ctypes.byref(struct(numbers, real, addresses, _Interrupted(asking.__next__))))
    if raised:
        raise raised[0]
    if status != 0:
        raise MemoryError("there is not enough memory for the reductions over the votes: use smaller batches")


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


def _plain(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.detach().to(dtype).contiguous()


def _four(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Fill up a list of tensors to four, with None."""
    given = list(tensors)
    return given + [None] * (4 - len(given))
