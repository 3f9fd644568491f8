"""Writing a network as a file for other programs, and checking the file by running it."""

import copy
import io
import json
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import torchcaps
from torchcaps.deploy.programs import Inputs, Program, as_module, outputs_of, program_of, routed
from torchcaps.measures.predicting import check_scores
from torchcaps.nn.modes import evaluating
from torchcaps.utils.arguments import checked
from torchcaps.utils.files import user_path, write_files_whole

Target = Literal["onnx", "torch"]
TARGETS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}  # with the ends of their names
FACTS_FILE = "facts.json"  # name of the facts in a PyTorch program
SIZES = (1, 2, 5)  # of the batches on which a file is checked
FACTORS = (0, 0.01, 100, -100)  # of the example, in further batches: a file can be right on the example alone
TOLERANCE = 1e-4  # largest difference between a file and its network, relative to the largest number of the output
ROUNDING = 2  # or, if that is more, the error of the file relative to that of the network, both from float64


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
      that ends in ".data". It is run by onnxruntime.
    - "torch": a program of `torch.export`, with PyTorch's own operators alone.

    The file has inputs `images`, or `embeddings` and `mask`, and outputs `scores` and, with the decoder,
    `reconstruction`, that of the likeliest class. Heights, widths and channels are those of the example; texts may have
    any number of tokens. The network is exported as it is in evaluation mode, on the CPU; it is not changed.

    The file is run on batches of 1, 2 and 5 samples, and on the example times 0, 0.01, 100 and -100. It is left only if
    its outputs are those of the network. A network that magnifies rounding has outputs far from those that it has in
    float64; its file may be twice as far from these, with a warning.

    Args:
        network: network that returns a Prediction, a Segmentation, or its scores alone.
        example: images `(batch, channels, height, width)`, or embeddings `(batch, tokens, layers, width)` and a mask
            `(batch, tokens)`, in the range and the type that the file will be given.
        path: the file; its name ends in `.onnx` or `.pt2`.
        to: what to write.
        decoder: whether the file also reconstructs images. Otherwise the decoder's weights are not in it.
        facts: what the file says of itself, by name, such as the classes; values that JSON has. In ONNX they are
            entries of the metadata, each in JSON, in a PyTorch program the extra file `facts.json`.

    Returns:
        The largest difference between an output of the file and one of the network, for the example.

    Raises:
        TypeError: the network returns none of these.
        ValueError: an argument does not fit the others, the network cannot be exported, or the file computes something
            else than the network.
        ImportError: a package is missing that the target needs.
        OSError: the file cannot be written.
    """
    path, inputs = user_path(path), example if isinstance(example, tuple) else (example,)
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
    first, *others = batches[-1]
    batches += [((factor * first).to(first.dtype), *others) for factor in FACTORS]
    # The network itself, if it runs here: other devices may compute less precisely, and the CPU lacks some backends.
    runs = all(value.is_cpu for value in (*network.parameters(), *network.buffers()))
    runs &= all(part.backend == "auto" for part in routed(network))
    reference = type(module)(network, decoder) if runs else module
    random = torch.get_rng_state()
    with evaluating(reference):  # before the export: wrong inputs end in the network's own message
        expected = outputs_of(reference, batches[: len(SIZES)])
        if not torch.get_rng_state().equal(random):
            raise ValueError(
                "the network draws random numbers, in evaluation mode too, so that no file can compute the same: "
                "export one that draws none, such as a routing with another `start`"
            )
        for scores, *_ in expected:
            check_scores(scores.movedim(1, -1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scores that are all 0, for example
            expected += outputs_of(reference, batches[len(SIZES) :])
    program = program_of(module, inputs)
    shapes = {
        name: [sizes[at].__name__ if at in sizes else size for at, size in enumerate(x.shape)]
        for name, sizes, x in zip(module.input_names, module.sizes, inputs, strict=True)
    }
    with write_files_whole(path) as unfinished:
        about = {"torchcaps": torchcaps.__version__, "inputs": shapes, **(facts or {})}
        write(program, module, inputs, about, unfinished)
        results = run(unfinished, batches)
        with evaluating(reference):
            return _difference(reference, batches, expected, results)


def _batch(inputs: Inputs, size: int, halved: bool) -> Inputs:
    """Return a batch of the samples of an example, repeated in turn; of texts perhaps only half of the tokens."""
    batch = tuple(x[torch.arange(size) % len(x)] for x in inputs)
    return tuple(x[:, : x.shape[1] // 2] for x in batch) if halved and len(batch) == 2 else batch


def _write_torch(program: ExportedProgram, module: Program, inputs: Inputs, facts: dict[str, Any], path: Path) -> None:
    content = io.BytesIO()  # on a full disk, torch would end the process
    torch.export.save(program, content, extra_files={FACTS_FILE: json.dumps(facts, ensure_ascii=False, default=str)})
    path.write_bytes(content.getbuffer())


def _run_torch(path: Path, batches: list[Inputs]) -> list[Inputs]:
    return outputs_of(torch.export.load(path).module(), batches)


def _difference(network: Program, batches: list[Inputs], expected: list[Inputs], results: list[Inputs]) -> float:
    """Return the largest difference of outputs for the example.

    Raises:
        ValueError: a difference is larger than is allowed, or an output has another shape or is not finite.
    """
    differences, beyond = [0.0], (0.0, 0.0)
    for at, name in enumerate(network.output_names):
        usual = max(outputs[at].abs().max().item() for outputs in expected[: len(SIZES)])
        for index, (of_network, of_file) in enumerate(zip(expected, results, strict=True)):
            wanted, got = of_network[at], of_file[at]
            if wanted.shape != got.shape:
                raise ValueError(f"the exported file returns {name} of another shape than the network")
            if index >= len(SIZES) and not wanted.isfinite().all():
                continue  # the inputs are too large for the network
            difference, allowed = _distance(got, wanted), TOLERANCE * max(usual, wanted.abs().max().item())
            if index < len(SIZES):
                differences.append(difference)
            if difference <= allowed:  # not NaN
                continue
            exact = _in_float64(network, batches[index])[at]
            of_rounding, error = _distance(wanted, exact), _distance(got, exact)
            if error <= allowed:  # both round, to different sides
                continue
            if not error <= ROUNDING * of_rounding:
                raise ValueError(
                    f"the exported file computes something else than the network: {name} differ by {difference:.2g}, "
                    f"and at most {allowed:.2g} is allowed, {TOLERANCE:g} of the largest number; from the network in "
                    f"float64 the file differs by {error:.2g}, and the network by {of_rounding:.2g}"
                )
            beyond = max(beyond, (error, of_rounding))
    if any(beyond):
        warnings.warn(
            f"the network magnifies rounding: from its outputs in float64 the file differs by {beyond[0]:.2g}, and the "
            f"network itself by {beyond[1]:.2g}",
            stacklevel=4,
        )
    return max(differences)


def _in_float64(network: Program, inputs: Inputs) -> Inputs:
    """Return what a network computes in float64. It is not changed."""
    copied = copy.deepcopy(network)
    copied.load_state_dict(network.state_dict())  # as the program is of a copy, too: a copy may have other weights
    (outputs,) = outputs_of(copied.double(), [tuple(x.double() for x in inputs)])
    return outputs


def _distance(x: Tensor, y: Tensor) -> float:
    return (x.double() - y.double()).abs().max().item()
