"""ONNX files that compute in int8, made by onnxruntime's own tool."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.deploy.onnx import quiet, run_onnx
from torchcaps.utils.arguments import FloatTensor, checked
from torchcaps.utils.extras import needs
from torchcaps.utils.files import whole_files

with needs("export"):
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

OPERATORS = ["Conv", "MatMul", "Gemm"]  # the others, those of the routing among them, stay in float32
BATCH = 32  # images at a time
TIMED, REPEATS = 8, 15  # batches in a measurement of time, and measurements


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
    source, path, images = Path(source), Path(path).expanduser(), images.detach().cpu()
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
            op_types_to_quantize=OPERATORS,
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
