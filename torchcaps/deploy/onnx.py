"""ONNX files: written by PyTorch's exporter, checked by the onnx package, run by onnxruntime."""

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from torchcaps.deploy.programs import Inputs, Program
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs

with needs("export"):
    import onnx
    import onnx_ir
    import onnxruntime
    from onnxscript import opset18

op: Any = opset18  # its types do not know all that its functions take
LARGEST = 2**31 - 2**24  # bytes of weights that a file can hold, with room for the rest: protobuf takes less than 2 GB


def write_onnx(program: ExportedProgram, module: Program, inputs: Inputs, facts: dict[str, Any], path: Path) -> None:
    """Write a program as an ONNX file, with the facts as metadata, and check its form."""
    try:
        with quiet():
            exported = torch.onnx.export(
                program,
                inputs,
                dynamo=True,
                dynamic_shapes=module.sizes,
                input_names=module.input_names,
                output_names=module.output_names,
                verbose=False,
                custom_translation_table={torch.ops.aten.digamma.default: digamma},
            )
    except torch.onnx.OnnxExporterError as error:
        missing = sorted(set(re.findall(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(error))))
        cause = error.__cause__ or error
        reason = f"it has no operator for {' and '.join(missing)}" if missing else one_line(cause)[:200]
        raise ValueError(f"the network cannot be written as ONNX ({reason}): export to 'torch' instead") from error
    assert exported is not None
    model = exported.model
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # notes of the exporter, a few percent of a small file
    for name, value in facts.items():
        model.metadata_props[name] = json.dumps(value, ensure_ascii=False, default=str)
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    onnx_ir.save(model, path, external_data=f"{path.name}.data" if size > LARGEST else None)
    onnx.checker.check_model(path, full_check=size <= LARGEST)


def digamma(x: Any) -> Any:
    """Return the digamma function of positive numbers in operators of ONNX, which has none for it.

    It is psi(x) = psi(x + 6) - sum_{k < 6} 1 / (x + k), with the asymptotic series of psi(x + 6).
    """

    def number(value: float) -> Any:
        return op.CastLike(op.Constant(value_float=value), x)

    y = op.Add(x, number(6.0))
    inverse = op.Reciprocal(y)
    square = op.Mul(inverse, inverse)
    series = number(0.0)
    for coefficient in (1 / 240, -1 / 252, 1 / 120, -1 / 12):
        series = op.Mul(square, op.Add(number(coefficient), series))
    result = op.Add(op.Sub(op.Log(y), op.Mul(inverse, number(0.5))), series)
    for k in range(6):
        result = op.Sub(result, op.Reciprocal(op.Add(x, number(float(k)))))
    return result


def run_onnx(path: Path, batches: list[Inputs]) -> list[Inputs]:
    """Run an ONNX file on each batch, on the CPU."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]  # in the order of the inputs
    outputs = (session.run(None, {name: x.numpy() for name, x in zip(names, b, strict=True)}) for b in batches)
    return [tuple(map(torch.from_numpy, arrays)) for arrays in outputs]


@contextmanager
def quiet() -> Iterator[None]:
    """Within this context there are no warnings, nor messages of the exporter about packages that it does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
