"""ONNX files: written by PyTorch's exporter, checked by the onnx package, run and quantized by onnxruntime."""

import json
import logging
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from torchcaps.deploy.programs import Inputs, Program
from torchcaps.utils.arguments import FloatTensor, checked
from torchcaps.utils.extras import needs
from torchcaps.utils.files import whole_files

with needs("export"):
    import onnx
    import onnx_ir
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process
    from onnxscript import opset18

op: Any = opset18  # its types do not know all that its functions take
LARGEST = 2**31 - 2**24  # bytes of weights that a file can hold, with room for the rest: protobuf takes less than 2 GB

INT8 = ["Conv", "MatMul", "Gemm"]  # what is quantized; other operators, those of the routing among them, stay float32
BATCH = 32  # images at a time
TIMED, REPEATS = 8, 15  # batches in a measurement of time, and measurements


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
        if not missing:
            raise
        raise ValueError(f"ONNX has no operator for {' and '.join(missing)}: export to 'torch' instead") from error
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


class _Images(CalibrationDataReader):
    def __init__(self, images: Tensor) -> None:
        self._batches = iter(images.split(BATCH))

    def get_next(self) -> dict[str, object] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"images": batch.numpy()}


@checked
def quantize(source: str | Path, path: str | Path, images: FloatTensor) -> float:
    """Write an ONNX file that computes convolutions and matrix products in int8.

    Weights have a scale per channel. The ranges of activations are those that some images give (static quantization).
    The file has pairs of QuantizeLinear and DequantizeLinear (QDQ). Routing, and the vote weights, stay in float32.

    Args:
        source: file of a network of images that `export` wrote.
        path: the new file; its name ends in `.onnx`.
        images: some hundred images like those that the file will be given, `(n, channels, height, width)`.

    Returns:
        The part of the images that get the same class from both files.

    Raises:
        ValueError: `path` has another end, or the source is no such file, or its scores in int8 are not finite.
        ImportError: onnx or onnxruntime is not installed.
        OSError: the file cannot be written.
    """
    source, path, images = Path(source).expanduser(), Path(path).expanduser(), images.detach().cpu()
    if path.suffix != ".onnx" or not source.is_file():
        raise ValueError(f"expected an ONNX file and the path of a new .onnx file, got {source} and {path}")
    (before,) = run_onnx(source, [(images,)])
    with whole_files(path) as unfinished, quiet():
        prepared = unfinished.with_name("prepared")
        quant_pre_process(source, prepared, skip_symbolic_shape=True)  # which does not know all operators
        quantize_static(
            prepared,
            unfinished,
            _Images(images),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=INT8,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        after = run_onnx(unfinished, [(images[:1],), (images,)])[1][0]
        if not after.isfinite().all():
            raise ValueError(f"{source} has scores in int8 that are not finite")
        return (before[0].argmax(1) == after.argmax(1)).double().mean().item()


def compare(files: Mapping[str, Path], images: Tensor, labels: Tensor) -> list[tuple[str, str, str, str]]:
    """Return a row for each ONNX file: name, bytes, accuracy, and milliseconds per image, the shortest of several runs.

    Args:
        files: the files by name. Their times are taken in turn.
        images: images on which they are compared.
        labels: classes of the images `(n,)`; of several classes per image there is no accuracy.
    """
    batches = [{"images": batch.numpy()} for batch in images.split(BATCH)]
    sessions = {name: onnxruntime.InferenceSession(file) for name, file in files.items()}
    count = len(images[: TIMED * BATCH])
    times: dict[str, list[float]] = {name: [] for name in files}
    for _ in range(REPEATS):
        for name, session in sessions.items():
            start = time.perf_counter()
            for batch in batches[:TIMED]:
                session.run(["scores"], batch)
            times[name].append(1e3 * (time.perf_counter() - start) / count)
    rows = []
    for name, file in files.items():
        accuracy = ""
        if labels.dim() == 1:
            classes = torch.cat([torch.from_numpy(sessions[name].run(["scores"], x)[0]).argmax(1) for x in batches])
            accuracy = f"{(classes == labels).double().mean():.4f}"
        rows.append((name, f"{file.stat().st_size:,}", accuracy, f"{min(times[name]):.3f}"))
    return rows
