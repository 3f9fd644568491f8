"""Writing a network as a file for other programs, and checking the file by running it."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import torchcaps
from torchcaps.deploy.places import whole_files
from torchcaps.deploy.programs import ImageProgram, Inputs, TextProgram, as_module, batches, outputs_of, program_of
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import check_choice

Target = Literal["onnx", "torch"]
TARGETS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}  # with the ends of their names
FACTS = "facts.json"  # name of the facts in a PyTorch program
TOLERANCE = 1e-4  # largest difference between a file and its network, relative to the largest number of the output

# Runs in a process of its own, in which torchcaps cannot be imported.
ALONE = """
import sys
sys.modules["torchcaps"] = None
import torch
program, inputs, outputs = sys.argv[1:]
run = torch.export.load(program).module()
found = [run(*batch) for batch in torch.load(inputs, weights_only=True)]
torch.save([(out,) if isinstance(out, torch.Tensor) else tuple(out) for out in found], outputs)
"""


@checked
def export(
    network: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    path: str | Path,
    to: Target = "onnx",
    decoder: bool = False,
    facts: dict[str, Any] | None = None,
) -> float:
    """Write a network to a file that runs without torchcaps, for any batch size, and check the file.

    - "onnx": an ONNX file, in which the weights are too, unless they have 2 GB or more; those are beside it, in a file
      that ends in `.data`. It is run by onnxruntime.
    - "torch": a program of `torch.export`, with PyTorch's own operators alone. It is run in a process in which
      torchcaps cannot be imported.

    The file has inputs `images`, or `embeddings` and `mask`, and outputs `scores` and, with the decoder,
    `reconstruction`, that of the likeliest class. Heights, widths and channels are those of the example; texts may have
    any number of tokens. The network is exported as it is in evaluation mode, on the CPU; it is not changed.

    The file is run on batches of 1, 2 and 5 samples. It is left only if its outputs are those of the network.

    Args:
        network: network that returns a Prediction, or its scores alone.
        example: images `(batch, channels, height, width)`, or embeddings `(batch, tokens, layers, width)` and a mask
            `(batch, tokens)`, in the range and the type that the file will be given.
        path: the file; its name ends in `.onnx` or `.pt2`.
        to: what to write.
        decoder: whether the file also reconstructs images. Otherwise the decoder's weights are not in it.
        facts: what the file says of itself, by name, such as the classes; values that JSON has. In ONNX they are
            entries of the metadata, each in JSON, in a PyTorch program the extra file `facts.json`.

    Returns:
        The largest difference between an output of the file and one of the network.

    Raises:
        ValueError: an argument does not fit the others, the network cannot be exported, or the file computes something
            else than the network.
        ImportError: a package is missing that the target needs.
        OSError: the file cannot be written.
    """
    path, inputs = Path(path).expanduser(), example if isinstance(example, tuple) else (example,)
    if path.suffix != TARGETS[to]:
        raise ValueError(f"a file for {to!r} has a name that ends in {TARGETS[to]}, got {path}")
    if len(inputs) not in (1, 2) or not all(isinstance(x, Tensor) and x.dim() and len(x) for x in inputs):
        raise ValueError("example must be images, or a tuple of embeddings and mask, with at least one sample")
    inputs = tuple(x.detach().cpu() for x in inputs)
    write, run = _ways(to)
    module = as_module(network, inputs, decoder)
    samples = batches(inputs)
    expected = outputs_of(module, samples)  # before the export: wrong inputs end in the network's own message
    program = program_of(module, inputs)
    about = {"torchcaps": torchcaps.__version__, "inputs": _shapes(module, inputs), **(facts or {})}
    with whole_files(path) as unfinished:
        write(program, module, inputs, about, unfinished)
        return _difference(module, expected, run(unfinished, samples))


def _ways(to: str) -> tuple[Callable[..., None], Callable[[Path, list[Inputs]], list[Inputs]]]:
    """Return the functions that write and run the files of a target."""
    check_choice("to", to, TARGETS)
    if to == "torch":
        return _write_torch, _run_torch
    from torchcaps.deploy.onnx import run_onnx, write_onnx

    return write_onnx, run_onnx


def _shapes(module: ImageProgram | TextProgram, inputs: Inputs) -> dict[str, list[Any]]:
    """Return the shape of each input; sizes that may be any have their names."""
    return {
        name: [str(sizes[at].__name__) if at in sizes else size for at, size in enumerate(x.shape)]
        for name, sizes, x in zip(module.input_names, module.sizes, inputs, strict=True)
    }


def _write_torch(
    program: ExportedProgram, module: nn.Module, inputs: Inputs, facts: dict[str, Any], path: Path
) -> None:
    torch.export.save(program, path, extra_files={FACTS: json.dumps(facts, ensure_ascii=False, default=str)})


def _run_torch(path: Path, samples: list[Inputs]) -> list[Inputs]:
    """Run a program in a process of its own that has torch alone."""
    given, found = path.with_name("inputs"), path.with_name("outputs")
    torch.save(samples, given)
    command = [sys.executable, "-P", "-c", ALONE, str(path), str(given), str(found)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        raise ValueError(f"the exported program does not run with torch alone: {said}")
    outputs: list[Inputs] = torch.load(found, weights_only=True)
    return outputs


def _difference(module: ImageProgram | TextProgram, expected: Sequence[Inputs], found: Sequence[Inputs]) -> float:
    """Return the largest difference of outputs.

    Raises:
        ValueError: it is larger than TOLERANCE allows, or an output has another shape or is not finite.
    """
    largest = 0.0
    for at, name in enumerate(module.output_names):
        pairs = [(wanted[at].double(), got[at].double()) for wanted, got in zip(expected, found, strict=True)]
        if any(wanted.shape != got.shape for wanted, got in pairs):
            raise ValueError(f"the exported file returns {name} of another shape than the network")
        difference = max(_largest(got - wanted) for wanted, got in pairs)
        scale = max(_largest(wanted) for wanted, _ in pairs)
        if not difference <= TOLERANCE * scale:  # NaN too
            raise ValueError(
                f"the exported file computes something else than the network: {name} differ by {difference:.2g}, and "
                f"at most {TOLERANCE * scale:.2g} is allowed, {TOLERANCE:g} of the largest number"
            )
        largest = max(largest, difference)
    return largest


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
