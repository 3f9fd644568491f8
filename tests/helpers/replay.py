"""Runs the C++ kernels here, then the same calls in another process, and compares: `python replay.py COMMAND...`.

The command is `replay.cpp` with kernels of another processor, in an emulator, where there is neither Python nor
PyTorch. It gets a file for each call, in which it overwrites the tensors: a header, where in the struct the address of
each tensor is and its size, the struct, and the tensors. `make arm` runs it.
"""

import ctypes
import itertools
import random
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from algorithms import ALGORITHMS, make
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchcaps import CapsuleConv2d, CapsuleLinear, Capsules, squash
from torchcaps.ops import Dot, LinearVotes, UnitDot, native
from torchcaps.ops.pool import pool_by_agreement

# Bytes of a kernel's numbers, their name, and the largest difference in a tensor, divided by its largest number. One
# rounding to bfloat16 may go the other way.
NUMBERS = {2: ("bfloat16", 2**-8), 4: ("float32", 1e-5), 8: ("float64", 1e-12)}
POOL = -1
KERNELS = {number + back: name + " backward" * back for name, number in native.OPERATIONS.items() for back in (0, 1)}
KERNELS[POOL] = "routing pool"
SHAPES = [((4, 4), (4, 4)), (8, 16), ((2, 3), (2, 5)), (2, 2), (1, 1)]


class Call(NamedTuple):
    """A recorded call.

    Fields:
        operation: key of KERNELS.
        size: bytes of a number, a key of NUMBERS.
        path: file of the call.
        words: the struct as numbers of 64 bits, without its last.
        start: where in the file the tensors begin.
        left: memory of each tensor after the call.
    """

    operation: int
    size: int
    path: Path
    words: tuple[int, ...]
    start: int
    left: list[Tensor]


