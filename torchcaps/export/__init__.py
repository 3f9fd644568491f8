"""Networks as files for programs without torchcaps: ONNX files and PyTorch programs. Every file is checked."""

from torchcaps.export.files import TARGETS, Target, export

__all__ = ["TARGETS", "Target", "export"]
