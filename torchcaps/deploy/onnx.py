"""ONNX files: written by PyTorch's exporter, checked by the onnx package, run by onnxruntime."""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
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
        with silence_exporter():
            exported = torch.onnx.export(
                program,
                inputs,
                dynamo=True,
                dynamic_shapes=module.sizes,
                input_names=module.input_names,
                output_names=module.output_names,
                verbose=False,
                custom_translation_table=TRANSLATIONS,
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


def _number(value: float, like: Any) -> Any:
    return op.CastLike(op.Constant(value_float=value), like)


def sigmoid(x: Any) -> Any:
    """Return the sigmoid function. ONNX has it, but onnxruntime computes 0 of all numbers below -18."""
    return op.Reciprocal(op.Add(_number(1.0, x), op.Exp(op.Neg(x))))


def log_sigmoid(x: Any) -> Any:
    """Return min(x, 0) - log(1 + e) of e = exp(-|x|), with Kahan's correction of the rounding of 1 + e.

    The exporter takes the logarithm of the sigmoid, which is -inf where that is 0.
    """
    one = _number(1.0, x)
    e = op.Exp(op.Neg(op.Abs(x)))
    rounded = op.Add(one, e)
    corrected = op.Mul(op.Log(rounded), op.Div(e, op.Sub(rounded, one)))
    return op.Sub(op.Min(x, _number(0.0, x)), op.Where(op.Equal(rounded, one), e, corrected))


def expm1(x: Any) -> Any:
    """Return exp(x) - 1 as tanh(x / 2) (exp(x) + 1). The exporter's difference is 0 of small numbers."""
    return op.Mul(op.Tanh(op.Mul(x, _number(0.5, x))), op.Add(op.Exp(x), _number(1.0, x)))


def digamma(x: Any) -> Any:
    """Return the digamma function of positive numbers, for which ONNX has no operator.

    It is psi(x) = psi(x + 6) - sum_{k < 6} 1 / (x + k), with the asymptotic series of psi(x + 6).
    """
    y = op.Add(x, _number(6.0, x))
    inverse = op.Reciprocal(y)
    square = op.Mul(inverse, inverse)
    series = _number(0.0, x)
    for coefficient in (1 / 240, -1 / 252, 1 / 120, -1 / 12):
        series = op.Mul(square, op.Add(_number(coefficient, x), series))
    result = op.Add(op.Sub(op.Log(y), op.Mul(inverse, _number(0.5, x))), series)
    for k in range(6):
        result = op.Sub(result, op.Reciprocal(op.Add(x, _number(float(k), x))))
    return result


# Operators of PyTorch that the exporter does not translate, or whose translation is inexact in float32.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.digamma.default: digamma,
    torch.ops.aten.expm1.default: expm1,
    torch.ops.aten.log_sigmoid.default: log_sigmoid,
    torch.ops.aten.sigmoid.default: sigmoid,
}


def run_onnx(path: Path, batches: list[Inputs]) -> list[Inputs]:
    """Run an ONNX file on each batch, on the CPU.

    Raises:
        ValueError: onnxruntime refuses the file.
    """
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]  # in the order of the inputs
        outputs = [session.run(None, {name: x.numpy() for name, x in zip(names, b, strict=True)}) for b in batches]
    except Exception as error:  # onnxruntime's errors have no class in common
        reason = one_line(error).rpartition(" : ")[2][:200]  # after codes
        double = any(x.dtype == torch.float64 for b in batches for x in b)  # few operators of onnxruntime take it
        advice = "call .float() on the network and the example, or " if double else ""
        raise ValueError(f"onnxruntime cannot run the file ({reason}): {advice}export to 'torch' instead") from error
    return [tuple(map(torch.from_numpy, arrays)) for arrays in outputs]


@contextmanager
def silence_exporter() -> Iterator[None]:
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
