"""Compile the Triton kernels for a device that need not be there: `python compiled_kernels.py few|all|deep CAPABILITY`.

Triton compiles for the device that its driver names. The launches of each kind of reduction, forward and backward, are
recorded and compiled. It must be a process without Triton's interpreter. The status is 3 if the installed Triton does
not know the capability. "deep" compiles deep poses, also some that the package gives to no kernel, and prints how many
registers and bytes each kernel takes.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from torchcaps.ops.children import Children, Gradients, Options, ParentTensors
from torchcaps.ops.numerics import accumulator, sum_dtype
from torchcaps.ops.triton.moments import moments, moments_backward
from torchcaps.ops.triton.parents import fit, posterior, scaled, share_logits, unit
from torchcaps.ops.triton.weighted_sum import weighted_sum, weighted_sum_backward

# Of an A100, an RTX 3090, an L4 or RTX 4090, an H100, a B200 and an RTX 5090.
CAPABILITIES = [80, 86, 89, 90, 100, 120]
UNKNOWN = 3  # the status if Triton does not know the capability
# Types of poses, and of weights, biases and gates; the last one is that of a layer under autocast.
SINGLE, DOUBLE = (torch.float32, torch.float32), (torch.float64, torch.float64)
HALF = [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
# (rows, d, h) of the papers' poses, matrices and vectors, and of some that the kernels pad.
POSES = {"4x4": (4, 4, 4), "8 -> 16": (1, 8, 16), "16 -> 16": (1, 16, 16), "6x6": (6, 6, 6), "8x8": (8, 8, 8),
         "64 -> 2": (1, 64, 2), "1 -> 1": (1, 1, 1), "3x2 -> 3x5": (3, 2, 5)}  # fmt: skip
DEEP = {"16 -> 16": (1, 16, 16), "8x8": (8, 8, 8), "32 -> 16": (1, 32, 16), "32 -> 32": (1, 32, 32),
        "64 -> 64": (1, 64, 64), "16x16": (16, 16, 16)}  # fmt: skip
QUICK = ["4x4", "8 -> 16", "1 -> 1", "3x2 -> 3x5"]
WAYS = ["dot parents", "dot leaky", "dot children", "unit parents", "unit children",
        "moments none", "moments dot", "moments gaussian"]  # fmt: skip
# For four types of children: the number of groups that share weights, and whether there are gates.
LAYOUTS = {"each": (4, False), "groups": (2, True), "one": (1, True), "gated": (4, True)}
PARENTS = [10, 32, 1, 65]


class Driver:
    """A driver without a device: the answers that Triton needs in order to compile."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Case(NamedTuple):
    """One reduction and its backward pass."""

    way: str
    pose: str
    layout: str
    parents: int
    types: tuple[torch.dtype, torch.dtype]
    samples: int = 3


