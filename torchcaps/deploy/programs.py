"""Networks as programs of `torch.export`: PyTorch's own operators, weights, any batch size."""

import copy
import io
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from torchcaps.capsules import Prediction
from torchcaps.ops.backend import use_backend

Inputs = tuple[Tensor, ...]
BATCH, TOKENS = Dim("batch"), Dim("tokens")
SIZES = (1, 2, 5)  # of the batches on which a file is checked


class _Program(nn.Module):
    """Wraps a network so that it returns tensors: its scores, and the reconstruction if that is asked for."""

    input_names: tuple[str, ...]

    def __init__(self, network: nn.Module, decoder: bool) -> None:
        super().__init__()
        self.network, self.decoder = network, decoder
        self.output_names = ("scores", "reconstruction") if decoder else ("scores",)

    def _outputs(self, prediction: Prediction | Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(prediction, Tensor):
            return prediction
        if not self.decoder:
            return prediction.evidence
        network: Any = self.network
        return prediction.evidence, network.reconstruct(prediction.capsules)


class ImageProgram(_Program):
    """Network of images. The names of the arguments are those of the exported inputs."""

    input_names = ("images",)
    sizes: tuple[dict[int, Any], ...] = ({0: BATCH},)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self._outputs(self.network(images))


class TextProgram(_Program):
    """Network of embedded texts, which takes any number of tokens."""

    input_names = ("embeddings", "mask")
    sizes: tuple[dict[int, Any], ...] = ({0: BATCH, 1: TOKENS}, {0: BATCH, 1: TOKENS})

    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self._outputs(self.network(embeddings, mask))


def as_module(network: nn.Module, inputs: Inputs, decoder: bool) -> ImageProgram | TextProgram:
    """Return a copy of a network on the CPU, in evaluation mode, that returns tensors.

    The copy has no decoder if none is asked for, and its layers take the backend that is set by `use_backend`.

    Raises:
        ValueError: a decoder is asked for and there is none, or a text has fewer than two tokens.
    """
    if decoder and (getattr(network, "decoder", None) is None or not hasattr(network, "reconstruct")):
        raise ValueError(f"this {type(network).__name__} has no decoder: leave out the decoder")
    if len(inputs) == 2 and min(inputs[0].shape[1:2], default=0) < 2:
        raise ValueError(f"expected embeddings of at least two tokens as example, got {tuple(inputs[0].shape)}")
    copied: Any = copy.deepcopy(network).cpu().eval().requires_grad_(False)
    if not decoder and isinstance(getattr(copied, "decoder", None), nn.Module):
        copied.decoder = None
    parts: Any = copied.modules()
    for part in parts:
        if isinstance(getattr(part, "backend", None), str):
            part.backend = "auto"
    return (ImageProgram if len(inputs) == 1 else TextProgram)(copied, decoder).eval()


def batches(inputs: Inputs) -> list[Inputs]:
    """Return batches of SIZES samples, made of the samples of an example in turn; every other one of half the
    tokens."""
    found = []
    for number, size in enumerate(SIZES):
        batch = tuple(x[torch.arange(size) % len(x)] for x in inputs)
        if len(batch) == 2 and number % 2:
            batch = tuple(x[:, : max(1, x.shape[1] // 2)] for x in batch)
        found.append(batch)
    return found


@torch.no_grad()
def outputs_of(module: nn.Module, samples: list[Inputs]) -> list[Inputs]:
    """Return the outputs of a module for each batch."""
    found = (module(*inputs) for inputs in samples)
    return [(out,) if isinstance(out, Tensor) else tuple(out) for out in found]


def program_of(module: ImageProgram | TextProgram, inputs: Inputs) -> ExportedProgram:
    """Export a module with any batch size. The program consists of PyTorch's own operators.

    Raises:
        ValueError: the network cannot be exported; the message says why.
    """
    example = tuple(x[torch.arange(2) % len(x)] for x in inputs)  # torch.export would take a batch of 1 for a constant
    try:
        with redirect_stderr(io.StringIO()), use_backend("reference"), torch.no_grad():  # torch prints graphs to it
            program = torch.export.export(module, example, dynamic_shapes=module.sizes)
    except Exception as error:  # torch.export raises errors of many types, and so do networks of the user's own
        raise ValueError(f"{type(module.network).__name__} cannot be exported: {_reason(error)}") from error
    foreign = {name for node in program.graph.nodes if (name := str(node.target)).startswith("torchcaps.")}
    if foreign:
        raise ValueError(
            f"{type(module.network).__name__} cannot be exported: it calls {', '.join(sorted(foreign))}, which is no "
            "operator of PyTorch's own"
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names files of this machine
    return program


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost message: torch adds pages to it."""
    while (inner := error.__cause__ or error.__context__) is not None and not isinstance(error, ValueError):
        error = inner
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
