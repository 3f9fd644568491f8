"""Choice of the backend: the code that computes the reductions over votes."""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from torchcaps.ops import native
from torchcaps.ops.device_check import why_not_trusted
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import check_choice
from torchcaps.utils.private import constant_when_compiled, is_transformed

Backend = Literal["auto", "reference", "tiled", "native", "triton"]
BACKENDS = get_args(Backend)  # PyTorch 2.6 does not compile a call of get_args

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on any device, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Evaluated at import, because torch.compile cannot trace the loading of a library.
NATIVE_MISSING = native.why_not()

OLDEST = (8, 0)  # lowest compute capability that the Triton kernels are compiled for
# Most numbers of a vote, most of a child's votes for all parents, and most weights from a child to one parent. The
# kernels hold them in registers: larger ones would run out of registers and take minutes to compile.
MOST_FEATURES, MOST_VOTES, MOST_WEIGHTS = 64, 2**13, 512
# On a CUDA device that cannot take the kernels "auto" stores votes that fill at most this part of its memory. That is
# faster than "tiled", and takes 3 to 17 times the memory of the votes (docs/performance.md).
STORED_PART = 1 / 100

_warned: set[str] = set()
# Backends of the contexts that are open, in the order in which they were entered. Threads may leave theirs in another
# order. No ContextVar: torch.compile cannot read one, and the threads of DataParallel would not see the caller's.
_entered: dict["_Context", Backend] = {}


class _Context:
    """Key of an open context; each context has its own. Compiled code cannot make an object()."""


# Keys of contexts that were left, to be used again: code that was compiled within a context asks for the same key, and
# would otherwise be compiled again in each step of a loop.
_left: list[_Context] = []


@checked
@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Set which backend `backend="auto"` means within this context, in all threads.

    - "reference" stores the votes and uses ordinary PyTorch operators; it defines what the others must compute.
    - "tiled" computes the votes block by block, again in the backward pass, and stores none. It runs on any device.
    - "native" does the same in C++ on the CPU, if it was built; see :func:`torchcaps.ops.backends`.
    - "triton" does the same in kernels for CUDA devices.
    - "auto" is "native" on the CPU if it was built, "triton" on a CUDA device of compute capability 8.0 or later whose
      check of the kernels has passed, and "tiled" everywhere else. The check runs once, at the first use of a device,
      and its answer is kept in a file. On a CUDA device that cannot take the kernels, "auto" is "reference" for votes
      that fill at most a hundredth of its memory, and a warning says why. `use_backend("triton")` runs the kernels
      without a check.

    A layer whose own `backend` is not "auto" keeps it. Where contexts of several threads overlap, the one that was
    entered last counts.

    Without such a context, "auto" is "reference" while PyTorch traces, transforms or exports code by
    `torch.jit.trace`, `torch.func`, `torch.autograd.forward_ad` or `torch.onnx.export`, which know PyTorch's own
    operators only; any other backend raises an error there.
    """
    try:
        key = _left.pop()  # in one step, because another thread may take the last one
    except IndexError:
        key = _Context()
    _entered[key] = backend
    try:
        yield
    finally:
        del _entered[key]
        _left.append(key)


def backends() -> dict[str, str | None]:
    """Return for each backend why it cannot be used on this machine, or None if it can.

    On a CUDA device "triton" has to pass its check; this function runs it if the device has no answer yet. A backend
    that can be used is not always one that "auto" stands for: see :func:`torchcaps.use_backend`.
    """
    there_is = torch.cuda.is_available()
    device = torch.device("cuda" if there_is else "cpu")
    triton = why_no_triton(device)
    if triton is None and there_is:
        triton = why_not_trusted(device)
    if HAS_TRITON and not there_is and not INTERPRETED:
        triton = "there is no CUDA device"
    return {"reference": None, "tiled": None, "native": NATIVE_MISSING, "triton": triton}


@constant_when_compiled
def why_no_triton(device: torch.device, sizes: tuple[int, int, int, int] | None = None) -> str | None:
    """Return why the Triton kernels cannot run on a device, or None if they can.

    Args:
        sizes: number of parents, rows and columns of the children's poses, and columns of the votes; None: do not check
            them.
    """
    if not HAS_TRITON:
        return "the package triton is not installed"
    if device.type != "cuda":
        if not INTERPRETED:
            return f"it needs tensors on a CUDA device, got {device.type}"
    elif torch.version.hip is not None:
        return "the kernels need an NVIDIA device"
    else:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            return "the kernels need compute capability {}.{}, this device has {}.{}".format(*OLDEST, *capability)
    if sizes is None:
        return None
    parents, rows, depth, width = sizes
    for what, count, most in (
        ("numbers of a vote", rows * width, MOST_FEATURES),
        ("numbers of a child's votes", parents * rows * width, MOST_VOTES),
        ("weights for each vote", depth * width, MOST_WEIGHTS),
    ):
        if count > most:
            return f"the kernels take at most {most} {what}, these are {count}"
    return None


@constant_when_compiled
def _most_stored(device: torch.device) -> int:
    """Return how many bytes the votes may have that "auto" stores on a CUDA device without the kernels."""
    return int(torch.cuda.get_device_properties(device).total_memory * STORED_PART)


@constant_when_compiled
def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


def choose_backend(
    backend: Backend, device: torch.device, sizes: tuple[int, int, int, int] | None = None, stored: int = 0
) -> Literal["reference", "tiled", "native", "triton"]:
    """Return the backend that "auto" stands for on a device, or the requested one.

    Args:
        sizes: number of parents, rows and columns of the children's poses, and columns of the votes; None for an
            operation without votes.
        stored: bytes of all votes.

    Raises:
        ValueError: there is no such backend, or it cannot run here.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        backend = ["auto", *_entered.values()][-1]
    if is_transformed() and backend != "reference":
        if backend == "auto":
            return "reference"
        raise ValueError(
            f"backend={backend!r} does not run under torch.jit.trace, torch.onnx.export, torch.func or forward-mode "
            "derivatives: use backend='auto' or backend='reference'"
        )
    if backend == "auto":
        if device.type == "cpu" and NATIVE_MISSING is None:
            return "native"
        if device.type != "cuda":
            return "tiled"
        reason = why_no_triton(device, sizes) or why_not_trusted(device)
        if reason is None:
            return "triton"
        if sizes is None:  # an operation that stores no votes
            return "tiled"
        _warn_once(f"{reason}: backend='auto' is 'reference' for few votes, and 'tiled' for many")
        if torch.compiler.is_compiling() or stored > _most_stored(device):  # compiled code may take any batch
            return "tiled"
        return "reference"
    reason = why_no_triton(device, sizes) if backend == "triton" else None
    if backend == "native":
        reason = NATIVE_MISSING if device.type == "cpu" else f"it needs tensors on the CPU, got {device.type}"
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot be used, {reason}: use backend='tiled'")
    return backend
