"""Write a trained network for other programs: as an ONNX file, a PyTorch program or safetensors."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.checkpoints import locate
from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.cli.recipe_commands import add_checkpoint, add_recipe_name
from torchcaps.cli.table import print_table

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.data import ImageData
    from torchcaps.deploy import Trained

ENDS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": "-safetensors"}  # of the names of files and of the folder
CALIBRATION, TESTED = 256, 10_000  # most images for --int8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps export`."""
    add_recipe_name(parser, folders=True)
    parser.epilog = "The file is run before it is left: its outputs must be those of the network."
    add_checkpoint(parser)
    parser.add_argument(
        "--to",
        default="onnx",
        choices=tuple(ENDS),
        help="onnx: for onnxruntime and many others; torch: for PyTorch without torchcaps; safetensors: a folder for "
        "torchcaps (default: onnx)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file or folder (default: beside the checkpoint)")
    parser.add_argument("--decoder", action="store_true", help="also reconstruct the image of the likeliest class")
    parser.add_argument(
        "--int8",
        action="store_true",
        help="compute convolutions and matrix products in int8, with ranges of training images (onnx)",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Write the file, check it, and print its path, its size and the largest difference."""
    _check(options)
    from torchcaps.deploy import Trained

    checkpoint = locate(options, options.ckpt_path, folders=True)
    out = options.out or checkpoint.with_name(f"{checkpoint.stem}{'-int8' * options.int8}{ENDS[options.to]}")
    _check_place(out)
    with bad_data():
        trained = Trained.load(checkpoint, options.allow_code)
        print(f"checkpoint: {checkpoint}")
        {"onnx": _onnx, "torch": _file, "safetensors": _safetensors}[options.to](options, trained, out)


def _check(options: argparse.Namespace) -> None:
    """Check that the options go together."""
    if options.int8 and options.to != "onnx":
        raise BadInput(f"--int8 is for --to onnx, got --to {options.to}")
    if options.decoder and options.to == "safetensors":
        raise BadInput("--decoder is for --to onnx and torch: safetensors has all weights")
    if options.int8 and options.decoder:
        raise BadInput("--int8 is for scores, not for the images of --decoder: leave one of them out")
    if options.out is not None and options.to != "safetensors" and options.out.suffix != ENDS[options.to]:
        raise BadInput(f"--out must end in {ENDS[options.to]} for --to {options.to}, got {options.out}")


def _check_place(out: Path) -> None:
    """Check that a file can be written, before the minutes that an export may take."""
    found = out.absolute()
    if found.is_dir() and found.suffix in ENDS.values():
        raise BadInput(f"--out {out} is a folder: give the path of a file")
    while not found.exists():
        found = found.parent
    folder = found if found.is_dir() else found.parent
    if (found.is_file() and found != out.absolute()) or not os.access(folder, os.W_OK):
        raise BadInput(f"{out} cannot be written: {found} is no folder that you may write to")


def _onnx(options: argparse.Namespace, trained: "Trained", out: Path) -> None:
    if not options.int8:
        _file(options, trained, out)
        return
    from torchcaps.data import ImageData
    from torchcaps.deploy.onnx import compare, quantize

    if not isinstance(trained.data, ImageData):
        raise BadInput(f"--int8 is for networks of images, and {type(trained.data).__name__} has none")
    calibration, _ = _images(trained.data, "fit", CALIBRATION)
    images, labels = _images(trained.data, "test", TESTED)
    with tempfile.TemporaryDirectory() as place:
        exact = Path(place) / "float32.onnx"
        _write(options, trained, exact)
        same = quantize(exact, out, calibration)
        print(f"{out}: the same class as in float32 for {same:.1%} of {len(calibration)} training images")
        rows = compare({"float32": exact, "int8": out}, images, labels)
    print_table(("", "bytes", f"accuracy on {len(images)} test images", "ms per image"), rows)


def _file(options: argparse.Namespace, trained: "Trained", out: Path) -> None:
    difference = _write(options, trained, out)
    print(f"{out}: {out.stat().st_size:,} bytes, largest difference from the network: {difference:.1e}")


def _write(options: argparse.Namespace, trained: "Trained", out: Path) -> float:
    from torchcaps.deploy import export

    about = {name: value for name, value in trained.about.items() if name != "names"}
    facts = {"classes": trained.names, **about}
    if trained.temperature is not None:
        facts["temperature"] = trained.temperature
    return export(trained.network, _example(trained), out, options.to, options.decoder, facts)


def _safetensors(options: argparse.Namespace, trained: "Trained", out: Path) -> None:
    from torchcaps.deploy import from_pretrained, save_pretrained

    save_pretrained(trained, out)
    example = _example(trained)
    if not from_pretrained(out, allow_code=options.allow_code).scores(example).equal(trained.scores(example)):
        raise BadInput(f"{out} holds another network than the checkpoint")
    print(f"{out}: the same scores as those of the network")


def _example(trained: "Trained") -> "Tensor | tuple[Tensor, ...]":
    """Return random inputs of the network, five samples; for texts embeddings and a mask, with padding."""
    import torch

    from torchcaps.data import ImageData

    noise = torch.Generator().manual_seed(0)
    if isinstance(trained.data, ImageData):
        return torch.rand(5, *trained.data.shape, generator=noise)
    network: Any = trained.network
    if not hasattr(network, "layers") or not hasattr(network, "width"):
        raise BadInput(f"there is no export for a {type(network).__name__} on {type(trained.data).__name__}")
    lengths = torch.tensor([8, 5, 1, 8, 3])
    embeddings = torch.randn(5, 8, network.layers, network.width, generator=noise)
    return embeddings, (torch.arange(8) < lengths[:, None]).float()


def _images(data: "ImageData", stage: str, most: int) -> "tuple[Tensor, Tensor]":
    """Return images of a data set, evenly spaced and without augmentation, and their labels."""
    from torchcaps.data.order import evenly_chosen

    data.setup(stage)
    return data.samples(stage, evenly_chosen(len(data.part(stage)), most))  # type: ignore[arg-type]
