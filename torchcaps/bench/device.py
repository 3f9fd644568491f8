"""The kinds of measurements of `torchcaps.bench.gpu`, each made in a process of its own.

The process gets a kind and its arguments as JSON and prints a line of JSON; `torchcaps.bench.items` starts it.
"""

import copy
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchcaps.bench.layers import LAYERS, LayerCase
from torchcaps.bench.measurement import (
    PASSES,
    SLACK,
    copy_rate,
    kernel_times,
    matrix_rate,
    measure,
    measure_rates,
    seconds_of,
)
from torchcaps.bench.passes import (
    WARM_UP,
    WAYS,
    NoNumber,
    by_samples,
    capture,
    check_values,
    first_line,
    prepare,
    relative_errors,
    tolerances,
)
from torchcaps.bench.report import software_and_machine
from torchcaps.bench.request import Request
from torchcaps.ops import use_backend
from torchcaps.ops.backend import HAS_TRITON

if HAS_TRITON:
    import triton

    @triton.jit
    def _nothing(x):  # type: ignore[no-untyped-def]
        pass


def environment(device: str, way: str) -> dict[str, Any]:
    """Describe the machine, after a check that the way runs on it."""
    prepare(way, Request("heinsen", smoke=True, device=device).build(), True)()
    found = software_and_machine(device)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return found


def twice(device: str, way: str, smoke: bool = False) -> dict[str, Any]:
    """Check that the same inputs give the same digits."""
    for name in LAYERS:
        run = prepare(way, Request(name, smoke=smoke, device=device).build(), True)
        first, second = ({what: x.clone() for what, x in run().items()} for _ in range(2))
        for what, x in first.items():
            if not torch.equal(x, second[what]):
                raise NoNumber(f"{name}: {what} has other digits in the second run")
    return {"said": f"bit-equal: {', '.join(LAYERS)}"}


def tiny(device: str, way: str, parents: int) -> dict[str, Any]:
    """Check softmax over the parents, over the children, and moments, forward and backward.

    The reference runs on the CPU, so that little else than our kernels runs on the device.
    """
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # the sanitizer sees each tensor's bounds only without a cache
    torch.manual_seed(0)
    for name in ("digit-capsules", "capnet-dynamic", "heinsen"):
        small = LAYERS[name].smoke._replace(parents=parents)
        case = replace(LAYERS[name], smoke=small).build(1, None, None, True)
        truth = by_samples(case.to("cpu", torch.float64))
        allowed = tolerances(relative_errors(prepare("reference", case, True)(), truth), torch.float32)
        found = prepare(way, case.to(device, torch.float32), True)()
        check_values(relative_errors({what: x.cpu() for what, x in found.items()}, truth), allowed)
    return {"said": f"right with {parents} parents"}


def training(device: str, way: str, layer: str, how: str, smoke: bool = False) -> dict[str, Any]:
    """Check that training steps that are replayed, or compiled, change the parameters as eager steps do."""
    case: Any = Request(layer, smoke=smoke, device=device).build()
    truth = _changes(case.to(device, torch.float64), "reference", "eager")
    eager, found = _changes(case, way, "eager"), _changes(case, way, how)
    allowed = tolerances(relative_errors(eager, truth), torch.float32)
    errors = relative_errors(found, truth)
    # Inductor computes in another order.
    check_values(errors, {name: SLACK * e if how == "compiled" else e for name, e in allowed.items()})
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] if how == "compiled" else 0
    equal = all(torch.equal(x, eager[name]) for name, x in found.items())
    said = f"{'bit-equal to' if equal else 'agrees with'} eager steps, off by {max(errors.values()):.1e} at most"
    return {"said": said + (f", {skipped} graphs not captured" if skipped else "")}


def _changes(case: LayerCase, way: str, how: str) -> dict[str, Tensor]:
    """What WARM_UP + 2 steps of SGD add to the parameters; each of the last two sees other children."""
    module, inputs = copy.deepcopy(case.module), {name: x.clone() for name, x in case.inputs.items()}
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    compiled = torch.compile(module, mode="reduce-overhead") if how == "compiled" else module

    def step() -> None:
        if how == "compiled":
            torch.compiler.cudagraph_mark_step_begin()
        with use_backend(WAYS[way]):  # type: ignore[arg-type]
            results = case.compute(compiled, inputs, False)
        torch.autograd.backward(results, list(case.parent_grads.values()))
        optimizer.step()
        optimizer.zero_grad()  # sets them to None: a graph has its own memory for gradients

    if how == "graph":
        step = capture(step)  # takes the first steps as its warm-up
    else:
        for _ in range(WARM_UP):
            step()
    for _ in range(2):
        inputs["poses"].mul_(0.9)
        step()
    return {name: x.detach() - before[name] for name, x in module.named_parameters()}


