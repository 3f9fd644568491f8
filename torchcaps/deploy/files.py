"""Writing a network as a file for other programs, and checking the file by running it."""

import io
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import torchcaps
from torchcaps.deploy.programs import Inputs, Program, as_module, outputs_of, program_of, routed
from torchcaps.nn.modes import evaluating
from torchcaps.utils.arguments import checked
from torchcaps.utils.files import whole_files

Target = Literal["onnx", "torch"]
TARGETS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}  # with the ends of their names
FACTS = "facts.json"  # name of the facts in a PyTorch program
SIZES = (1, 2, 5)  # of the batches on which a file is checked
TOLERANCE = 1e-4  # largest difference between a file and its network, relative to the largest number of the output


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
    - "torch": a program of `torch.export`, with PyTorch's own operators alone.

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
        TypeError: the network returns neither a Prediction nor a tensor.
        ValueError: an argument does not fit the others, the network cannot be exported, or the file computes something
            else than the network.
        ImportError: a package is missing that the target needs.
        OSError: the file cannot be written.
    """
    path, inputs = Path(path).expanduser(), example if isinstance(example, tuple) else (example,)
    if path.suffix != TARGETS[to]:
        raise ValueError(f"a file for {to!r} has a name that ends in {TARGETS[to]}, got {path}")
    if len(inputs) not in (1, 2) or not all(x.dim() and len(x) for x in inputs):
        raise ValueError("example must be images, or a tuple of embeddings and mask, with at least one sample")
    write, run = _write_torch, _run_torch
    if to == "onnx":
        from torchcaps.deploy.onnx import run_onnx as run
        from torchcaps.deploy.onnx import write_onnx as write

    inputs = tuple(x.detach().cpu() for x in inputs)
    module = as_module(network, inputs, decoder)
    batches = [_batch(inputs, size, halved=size == 2) for size in SIZES]
    # The network itself, if it runs here: other devices may compute less precisely, and the CPU lacks some backends.
    runs = all(value.is_cpu for value in (*network.parameters(), *network.buffers()))
    runs &= all(part.backend == "auto" for part in routed(network))
    own = type(module)(network, decoder) if runs else module
    with evaluating(own):
        expected = outputs_of(own, batches)  # before the export: wrong inputs end in the network's own message
    program = program_of(module, inputs)
    shapes = {
        name: [sizes[at].__name__ if at in sizes else size for at, size in enumerate(x.shape)]
        for name, sizes, x in zip(module.input_names, module.sizes, inputs, strict=True)
    }
    with whole_files(path) as unfinished:
        about = {"torchcaps": torchcaps.__version__, "inputs": shapes, **(facts or {})}
        write(program, module, inputs, about, unfinished)
        return _difference(module, expected, run(unfinished, batches))


def _batch(inputs: Inputs, size: int, halved: bool) -> Inputs:
    """Return a batch of the samples of an example, repeated in turn; of texts perhaps only half of the tokens."""
    batch = tuple(x[torch.arange(size) % len(x)] for x in inputs)
    return tuple(x[:, : x.shape[1] // 2] for x in batch) if halved and len(batch) == 2 else batch


def _write_torch(program: ExportedProgram, module: Program, inputs: Inputs, facts: dict[str, Any], path: Path) -> None:
    content = io.BytesIO()  # on a full disk, torch would end the process
    torch.export.save(program, content, extra_files={FACTS: json.dumps(facts, ensure_ascii=False, default=str)})
    path.write_bytes(content.getbuffer())


def _run_torch(path: Path, batches: list[Inputs]) -> list[Inputs]:
    return outputs_of(torch.export.load(path).module(), batches)


def _difference(module: Program, expected: list[Inputs], results: list[Inputs]) -> float:
    """Return the largest difference of outputs.

    Raises:
        ValueError: it is larger than TOLERANCE allows, or an output has another shape or is not finite.
    """
    differences = []
    for at, name in enumerate(module.output_names):
        of_network, of_file = [x[at] for x in expected], [x[at] for x in results]
        if [x.shape for x in of_network] != [x.shape for x in of_file]:
            raise ValueError(f"the exported file returns {name} of another shape than the network")
        wanted, got = (torch.cat([x.double().flatten() for x in outputs]) for outputs in (of_network, of_file))
        difference, largest = (got - wanted).abs().max().item(), wanted.abs().max().item()
        if not difference <= TOLERANCE * largest:  # NaN too
            raise ValueError(
                f"the exported file computes something else than the network: {name} differ by {difference:.2g}, and "
                f"at most {TOLERANCE * largest:.2g} is allowed, {TOLERANCE:g} of the largest number"
            )
        differences.append(difference)
    return max(differences)
