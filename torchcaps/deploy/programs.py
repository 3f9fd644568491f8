"""Networks as programs of `torch.export`: PyTorch's own operators, weights, any batch size."""

import copy
import io
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from torchcaps.capsules import Prediction, Segmentation
from torchcaps.measures.predicting import has_decoder
from torchcaps.nn import RoutingPool2d
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.ops.backend import use_backend
from torchcaps.utils.arguments import HALF, shown_with_type

Inputs = tuple[Tensor, ...]
BATCH, TOKENS = Dim("batch"), Dim("tokens")
PYTORCH = ("aten", "higher_order", "prim", "prims")  # namespaces of PyTorch's own operators


class Program(nn.Module):
    """Wraps a network so that it returns tensors: its scores, and the reconstruction if that is asked for."""

    input_names: tuple[str, ...]
    sizes: tuple[dict[int, Any], ...]  # of each input, the dimensions that may have any size

    def __init__(self, network: nn.Module, decoder: bool) -> None:
        super().__init__()
        self.network, self.decoder = network, decoder
        self.output_names = ("scores", "reconstruction") if decoder else ("scores",)

    def _outputs(self, prediction: Any) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(prediction, Tensor) and not self.decoder:
            return prediction
        if not isinstance(prediction, Prediction | Segmentation):
            raise TypeError(
                "a network that is exported must return a torchcaps.Prediction or Segmentation, or a tensor of scores "
                f"if there is no decoder, got {shown_with_type(prediction)}"
            )
        network: Any = self.network
        scores = prediction.evidence
        return (scores, network.reconstruct(prediction.capsules)) if self.decoder else scores


class ImageProgram(Program):
    """Network of images. The names of the arguments are those of the exported inputs."""

    input_names = ("images",)
    sizes = ({0: BATCH},)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self._outputs(self.network(images))


class TextProgram(Program):
    """Network of embedded texts, which takes any number of tokens."""

    input_names = ("embeddings", "mask")
    sizes = ({0: BATCH, 1: TOKENS}, {0: BATCH, 1: TOKENS})

    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self._outputs(self.network(embeddings, mask))


def as_module(network: nn.Module, inputs: Inputs, decoder: bool) -> Program:
    """Return a copy of a network on the CPU, in evaluation mode, that returns tensors.

    The copy has no decoder if none is asked for, and its layers take the backend that is set by `use_backend`.

    Raises:
        ValueError: a decoder is asked for and there is none, the network or its inputs are in half precision, or a text
            has fewer than two tokens.
    """
    if decoder and not has_decoder(network):
        raise ValueError(f"this {type(network).__name__} has no decoder: leave out the decoder")
    for value in (*inputs, *network.parameters(), *network.buffers()):
        if value.dtype in HALF:
            raise ValueError(f"expected a network and an example in float32, got {value.dtype}: call .float() first")
    if len(inputs) == 2 and min(inputs[0].shape[1:2], default=0) < 2:
        raise ValueError(f"expected embeddings of at least two tokens as example, got {tuple(inputs[0].shape)}")
    copied: Any = copy.deepcopy(network).cpu().eval().requires_grad_(False)
    if not decoder and has_decoder(copied):
        copied.decoder = None
    for part in routed(copied):
        part.backend = "auto"
    return (ImageProgram if len(inputs) == 1 else TextProgram)(copied, decoder).eval()


def routed(network: nn.Module) -> list[Any]:
    """Return the modules of a network that have a backend. What others call so is theirs."""
    return [part for part in network.modules() if isinstance(part, CapsuleLayer | RoutingPool2d)]


@torch.no_grad()
def outputs_of(module: nn.Module, batches: list[Inputs]) -> list[Inputs]:
    """Return the outputs of a module for each batch."""
    outputs = (module(*inputs) for inputs in batches)
    return [(out,) if isinstance(out, Tensor) else tuple(out) for out in outputs]


def program_of(module: Program, inputs: Inputs) -> ExportedProgram:
    """Export a module with any batch size. The program consists of PyTorch's own operators.

    Raises:
        ValueError: the network cannot be exported; the message says why.
    """
    name = type(module.network).__name__
    example = tuple(x[torch.arange(2) % len(x)] for x in inputs)  # torch.export would take a batch of 1 for a constant
    try:
        with redirect_stderr(io.StringIO()), use_backend("reference"), torch.no_grad():  # torch prints graphs to it
            program = torch.export.export(module, example, dynamic_shapes=module.sizes)
    except Exception as error:  # torch.export raises errors of many types, and so do networks of the user's own
        raise ValueError(f"{name} cannot be exported: {_reason(error)}") from error
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    operators = {node.target for graph in graphs for node in graph.nodes if hasattr(node.target, "namespace")}
    foreign = {str(operator) for operator in operators if operator.namespace not in PYTORCH}
    if foreign:
        raise ValueError(f"{name} cannot be exported: PyTorch itself has no operator {', '.join(sorted(foreign))}")
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names files of this machine
    return program


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost message: torch adds pages to it."""
    while (inner := error.__cause__ or error.__context__) is not None and not isinstance(error, ValueError):
        error = inner
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
