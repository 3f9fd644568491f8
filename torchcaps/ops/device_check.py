"""The check of the Triton kernels on a CUDA device, without which `backend="auto"` does not take them.

Each family of kernels is compared once with the reference, values and gradients. The answer is kept in a file.
"""

import hashlib
import importlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchcaps._version import __version__
from torchcaps.ops.agreement import Dot, Gaussian, UnitDot
from torchcaps.utils.checks import one_line
from torchcaps.utils.files import read_json, user_path, write_text_whole
from torchcaps.utils.machine import nvidia_driver
from torchcaps.utils.private import constant_when_compiled, in_backward

if TYPE_CHECKING:
    from torchcaps.ops.computed import LinearVotes
    from torchcaps.ops.votes import Moments

# Seven eighths of a tile's samples and three quarters of all else exist, so that every mask counts. On a device a tile
# is 512 numbers: two warps sum them together.
SAMPLES, PARENTS, ROWS, DEPTH, WIDTH = 7, 3, 3, 2, 3
SHARING = 4  # consecutive children that share a row
EPS = 0.1  # of moments

Values = dict[str, Tensor]


class Routed(NamedTuple):
    """What a routing computes, and its parameters."""

    values: Values
    parameters: Values


# By name of the family: the tensors that it takes, and the reduction. A row of biases or betas has a number for each
# parent, or one for all. Nothing here may ask for "auto", which waits for the check.
Reduce = Callable[["LinearVotes", Values], "Tensor | Moments | Routed"]
OF_VOTES: dict[str, tuple[str, Reduce]] = {
    "weighted_sum by Dot over the parents": (
        "poses weight bias gates query offset",
        lambda votes, x: votes.weighted_sum(Dot(x["query"], x["offset"])),
    ),
    "weighted_sum by UnitDot": (
        "poses weight one_bias query",
        lambda votes, x: votes.weighted_sum(UnitDot(x["query"]), leaky=True),
    ),
    "weighted_sum by Dot over the children": (
        "poses weight bias gates query offset",
        lambda votes, x: votes.weighted_sum(Dot(x["query"], x["offset"]), "children"),
    ),
    "moments by Dot": (
        "poses weight query one_beta",
        lambda votes, x: votes.moments(Dot(x["query"]), x["one_beta"], EPS),
    ),
    "moments by Gaussian": (
        "poses weight bias gates query precision prior betas",
        lambda votes, x: votes.moments(Gaussian(x["query"], x["precision"], x["prior"]), x["betas"], EPS),
    ),
}