def cases(which: str, capability: int) -> Iterator[Case]:
    """Yield the cases for a capability: "deep" poses in two ways, "all" ways and poses with the other values in turns,
    or a "few": a third of the ways, with the poses that compile quickly, in half precision for every second
    capability."""
    number = CAPABILITIES.index(capability)
    if which == "deep":
        for way, (pose, parents) in itertools.product(
            ("dot parents", "moments gaussian"),
            (("4x4", 32), ("8 -> 16", 10), *((pose, 10) for pose in DEEP), ("64 -> 64", 128)),
        ):
            yield Case(way, pose, "each", parents, SINGLE, samples=64)
        return
    if which == "all":
        types = [SINGLE, HALF[0], SINGLE, HALF[1], SINGLE, HALF[2], DOUBLE]
        for i, (way, pose) in enumerate(itertools.product(WAYS, POSES)):
            layout = list(LAYOUTS)[(i + i // 8) % 4]
            yield Case(way, pose, layout, PARENTS[(i + i // 4) % 4], types[(i + number) % 7])
        return
    for i in range(number // 2, len(WAYS), 3):
        types = HALF[i % 3] if number % 2 else (SINGLE, DOUBLE)[i % 5 == 4]
        yield Case(WAYS[i], QUICK[i % 4], list(LAYOUTS)[i % 4], PARENTS[i % 3], types)


def reduce(case: Case) -> None:
    """Compute a reduction and its gradients, with the biases, offsets and betas that it takes, of tensors without
    numbers."""
    (rows, d, h), (groups, gated) = (POSES | DEEP)[case.pose], LAYOUTS[case.layout]
    samples, types, parents = 1 if case.parents == 1 else case.samples, 4, case.parents
    kind, _, over = case.way.partition(" ")

    of_poses, of_weights = case.types
    of_sums = sum_dtype(of_poses)

    def new(*shape: int, dtype: torch.dtype = of_sums) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weight = new(groups, 1, 1, d, h, parents, dtype=of_weights).movedim(-1, 3)
    of_bias = groups, 1, 1, 1 if groups == 2 else parents, rows, h
    bias = None if case.layout == "one" else new(*of_bias, dtype=of_weights)
    gates = new(samples, types, 1, 1, dtype=of_weights) if gated else None
    children = Children(new(samples, types, 1, 1, rows, d, dtype=of_poses), weight, bias, gates)
    into = Gradients(*(None if x is None else accumulator(x) for x in children))
    state, score, offset = new(samples, parents, rows * h), new(samples, parents), new(groups, 1, 1, parents)
    if kind == "moments":
        of_agreement = {
            "none": (None, None, None, None),
            "dot": (state, None, None, offset),
            "gaussian": (state, state, score, None),
        }
        betas = None if case.layout == "each" else new(groups, 1, 1, 1 if groups == 2 else parents)
        arguments = children, ParentTensors(*of_agreement[over], betas), Options(eps=0.1)
        results = moments(*arguments)
        moments_backward((score, state, state, score), results[:3], *arguments, into)
    else:
        options = Options("children" if over == "children" else "parents", kind == "unit", over == "leaky")
        tensors = ParentTensors(state, offset=offset if case.layout in ("each", "groups") else None)
        arguments = children, tensors, options
        results = weighted_sum(*arguments)
        weighted_sum_backward((state,), results, *arguments, into)


def compute_parents(case: Case) -> None:
    """Compute what routings compute of the parents, and the gradients, of tensors without numbers."""
    (rows, _, h), parents = POSES[case.pose], case.parents

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=sum_dtype(case.types[0]), device="meta", requires_grad=True)

    state, score, betas = new(3, parents, rows * h), new(3, parents), (new(parents), new(parents))
    half = torch.empty(3, 4, 5, dtype=torch.float16, device="meta")
    scaled(half, half, dim=1)
    squashed, variance = scaled(state), new(*state.shape)
    scaled(state, squashed)
    for results in (
        (unit(state),),
        fit(variance, score, eps=0.1),
        fit(variance, None, score, *betas, 0.1, floor=0.1),
        posterior(score, state, variance),
        (share_logits(score),),
    ):
        torch.autograd.backward(results, [torch.empty_like(x) for x in results])


def launches(case: Case) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """Record what the case would start: kernel, grid, arguments and options."""
    found: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def note(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: found.append((kernel, grid, arguments, options))

    with mock.patch.object(triton.JITFunction, "__getitem__", note):
        reduce(case)
        if case.pose not in DEEP:  # these are about the votes
            compute_parents(case)
    return found


def usage(kernel: Any) -> str:
    """Return what a compiled kernel takes: registers and bytes of local memory of a thread, shared bytes of a block."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return f"{found['REG']} registers, {found['STACK']} bytes of local memory, {kernel.metadata.shared} shared"


@triton.jit
def nothing():
    pass


def main() -> None:
    which, capability = sys.argv[1], int(sys.argv[2])
    driver.set_active(Driver(capability))
    try:
        nothing.run(grid=(1,), warmup=True)
    except Exception:  # whatever it is, no kernel can be compiled
        print(f"Triton {triton.__version__} does not compile for sm_{capability}")
        sys.exit(UNKNOWN)
    compiled, failed = set(), 0
    for case in cases(which, capability):
        for kernel, grid, arguments, options in launches(case):
            numbers = tree_leaves((arguments, sorted(options.items())))
            key = kernel.__name__, str([x.dtype if isinstance(x, Tensor) else x for x in numbers])
            if key in compiled:
                continue
            compiled.add(key)
            try:
                compiled_kernel = kernel.run(*arguments, grid=grid, warmup=True, **options)
                if which == "deep":
                    pose = f"{case.pose}, {case.parents} parents"
                    print(f"{case.way}, {pose}, {kernel.__name__}: {usage(compiled_kernel)}", flush=True)
            except Exception as error:  # whatever it is, the other kernels are compiled
                failed += 1
                print(f"{kernel.__name__} of {case}: {str(error.__cause__ or error).strip().splitlines()[-1]}")
    print(f"{len(compiled)} kernels for sm_{capability}, {failed} do not compile")
    sys.exit(1 if failed or not compiled else 0)


if __name__ == "__main__":
    main()
