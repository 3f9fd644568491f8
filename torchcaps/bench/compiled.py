"""Machine code of the Triton kernels, compiled without a GPU: registers, spills, instructions of their loops.

    python -m torchcaps.bench.compiled                              # the papers' layers on sm_90
    python -m torchcaps.bench.compiled --layers heinsen --capability 80
    python -m torchcaps.bench.compiled --host                       # launches and memory instead of machine code
    python -m torchcaps.bench.compiled --cases all                  # does every kind of reduction compile? no table

Triton compiles for the device that its driver names, and here a driver names one that need not exist. The launches of a
layer are recorded and compiled, and the tools that come with Triton take their machine code apart. The numbers are
counts, not times.
"""

import collections
import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from torchcaps.bench.layers import LAYERS
from torchcaps.bench.memory import peak_of
from torchcaps.bench.passes import prepare
from torchcaps.bench.script import script_parser
from torchcaps.extras import needs
from torchcaps.ops import backend
from torchcaps.ops.children import Children, Gradients, Options

with needs("dev"):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from torchcaps.ops.triton import launch, uniform

# By compute capability: the multiprocessors of an A100, an RTX 3090 and an H100.
CAPABILITIES = {80: 108, 86: 84, 90: 132}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BATCHES = {"inverted-attention-conv": 32, "heinsen": 20, "capnet-dynamic": 4, "digit-capsules": 128, "em-conv": 8}


class Driver:
    """A driver without a device: the answers that Triton needs in order to compile."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps the compiled kernels of each device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Launch(NamedTuple):
    """A launch of a kernel that was recorded in place of running it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self) -> Any:
        return self.kernel.run(grid=self.grid, warmup=True, **self.arguments)


def record(run: Callable[[], object], capability: int) -> list[Launch]:
    """Record what would be launched on a device of this compute capability."""
    found: list[Launch] = []
    with launches_to(lambda *one: found.append(Launch(*one)), capability):
        run()
    return found


@contextlib.contextmanager
def launches_to(note: Callable[[Any, tuple[int, ...], dict[str, Any]], object], capability: int) -> Iterator[None]:
    """Within this context, pass each launch to `note` in place of running it."""
    Driver.capability = capability
    with (
        mock.patch.multiple(
            launch,
            run=lambda device, kernel, grid, **arguments: note(kernel, grid, arguments),
            architecture=lambda device: f"sm_{capability}",
            multiprocessors=lambda device: CAPABILITIES[capability],
        ),
        mock.patch.object(backend, "INTERPRETED", True),  # lets tensors on the CPU choose the Triton backend
    ):
        yield


# ---------------------------------------------------------------- machine code


class Code(NamedTuple):
    """What a compiled kernel uses.

    Fields:
        registers: registers of a thread.
        spilled: bytes that a thread spills to memory.
        shared: bytes of shared memory of a program.
        loop: number of instructions by name in the largest innermost loop, which runs over children; empty if there is
            no loop.
    """

    registers: int
    spilled: int
    shared: int
    loop: dict[str, int]


def read_code(compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise SystemExit(f"cuobjdump printed no registers: {usage.strip()}")
    registers, stack, _, local = map(int, found.groups())
    return Code(registers, stack + local, compiled.metadata.shared, _loop(listing))


def _tool(name: str, *arguments: str) -> str:
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True)
    return run.stdout + run.stderr


def _loop(listing: str) -> dict[str, int]:
    """Number of instructions by name in the largest loop that contains no other loop."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in listing.splitlines():
        label, instruction = re.match(r"\s*(\.L_\w+):", line), re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append(instruction[1])
    loops = []
    for last, line in enumerate(code):
        jump = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if jump and labels.get(jump[1], last) < last - 3:  # the last instruction jumps to itself
            loops.append((labels[jump[1]], last))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    if not inner:
        return {}
    first, last = max(inner, key=lambda ends: ends[1] - ends[0])
    names = (re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0] for instruction in code[first : last + 1])
    return dict(collections.Counter(name.split(".")[0] for name in names).most_common())


# ---------------------------------------------------------------- layers


def layer_launches(name: str, capability: int) -> list[Launch]:
    """Record the launches of a paper's layer, forward and backward."""
    case = LAYERS[name].build(1, BATCHES[name], None, False).to("cpu", torch.float32)
    return record(prepare("triton", case, backward=True), capability)


def layer_rows(name: str, capability: int) -> dict[str, dict[str, Any]]:
    """Machine code of each kernel and agreement of a layer, and the votes that an iteration of its loop computes."""
    rows: dict[str, dict[str, Any]] = {}
    for one in layer_launches(name, capability):
        if one.name in ("pack", "merge"):
            continue
        row = f"{one.name}, {one.arguments['agreement']}"
        if row in rows:
            continue
        code = read_code(one.compile())
        votes = one.arguments["block_n"] * min(one.arguments["block_j"], one.arguments["parents"])
        rows[row] = {**code._asdict(), "votes": votes, "tile": _tile(one)}
    return rows


