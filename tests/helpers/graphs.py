"""The graphs that `torch.compile` makes of a training step for a GPU, without a GPU."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._pytree import tree_leaves

from torchcaps import use_backend
from torchcaps.ops.backend import HAS_TRITON, INTERPRETED

needs_interpreter = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="Triton's interpreter alone takes tensors of the device meta"
)


def assert_compiles_for_a_gpu(module: nn.Module, x: Tensor) -> None:
    """Check that a forward and backward pass with the Triton operators is one graph each, on the device alone, and that
    a second step compiles nothing.

    The device is `meta`: its tensors have no values, so whatever asks for a value fails here, as it does in a CUDA
    graph (`mode="reduce-overhead"`). Not covered: code that Inductor makes, the kernels, and what depends on the
    compute capability. A stage of benchmarks/device.py runs these on a GPU.
    """
    graphs: list[fx.Graph] = []
    warnings.filterwarnings("ignore", "aten::where: an autograd kernel")  # PyTorch's own, on the device meta

    def keep(program: fx.GraphModule, _: object) -> object:
        graphs.append(program.graph)
        (results,) = program.graph.output_node().args
        # Not run: some of PyTorch's operators have other strides on the device meta.
        return make_boxed_func(lambda *args: [_empty_like(result) for result in results])

    module = copy.deepcopy(module).to("meta").train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            part.momentum = 0.1  # PyTorch reads the number of batches for an average over all of them
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    for _ in range(2):
        poses = x.detach().to("meta").requires_grad_()
        with use_backend("triton"):
            results = [result for result in tree_leaves(compiled(poses)) if isinstance(result, Tensor)]
            sum(result.square().sum() for result in results).backward()
        assert poses.grad is not None
    assert len(graphs) == 2, "one forward, one backward"
    for graph in graphs:
        for node in graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                assert not isinstance(value, Tensor) or value.is_meta, f"{node.format_node()} is on the host"


def _empty_like(result: fx.Node | None) -> Tensor | None:
    if result is None:
        return None
    value = result.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
