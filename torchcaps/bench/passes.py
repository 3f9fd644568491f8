"""The ways to compute a layer, a pass of each, and whether what comes out is right."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchcaps.bench.layers import LAYERS, Case
from torchcaps.capsules import Capsules
from torchcaps.ops import use_backend

# By way: the backend of our layer. The baseline is no layer of ours.
WAYS = {
    "baseline": "auto",
    "reference": "reference",
    "compiled-reference": "reference",
    "tiled": "tiled",
    "triton": "triton",
}
STORES_VOTES = ("baseline", "reference", "compiled-reference")
FLOOR = 4  # roundings: an error that is none, see `tolerances`


def prepare(way: str, case: Case, backward: bool) -> Callable[[], dict[str, Tensor]]:
    """A pass of a layer, to be run many times. It returns the parents' poses and scores and, backward, the gradients of
    children and parameters."""
    layer = torch.compile(case.layer, dynamic=False) if way == "compiled-reference" else case.layer
    poses = case.poses.detach().requires_grad_(backward)
    scores = None if case.scores is None else case.scores.detach().requires_grad_(backward)
    named = {"poses": poses, "scores": scores, **dict(case.layer.named_parameters())}
    inputs = {f"gradient of {name}": x for name, x in named.items() if x is not None}

    def run() -> dict[str, Tensor]:
        with use_backend(WAYS[way]), torch.set_grad_enabled(backward):  # type: ignore[arg-type]
            if way == "baseline":
                parents = LAYERS[case.request.layer].baseline(layer, poses, scores)
            else:
                capsules: Capsules = layer(Capsules(poses, scores))
                parents = tuple(x for x in (capsules.poses, capsules.scores) if x is not None)
            results = {name: x.detach() for name, x in zip(("poses", "scores"), parents, strict=False)}
            if backward:
                results |= zip(inputs, torch.autograd.grad(parents, list(inputs.values()), case.gradients), strict=True)
            return results

    return run


def by_samples(case: Case) -> dict[str, Tensor]:
    """What the reference gives, in the memory of one sample: samples do not affect each other."""
    joined: dict[str, Tensor] = {}
    for b in range(case.poses.shape[0]):
        for name, x in prepare("reference", case.sample(b), True)().items():
            of_samples = name.removeprefix("gradient of ") in ("poses", "scores")
            joined[name] = x if b == 0 else torch.cat([joined[name], x]) if of_samples else joined[name] + x
    return joined


def relative_errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """`|found - truth| / |truth|` of each result, in the Euclidean norm; infinite for what is not finite."""
    errors = {}
    for name, x in found.items():
        error = float(torch.linalg.vector_norm(x.double() - truth[name]))
        size = float(torch.linalg.vector_norm(truth[name])) or 1.0
        errors[name] = error / size if math.isfinite(error) else math.inf
    return errors


def tolerances(eager: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Twice the error of the eager reference in the same precision, and a floor of FLOOR roundings: of two errors as
    small as one rounding, neither is the better."""
    floor = FLOOR * torch.finfo(dtype).eps
    return {name: 2 * error + floor for name, error in eager.items()}


class NoNumber(Exception):
    """Why a way has none."""


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