COLUMNS = (
    "kernel",
    "samples x parents",
    "registers",
    "spilled bytes",
    "shared bytes",
    "instructions for 32 votes",
    "of these FMA, loads, shuffles",
)


def _tile(one: Launch) -> str:
    a = one.arguments
    return f"{a['block_n']} x {a['block_j']}, {a['per_lane']} per lane, {a['num_warps']} warp(s)"


# ---------------------------------------------------------------- the host

# Operators that start no kernel on a device.
NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "as_strided", "view", "_unsafe_view",
    "expand", "expand_as", "permute", "transpose", "t", "numpy_T", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "reshape", "_reshape_alias", "unflatten", "flatten", "movedim", "resolve_conj", "resolve_neg",
    "lift_fresh", "contiguous", "to", "_to_copy", "narrow", "unbind", "split", "view_as", "result_type", "resize_",
    "as_strided_", "einsum", "matmul", "linear", "chunk", "swapaxes", "item", "_local_scalar_dense",
}  # fmt: skip


class Host(NamedTuple):
    """Launches and memory of a layer, forward and backward, while its kernels do nothing.

    Fields:
        iterations: number of routing iterations.
        kernels: launches of our kernels.
        operators: PyTorch's operators that would start a kernel.
        peak: most bytes held at once beyond children and weights.
        tiled: the same peak for the tiled backend, or None if it was not measured.
    """

    iterations: int
    kernels: int
    operators: int
    peak: int
    tiled: int | None


def host(name: str, with_tiled: bool) -> Host:
    """Count the launches and memory of a paper's layer."""
    case = LAYERS[name].build(1, BATCHES[name], None, False).to("cpu", torch.float32)
    started: list[str] = []
    with launches_to(lambda kernel, *rest: started.append(kernel.__name__), 90):  # keeps no tensor alive
        found = _profile(prepare("triton", case, backward=True), started.clear)
    tiled = peak_of(_profile(prepare("tiled", case, backward=True))) if with_tiled else None
    return Host(LAYERS[name].iterations, len(started), sum(map(_operators, _roots(found))), peak_of(found), tiled)


def _profile(run: Callable[[], object], before: Callable[[], object] = int) -> Any:
    """Profile the second run; call `before` between the two."""
    run()
    before()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    return found


def _roots(found: Any) -> list[Any]:
    return [event for event in found.events() if event.cpu_parent is None]


def _operators(event: Any) -> int:
    """Count the operators in an event that would start a kernel on a device: those that call no other operator.

    Those that other operators call on the CPU, but not on a device, are left out.
    """
    inner = sum(map(_operators, event.cpu_children))
    name = event.name.removeprefix("aten::")
    if inner or name == event.name or name in NOTHING:
        return inner
    above = event.cpu_parent.name.removeprefix("aten::") if event.cpu_parent else ""
    number = name == "copy_" and above == "_to_copy"  # a Python number becomes a tensor
    return int(not number and (name != "fill_" or above != "sum"))


# ---------------------------------------------------------------- all kinds of reductions

# (rows, d, h) of the papers' poses, matrices and vectors, and of some that the kernels pad.
POSES = {"4x4": (4, 4, 4), "8 -> 16": (1, 8, 16), "16 -> 16": (1, 16, 16), "6x6": (6, 6, 6), "8x8": (8, 8, 8),
         "64 -> 2": (1, 64, 2), "1 -> 1": (1, 1, 1), "3x2 -> 3x5": (3, 2, 5)}  # fmt: skip
WAYS = ["dot parents", "dot leaky", "dot children", "unit parents", "unit children", "uniform",
        "moments none", "moments dot", "moments gaussian"]  # fmt: skip
# For four types of children: the number of groups that share weights, whether there are gates, whether windows.
LAYOUTS = {"each": (4, False, False), "groups": (2, True, False), "one": (1, True, False), "windows": (4, True, True)}
PARENTS = [10, 32, 1, 131]


def case_launches(way: str, pose: str, layout: str, parents: int, dtype: torch.dtype, capability: int) -> list[Launch]:
    """Record the launches of one reduction and its backward pass, with the biases, offsets and betas that it takes."""
    (rows, d, h), (groups, gated, on_grid) = POSES[pose], LAYOUTS[layout]
    kernel, grid = ((2, 2), (5, 5)) if on_grid else ((1, 1), (1, 1))
    images, types = 3, 4
    samples = images * (16 if on_grid else 1)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weight = new(groups, *kernel, d, h, parents).movedim(-1, 3)
    bias = None if layout == "one" else new(groups, *kernel, 1 if layout == "groups" else parents, rows, h)
    children = Children(
        new(images, types, *grid, rows, d), weight, bias, new(samples, types, *kernel) if gated else None
    )
    into = Gradients(*(None if x is None else torch.zeros_like(x) for x in children))
    state, score = new(samples, parents, rows * h), new(samples, parents)
    kind, _, over = way.partition(" ")

    def run() -> None:
        if kind == "uniform":
            options = Options()
            uniform.vote_sum(children._replace(gates=new(samples, types, *kernel)), options)
            with_gates = children._replace(gates=new(samples, types, *kernel))
            uniform.vote_sum_backward((state,), (), with_gates, options, into._replace(gates=with_gates.gates))
        elif kind == "moments":
            agreement_tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (
                None,
                None,
                None,
                None,
            )
            if over == "dot":
                agreement_tensors = state, None, None, new(groups, *kernel, parents)
            elif over == "gaussian":
                agreement_tensors = state, state, score, None
            betas = None if layout == "each" else new(groups, *kernel, 1 if layout == "groups" else parents)
            options = Options(eps=0.1)
            found = launch.moments(children, *agreement_tensors, betas, options)
            grads = score, state, state, score
            launch.moments_backward(grads, found[:3], children, *agreement_tensors, betas, options, into)
        else:
            options = Options("children" if over == "children" else "parents", kind == "unit", over == "leaky")
            offset = new(groups, *kernel, parents) if layout in ("each", "groups") else None
            found_sums = launch.weighted_sum(children, state, offset, options)
            launch.weighted_sum_backward((state,), found_sums, children, state, offset, options, into)

    return record(run, capability)