def rates(device: str, way: str) -> dict[str, Any]:
    """Measure the rates of a large copy and of large matrix products."""
    torch.set_float32_matmul_precision("highest")  # no tf32
    products = {name: matrix_rate(device, getattr(torch, name)) for name in ("float32", "bfloat16")}
    return {"copy_bytes_per_second": copy_rate(device), "matrix_flops_per_second": products}


def launches(device: str, way: str, count: int = 1000) -> dict[str, Any]:
    """Measure the seconds of a launch that does next to nothing, one among many."""
    x = torch.zeros(1, device=device)
    runs: dict[str, Callable[[], object]] = {"PyTorch, one number": x.zero_}
    if way == "triton":
        runs["Triton, nothing"] = lambda: _nothing[(1,)](x)

    def many(run: Callable[[], object]) -> None:
        for _ in range(count):
            run()

    found = {}
    for name, run in runs.items():
        repeat = functools.partial(many, run)
        ways: dict[str, Callable[[], object]] = {"": repeat}
        if device == "cuda":
            ways[", in a graph"] = capture(repeat)
        for kind, timed in ways.items():
            timed()
            found[name + kind] = min(seconds_of(timed, device) for _ in range(5)) / count
    return {"launches": found}


def kernels(device: str, way: str, layer: str, batch: int | None, smoke: bool = False) -> dict[str, Any]:
    """Measure how a pass spends its time, by kernel."""
    case = Request(layer, batch=batch, smoke=smoke, device=device).build()
    tables = {name: kernel_times(prepare(way, case, bool(b)), device) for b, name in enumerate(PASSES)}
    if not all(tables.values()):
        raise NoNumber("the profiler saw no kernel")
    return {"kernels": tables}


def layers(ways: list[str], rounds: int, request: dict[str, Any]) -> dict[str, Any]:
    """Measure a layer in several ways, with the rates of the device."""
    torch.set_float32_matmul_precision("highest")
    wanted = Request(**request)
    found = measure_rates(wanted.device, getattr(torch, wanted.dtype))
    rows = measure(wanted, ways, rounds, found, lambda text: print(text, file=sys.stderr), here=True)
    return {"rows": [row.json() for row in rows], "rates": found._asdict()}


def huge(way: str, request: dict[str, Any]) -> dict[str, Any]:
    """Check a layer with more numbers in its votes than 32 bits can count.

    The last sample must agree with the tiled backend, which other measurements check.
    """
    wanted = Request(**request)
    case: Any = wanted.build()
    last = case.parts()[-1]
    truth = prepare("tiled", last.to(wanted.device, torch.float64), True)()
    allowed = tolerances(relative_errors(prepare("tiled", last, True)(), truth), torch.float32)
    sample_names = [name for name in truth if name.removeprefix("gradient of ") in case.inputs]
    run = prepare(way, case, True)
    found = run()
    errors = relative_errors({name: found[name][-1:] for name in sample_names}, truth)
    check_values(errors, {name: SLACK * allowed[name] for name in errors})
    votes = case.children * LAYERS[wanted.layer].paper.parents * case.parent_grads["poses"][0, 0].numel()
    seconds = min(seconds_of(run, wanted.device) for _ in range(3))
    return {"said": f"right: {votes:.2e} numbers in the votes of a sample, {1e3 * seconds:.1f} ms {PASSES[1]}"}


def one_pass(device: str, way: str, layer: str, smoke: bool = False) -> dict[str, Any]:
    """Run one pass for ncu to profile."""
    run = prepare(way, Request(layer, smoke=smoke, device=device).build(), True)
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return {}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    kind.__name__: kind
    for kind in (environment, twice, tiny, training, rates, launches, kernels, layers, huge, one_pass)
}


def main() -> None:
    """Measure what the command line asks for; print the answer, or the error, as a line of JSON."""
    task = json.loads(sys.argv[1])
    try:
        answer = KINDS[task.pop("kind")](**task)
    except Exception as error:
        traceback.print_exc()
        answer = {"error": str(error) if isinstance(error, NoNumber) else first_line(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