def _routed(name: str) -> Reduce:
    """Return a function that routes votes: it gives the parents, and the parameters of the routing."""

    def route(votes: "LinearVotes", x: Values) -> Routed:
        routing = _routing()
        shape = routing.shape.LayerShape(votes.children // SHARING, votes.children, PARENTS, ROWS, DEPTH, WIDTH)
        layer = getattr(routing, name)().for_layer(shape, torch.device("meta"), x["poses"].dtype)  # where none is drawn
        layer.to_empty(device=votes.device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
            for buffer in layer.buffers():
                buffer.zero_()
        parents = layer(votes)
        values = {"poses of the parents": parents.poses, "their scores": parents.scores}
        return Routed({what: y for what, y in values.items() if y is not None}, dict(layer.named_parameters()))

    return route


def _squashed(votes: "LinearVotes", x: Values) -> Tensor:
    from torchcaps.ops.triton import parents

    squashed: Tensor = (parents if votes.backend == "triton" else _routing()).squash(x["query"])
    return squashed


def _routing() -> Any:
    """Return the package of the routings, which imports the choice of a backend, and so this file."""
    return importlib.import_module("torchcaps.routing")


# What routings compute of the parents. That is a kernel, too, which few children show.
OF_PARENTS: dict[str, tuple[str, Reduce]] = {
    "squash": ("poses weight query", _squashed),
    **{
        name: ("poses weight", _routed(name))
        for name in ("EMRouting", "HeinsenRouting", "VBRouting", "SelfRouting", "VectorNormRouting")
    },
}
FAMILIES = OF_VOTES | OF_PARENTS

_answers: dict[int, str | None] = {}  # by index of the device
_lock = threading.Lock()


# ---------------------------------------------------------------- the comparison


def differences(device: torch.device) -> list[str]:
    """Return what the kernels compute otherwise than the reference on a device, a line for each family.

    The reference runs on the CPU, where no setting of cuBLAS changes it, in float64 and in float32. In the Euclidean
    norm, the kernels may err four times as much as it does in float32, plus 16 roundings.
    """
    return [line for name in FAMILIES if (line := _difference(name, device))]


def _difference(name: str, device: torch.device) -> str:
    """Return what a family of kernels computes otherwise than the reference, in one line; "" if nothing."""
    from torchcaps.ops.triton import problem

    # A program sums several children: there are more of them than programs.
    programs = max(1, problem.PROGRAMS // 8) if name.startswith("moments") else problem.PROGRAMS
    groups = 2 if name in OF_PARENTS else -(-5 * programs // (4 * SHARING))
    tensors = _draw(SHARING * groups)
    cpu = torch.device("cpu")
    exact = _results(name, tensors, "reference", cpu, torch.float64)
    eager = _results(name, tensors, "reference", cpu, torch.float32)
    found = _results(name, tensors, "triton", device, torch.float32)
    rounding = torch.finfo(torch.float32).eps
    wrong = []
    for what, x in exact.items():
        error, expected, size = (float(y.norm()) for y in (found[what] - x, eager[what] - x, x))
        if not error <= 4 * expected + 16 * rounding * size:  # NaN, too
            wrong.append(f"{what} by {error / (size or 1.0):.1e}")
    return f"{name} (relative errors: {', '.join(wrong)})" if wrong else ""


def _draw(children: int) -> dict[str, Tensor]:
    """Return tensors for every family, the same each time."""
    generator, groups = torch.Generator().manual_seed(0), children // SHARING

    def draw(*shape: int) -> Tensor:
        return 0.5 * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    gates = draw(SAMPLES, children).sigmoid()
    gates[:, 3::5] = 0
    return {
        "poses": draw(SAMPLES, children, ROWS, DEPTH),
        "weight": draw(groups, PARENTS, DEPTH, WIDTH),
        "bias": draw(groups, PARENTS, ROWS, WIDTH),
        "one_bias": draw(groups, 1, ROWS, WIDTH),
        "gates": gates,
        "query": draw(SAMPLES, PARENTS, ROWS * WIDTH),
        "precision": draw(SAMPLES, PARENTS, ROWS * WIDTH).exp(),
        "prior": draw(SAMPLES, PARENTS),
        "offset": draw(groups, PARENTS),
        "betas": draw(groups, PARENTS),
        "one_beta": draw(groups, 1),
    }


def _results(
    name: str, tensors: dict[str, Tensor], backend: Any, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the values of a reduction and the gradients of all tensors that it takes, by name, on the CPU."""
    from torchcaps.ops.computed import LinearVotes  # it imports the choice of a backend, which imports this file

    names, reduce = FAMILIES[name][0].split(), FAMILIES[name][1]
    leaves = {what: tensors[what].to(device, dtype).detach().requires_grad_() for what in names}
    bias = leaves.get("bias", leaves.get("one_bias"))
    votes = LinearVotes(leaves["poses"], leaves["weight"], bias, (ROWS, WIDTH), backend=backend)
    reduced = reduce(votes.gated(leaves.get("gates")), leaves)
    if isinstance(reduced, Tensor):
        values = {"sums": reduced}
    elif isinstance(reduced, Routed):
        values = reduced.values
        leaves |= reduced.parameters
    else:
        values = reduced._asdict()
    along = [torch.linspace(-1, 1, x.numel(), dtype=dtype, device=device).view_as(x) for x in values.values()]
    grads = torch.autograd.grad(list(values.values()), list(leaves.values()), along, materialize_grads=True)
    gradients = {f"gradient of {what}": x for what, x in zip(leaves, grads, strict=True)}
    return {what: x.detach().cpu().double() for what, x in (*values.items(), *gradients.items())}


# ---------------------------------------------------------------- the answer


@constant_when_compiled
def why_not_trusted(device: torch.device) -> str | None:
    """Return why "auto" does not take the Triton kernels on a CUDA device that can run them, or None if it does.

    The answer is from this process, else from the file, else from a check. The check runs in a thread of its own:
    gradients, autocast, modes, the stream and a compiler of the calling thread neither change it nor see it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _answers:
        return _answers[index]
    key = _key(index)
    path = _file(key)
    found = _kept(path, key)
    # A capture forbids what a check does, in all threads, and the thread that computes gradients would wait for itself.
    if found is None and (torch.cuda.is_current_stream_capturing() or in_backward()):
        return (
            "the Triton kernels are not checked on this device yet, and cannot be while a CUDA graph is captured or "
            "gradients are computed (call torchcaps.ops.backends() before)"
        )
    with _lock:
        if index not in _answers:
            if found is None:
                executor = ThreadPoolExecutor(1)
                checking = executor.submit(_check, torch.device("cuda", index), path, key)
                executor.shutdown(wait=False)  # an interrupt does not wait for the compiler
                found = checking.result()
            _answers[index] = _in_words(found, key["device"], path)
        return _answers[index]


def _check(device: torch.device, path: Path | None, key: dict[str, str]) -> list[str]:
    """Check a device, and keep the answer in a file."""
    try:
        found = differences(device)
    except torch.OutOfMemoryError:  # not the kernels' fault, and the layer will not fit either
        raise
    except Exception as error:  # Triton raises many kinds
        found = [one_line(error)]
        if _is_alive(device):  # what is missing, such as a C compiler, may be there next time
            return found
    if path is not None:
        with suppress(OSError):  # the next process checks again
            write_text_whole(path, json.dumps({"key": key, "differences": found}, indent=1))
    return found


def _is_alive(device: torch.device) -> bool:
    """Return whether a device still computes. After a wrong address it fails until the process ends."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def _in_words(found: list[str], name: str, path: Path | None) -> str | None:
    if not found:
        return None
    again = f" (remove {path} to check again)" if path is not None and path.exists() else ""
    return f"the Triton kernels fail their check on {name}: {', '.join(found)}{again}"


# ---------------------------------------------------------------- the file


def _key(index: int) -> dict[str, str]:
    """Return all that the answer depends on."""
    try:
        from triton import __version__ as triton_version
    except Exception as error:  # the check will fail, too
        triton_version = one_line(error)
    return {
        "device": torch.cuda.get_device_name(index),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
        "driver": nvidia_driver(),
        "torch": torch.__version__,
        "triton": triton_version,
        "torchcaps": __version__,
        "kernels": _hash_of_kernels(),
    }


def _hash_of_kernels() -> str:
    digest, here = hashlib.sha256(), Path(__file__)
    for path in (here, *sorted((here.parent / "triton").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _file(key: dict[str, str]) -> Path | None:
    """Return the file of an answer, in the user's folder for caches (XDG Base Directory Specification), or None if
    there is no such folder."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = given if given.is_absolute() else user_path("~/.cache")
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return folder / "torchcaps" / "kernels" / f"{name}.json" if folder.is_absolute() else None


def _kept(path: Path | None, key: dict[str, str]) -> list[str] | None:
    """Return the answer in a file, or None if it has none for this key."""
    if path is None:
        return None
    try:
        kept = read_json(path, dict)
    except ValueError:
        return None
    found = kept.get("differences")
    fits = kept.get("key") == key and isinstance(found, list) and all(isinstance(x, str) for x in found)
    return found if fits else None
