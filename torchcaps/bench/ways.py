"""The ways to compute a layer or a network: run a pass in one of them, and check its values."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchcaps.bench.cases import SLACK, Case
from torchcaps.ops import use_backend

# By way: the backend of our layers. The baseline is not our layer and uses none.
WAYS = {
    "baseline": "auto",
    "reference": "reference",
    "compiled-reference": "reference",
    "tiled": "tiled",
    "native": "native",
    "triton": "triton",
    "compiled": "auto",
    "compiled-graphs": "auto",
}
COMPILED = {
    "compiled-reference": None,
    "compiled": None,
    "compiled-graphs": "reduce-overhead",
}  # modes of torch.compile
STORES_VOTES = ("baseline", "reference", "compiled-reference")
OTHER_ORDER = ("baseline", *COMPILED)  # ways that compute in another order than our reference
FLOOR = 4  # roundings that are always allowed: two errors of the size of one rounding are equally good


class NoNumber(Exception):
    """Raised when a way gets no number; the message says why."""


def prepare(way: str, case: Case, backward: bool) -> Callable[[], dict[str, Tensor]]:
    """Return a pass to run many times. It returns results by name and, backward, gradients of inputs and parameters."""
    module, optimizer = case.start()
    compiled = case.compile(module, COMPILED[way]) if way in COMPILED else module
    inputs = {
        name: x.detach().requires_grad_(backward and name in case.differentiated) for name, x in case.inputs.items()
    }
    leaves = {name: x for name, x in (*inputs.items(), *module.named_parameters()) if x.requires_grad}

    def run() -> dict[str, Tensor]:
        with use_backend(WAYS[way]), torch.set_grad_enabled(backward):  # type: ignore[arg-type]
            outputs = case.compute(compiled, inputs, way == "baseline")
            results = {name: x.detach() for name, x in zip(case.results, outputs, strict=False)}
            if backward:
                gradients = case.gradients(outputs, list(leaves.values()))
                results |= {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
                if optimizer is not None:
                    for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                        leaf.grad = gradient
                    optimizer.step()
            return results

    return run


def by_samples(case: Case) -> dict[str, Tensor]:
    """Compute the results of the reference, in the memory of one sample's votes."""
    joined: dict[str, Tensor] = {}
    for part in case.parts():
        for name, x in prepare("reference", part, True)().items():
            has_samples = name.removeprefix("gradient of ") in (*case.results, *case.inputs)
            before = joined.get(name)
            joined[name] = x if before is None else torch.cat([before, x]) if has_samples else before + x
    return joined


def relative_errors(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return `|result - truth| / |truth|` of each result, in the Euclidean norm; infinity if it is not finite."""
    errors = {}
    for name, x in results.items():
        error = float(torch.linalg.vector_norm(x.double() - truth[name]))
        size = float(torch.linalg.vector_norm(truth[name])) or 1.0
        errors[name] = error / size if math.isfinite(error) else math.inf
    return errors


def check_values(
    way: str, errors: dict[str, float], eager: dict[str, float], dtype: torch.dtype, slack: float = 1
) -> None:
    """Check that no error of a way is larger than allowed.

    Allowed are twice the errors of the eager reference in the same precision, plus FLOOR roundings, times `slack`, or
    SLACK for a way of OTHER_ORDER.

    Raises:
        NoNumber: one is larger; the message names the worst.
    """
    slack, floor = SLACK if way in OTHER_ORDER else slack, FLOOR * torch.finfo(dtype).eps
    allowed = {name: slack * (2 * eager[name] + floor) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    if not errors[worst] <= allowed[worst] < math.inf:
        raise NoNumber(f"values disagree: {worst} is off by {errors[worst]:.1e}, allowed {allowed[worst]:.1e}")