class Recorder:
    """The library, which also writes each call into a file of its own."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder, list[Call]()
        self.library = native.load()
        self.torchcaps_squash = self.library.torchcaps_squash  # plain loops, which are not compared

    def torchcaps_run(self, operation: int, size: int, problem: Any) -> int:
        return self.record(partial(self.library.torchcaps_run, operation), operation, size, problem)

    def torchcaps_routing_pool(self, size: int, problem: Any) -> int:
        return self.record(self.library.torchcaps_routing_pool, POOL, size, problem)

    def record(self, run: Callable[[int, Any], int], operation: int, size: int, problem: Any) -> int:
        content, live = bytes(problem._obj), live_memory()
        words = struct.unpack(f"{len(content) // 8}q", content)[:-1]
        # No size or option is as large as an address.
        given = [(8 * i, live[word]) for i, word in enumerate(words) if word in live]
        parts = [
            struct.pack("4q", operation, size, len(content), len(given)),
            *(struct.pack("2q", position, x.nbytes) for position, x in given),
            content,
        ]
        path = self.folder / f"{len(self.calls):05}"
        path.write_bytes(b"".join([*parts, *(ctypes.string_at(x.data_ptr(), x.nbytes) for _, x in given)]))
        status = run(size, problem)
        left = [x.clone() for _, x in given]
        self.calls.append(Call(operation, size, path, words, sum(map(len, parts)), left))
        return status


def live_memory() -> dict[int, Tensor]:
    """Return the memory of the tensors of the function that calls the library, by its address."""
    frame, live = sys._getframe(), dict[int, Tensor]()
    while frame.f_code.co_name not in ("reduce", "routing_pool"):
        frame = frame.f_back
    for x in tree_leaves(frame.f_locals):
        if isinstance(x, Tensor) and x.numel():
            memory = memory_of(x.detach())
            if x.data_ptr() not in live or len(memory) > len(live[x.data_ptr()]):
                live[x.data_ptr()] = memory
    return live


def memory_of(x: Tensor) -> Tensor:
    """Return the numbers from the first to the last of a tensor as they lie in memory."""
    return x.as_strided((1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)),), (1,))


def backward(*results: Tensor | None) -> None:
    sum(
        (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results if x is not None
    ).backward()


def run_layer(name: str, shape: Any, kind: str, bias: bool, gated: bool, dtype: torch.dtype) -> None:
    """Run a layer forward and backward, with few parents or more than a vector has, many children or few."""
    routing, options = make(name), {"bias": bias, "dtype": dtype, "backend": "native"}
    if kind == "windows":
        layer, places = CapsuleConv2d(3, 18, *shape, (3, 2), routing, (2, 3), 1, (2, 3), **options), (6, 5)
    elif kind == "shared":
        layer, places = CapsuleLinear(2, 37, *shape, routing, share_positions=True, **options), (5, 9)
    else:
        types, parents = {"many children": (261, 9), "many parents": (7, 17), "one of each": (1, 1)}[kind]
        layer, places = CapsuleLinear(types, parents, *shape, routing, **options), ()
    batch, types = 3, layer.in_capsules
    poses = squash(torch.randn(batch, types, *places, *layer.in_pose, dtype=dtype)).requires_grad_()
    scores = torch.randn(batch, types, *places, dtype=dtype, requires_grad=True) if gated else None
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # logits are small enough for float32
    backward(*layer(Capsules(poses, scores))[:3])


def run_sums(
    agreement: Callable[..., Dot | UnitDot], softmax: str, leaky: bool, groups: int, bias: bool, dtype: torch.dtype
) -> None:
    """Run weighted sums of which no routing has all."""
    draw = partial(torch.randn, dtype=dtype, requires_grad=True)
    poses, weight = draw(5, 6, 2, 3), draw(groups, 9, 3, 4) / 2
    votes = LinearVotes(poses, weight, draw(groups, 1, 2, 4) if bias else None, (2, 4), backend="native")
    query = draw(5, 9, 8)
    asked = agreement(query, draw(groups, 9)) if agreement is Dot else agreement(query)
    backward(votes.weighted_sum(asked, softmax, leaky=leaky))


def run_pool(sizes: tuple[int, ...], layout: str, iterations: int, masked: bool, dtype: torch.dtype) -> None:
    poses = torch.randn(sizes).to(dtype)
    if layout == "channels last":
        poses = poses.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    elif layout == "strided":
        poses = torch.stack([poses, poses], -1)[..., 0]
    present = (torch.rand(sizes[0] * sizes[1], sizes[3]) < 0.6) if masked else None
    if present is not None:
        present[:, -1] = True
    sharpness = torch.tensor((1 + iterations) / 2, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    backward(pool_by_agreement(poses.requires_grad_(), iterations, sharpness, present, "native"))


def cases() -> Iterator[partial]:
    """Return what is run: layers with every routing, weighted sums, and routing pools."""
    floats, yes_no = [torch.float32, torch.float64], [False, True]
    kinds = ["many children", "many parents", "one of each", "shared", "windows"]
    layers = list(itertools.product(ALGORITHMS, SHAPES, kinds, yes_no, yes_no, floats))
    yield from (partial(run_layer, *case) for case in random.Random(0).sample(layers, 300))
    for case in itertools.product([Dot, UnitDot], ["parents", "children"], yes_no, [1, 3, 6], yes_no, floats):
        if not (case[1] == "children" and case[2]):
            yield partial(run_sums, *case)
    sizes, layouts = (
        [(2, 3, 16, 49), (1, 1, 64, 144), (3, 2, 5, 7), (2, 2, 3, 17)],
        ["contiguous", "channels last", "strided"],
    )
    yield from (
        partial(run_pool, *case)
        for case in itertools.product(sizes, layouts, range(4), yes_no, [*floats, torch.bfloat16])
    )


def record(folder: Path) -> list[Call]:
    """Run all cases with one, two or three threads, and return their calls."""
    torch.manual_seed(0)
    recorder = Recorder(folder)
    with mock.patch.object(native, "load", return_value=recorder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers with which no training should begin
        for threads, case in enumerate(cases()):
            with mock.patch.object(torch, "get_num_threads", lambda threads=threads: 1 + threads % 3):
                case()
    return recorder.calls


def check_that_all_is_there(calls: list[Call]) -> None:
    """Check that every kernel is called, and that no size or option has always the same value, or an address is always
    null."""
    wanted = {(operation, size) for operation in KERNELS for size in NUMBERS if size > 2 or operation == POOL}
    missing = wanted - {(call.operation, call.size) for call in calls}
    assert not missing, missing
    for pool in (False, True):
        words = zip(*(call.words for call in calls if (call.operation == POOL) == pool), strict=True)
        same = [i for i, values in enumerate(words) if len(set(values)) == 1]
        assert not same, (pool, same)


def differences(call: Call) -> Iterator[float]:
    """Return the largest difference in each tensor, divided by its largest number and by what is allowed."""
    content, start = bytearray(call.path.read_bytes()), call.start
    for expected in call.left:
        found = torch.frombuffer(content, dtype=expected.dtype, count=len(expected), offset=start)
        start += expected.nbytes
        if torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):  # NaN is what nobody has written
            continue
        scale = expected.double().abs().max().clamp(min=1)  # a small number may be a sum of large ones
        difference = (found.double() - expected.double()).abs().max() / scale
        yield difference.nan_to_num(torch.inf).item() / NUMBERS[call.size][1]


def main(command: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        calls = record(Path(folder))
        check_that_all_is_there(calls)
        subprocess.run([*command, *(call.path for call in calls)], check=True)
        largest: dict[str, list[float]] = defaultdict(list)
        for call in calls:
            kernel = f"{KERNELS[call.operation]}, {NUMBERS[call.size][0]}"
            largest[kernel].append(max(differences(call), default=0.0))
    for kernel, values in sorted(largest.items()):
        print(f"{kernel:34} {len(values):5} calls, largest difference {max(values):.2g} of what is allowed")
    wrong = "; ".join(kernel for kernel, values in largest.items() if max(values) > 1)
    if wrong:
        sys.exit(
            f"{wrong}: expected results as on this machine, up to rounding: look in the kernels for what differs there"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