def cases(which: str, capabilities: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of :func:`case_launches`.

    "all" combines all ways, poses and layouts, and takes the other values in turns; "few" is one case per way.
    """
    dtypes = [torch.float32, torch.float64]
    if which == "all":
        products = itertools.product(capabilities, WAYS, POSES, LAYOUTS)
        for i, (capability, way, pose, layout) in enumerate(products):
            yield {"way": way, "pose": pose, "layout": layout, "parents": PARENTS[(i + i // 4) % 4],
                   "dtype": dtypes[i % 7 == 6], "capability": capability}  # fmt: skip
        return
    for i, way in enumerate(WAYS):
        capability = list(CAPABILITIES)[i % 3]
        if capability in capabilities:
            yield {"way": way, "pose": list(POSES)[i % len(POSES)], "layout": list(LAYOUTS)[i % 4],
                   "parents": PARENTS[(i + i // 4) % 4], "dtype": dtypes[i % 5 == 4],
                   "capability": capability}  # fmt: skip


def compile_cases(which: str, capabilities: Sequence[int]) -> list[str]:
    """Compile the launches of all cases; return a line for each kernel that does not compile."""
    failed, done, count = [], set(), 0
    for case in cases(which, capabilities):
        for one in case_launches(**case):
            key = (case["capability"], one.name, *(str(x) for x in one.arguments.values() if not isinstance(x, Tensor)))
            if key in done:
                continue
            done.add(key)
            try:
                one.compile()
                count += 1
            except Exception as error:
                cause = error.__cause__ or error
                failed.append(f"{one.name} of {case}: {str(cause).strip().splitlines()[-1]}")
                print(failed[-1], file=sys.stderr, flush=True)
    print(f"{count} kernels compiled, {len(failed)} did not")
    return failed


def print_host(found: dict[str, Host], as_json: bool) -> None:
    """Print launches and memory by layer, as Markdown or as a line of JSON."""
    if as_json:
        print(json.dumps({name: of._asdict() for name, of in found.items()}))
        return
    columns = "layer", "iterations", "our kernels", "PyTorch's", "both, per iteration", "peak", "of tiled"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, of in found.items():
        each = (of.kernels + of.operators) / of.iterations
        peaks = f"{of.peak / 1e6:.0f} MB | {(of.tiled or 0) / 1e6:.0f} MB"
        print(f"| {name} | {of.iterations} | {of.kernels} | {of.operators} | {each:.0f} | {peaks} |")


def main() -> None:
    parser = script_parser("compiled", __doc__)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="layers (default: all)")
    parser.add_argument(
        "--capability",
        type=int,
        nargs="+",
        choices=CAPABILITIES,
        default=[90],
        help="compute capabilities to compile for (default: 90)",
    )
    parser.add_argument("--cases", choices=["few", "all"], help="compile every kind of reduction, and print no table")
    parser.add_argument("--host", action="store_true", help="count launches and memory, beside the memory of tiled")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args()
    if backend.INTERPRETED:
        raise SystemExit("TRITON_INTERPRET=1 makes Triton interpret its kernels, and they must be compiled: unset it")
    driver.set_active(Driver())
    if options.cases:
        raise SystemExit(1 if compile_cases(options.cases, options.capability) else 0)
    if options.host:
        print_host({name: host(name, not options.json) for name in options.layers}, options.json)
        return
    table = {
        f"sm_{capability}": {name: layer_rows(name, capability) for name in options.layers}
        for capability in options.capability
    }
    if options.json:
        print(json.dumps(table, indent=1))
        return
    for device, layers in table.items():
        for name, rows in layers.items():
            print(f"\n**{name}, {device}**\n")
            print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
            for kernel, row in rows.items():
                loop, votes = row["loop"], row["votes"]
                parts = ", ".join(str(round(32 * loop.get(x, 0) / votes)) for x in ("FFMA", "LDG", "SHFL"))
                total = round(32 * sum(loop.values()) / votes)
                cells = kernel, row["tile"], row["registers"], row["spilled"], row["shared"], total, parts
                print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
