"""Write a trained network for other programs: as an ONNX file, a PyTorch program or safetensors."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.arguments import add_checkpoint, add_recipe_name, find_run
from torchcaps.utils.files import read_json, user_path

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.runs import Run

ENDS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": "-safetensors"}  # of the names of files and of the folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps export`."""
    add_recipe_name(parser)
    parser.epilog = (
        "A file is run before it is left: its outputs must be those of the network; safetensors must have its weights."
    )
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


def run(options: argparse.Namespace) -> None:
    """Write the file, check it, and print its path, its size and the largest difference."""
    _check(options)
    run = find_run(options)
    place = run.path.resolve() if run.path.is_dir() else run.path  # the folder may be "."
    beside = place.with_name(f"{place.name.removesuffix('.ckpt')}{ENDS[options.to]}")
    out = user_path(options.out) if options.out else beside
    _check_place(out)
    if options.to == "safetensors":
        _check_folder(out)
    run.network()
    print(f"checkpoint: {run.path}")
    (_safetensors if options.to == "safetensors" else _file)(options, run, out)


def _check(options: argparse.Namespace) -> None:
    """Check that the options go together."""
    if options.decoder and options.to == "safetensors":
        raise ValueError("--decoder is for --to onnx and torch: safetensors has all weights")
    if options.out is not None and options.to != "safetensors" and options.out.suffix != ENDS[options.to]:
        raise ValueError(f"--out must end in {ENDS[options.to]} for --to {options.to}, got {options.out}")


def _check_place(out: Path) -> None:
    """Check that a file can be written, before the minutes that an export may take."""
    place = out.absolute()
    if place.is_dir() and place.suffix in ENDS.values():
        raise ValueError(f"--out {out} is a folder: give the path of a file")
    while not place.exists():
        place = place.parent
    folder = place if place.is_dir() else place.parent
    if (place.is_file() and place != out.absolute()) or not os.access(folder, os.W_OK):
        raise ValueError(f"{out} cannot be written: {place} is no folder that you may write to")


def _check_folder(out: Path) -> None:
    """Check that a folder has no files that are not ours and would be written over."""
    from torchcaps.runs.checkpoint import CARD, CONFIG, WEIGHTS

    try:
        ours = isinstance(read_json(out / CONFIG, dict).get("values"), dict)
    except ValueError:
        ours = False
    for name in (CONFIG, WEIGHTS, CARD):
        if not ours and (out / name).exists():
            raise ValueError(f"{out} has a {name} that an export would write over: give another folder")


def _file(options: argparse.Namespace, run: "Run", out: Path) -> None:
    from torchcaps.data import ArrayFolder, MaskFolder
    from torchcaps.data.labeled import TERMS
    from torchcaps.deploy import export
    from torchcaps.measures.predicting import kind_of_scores, predict

    about = {name: value for name, value in run.facts.items() if name not in ("names", "temperature")}
    facts = {TERMS[run.target][1]: run.names, **about}
    example = _example(run)
    if run.target == "labels":
        has_logits = kind_of_scores(predict(run.network(), example)) == "logits"
        facts["scores"] = f"the probability of a label is {'sigmoid(score)' if has_logits else 'its score'}"
        facts["thresholds"] = run.thresholds.tolist()  # a label is predicted above its own
    elif run.target == "masks":
        facts["scores"] = "the class of a pixel is that with the highest score"
        if isinstance(data := run.data(), MaskFolder):  # the values of the classes, and how pictures become square
            facts |= {"values": data.values, "fit": "tile" if data.tiled else data.fit}
    elif run.target == "numbers":
        facts["scores"] = "numbers in the units of the training"
    if isinstance(data := run.data(), ArrayFolder):
        facts["preparation"] = data.form._asdict()  # which makes an input of an array
    if run.temperature is not None:
        facts["temperature"] = run.temperature
    difference = export(run.network(), example, out, options.to, options.decoder, facts)
    print(f"{out}: {out.stat().st_size:,} bytes, largest difference from the network: {difference:.1e}")


def _safetensors(options: argparse.Namespace, run: "Run", out: Path) -> None:
    from torchcaps.deploy import from_pretrained, save_pretrained

    save_pretrained(run, out)
    read = from_pretrained(out, allow_code=options.allow_code).network().state_dict()
    if not all(read[name].allclose(value, 0, 0, equal_nan=True) for name, value in run.network().state_dict().items()):
        raise ValueError(f"{out} holds other weights than the checkpoint")
    print(f"{out}: the same weights as those of the network")


def _example(run: "Run") -> "Tensor | tuple[Tensor, ...]":
    """Return random inputs of the network, five samples; for texts embeddings and a mask, with padding."""
    import torch

    from torchcaps.data.images import FileData

    noise = torch.Generator().manual_seed(0)
    data = run.data()
    if isinstance(data, FileData):
        return torch.rand(5, *data.shape, generator=noise)
    network: Any = run.network()
    if not hasattr(network, "layers") or not hasattr(network, "width"):
        raise ValueError(f"there is no export for a {type(network).__name__} on {type(data).__name__}")
    lengths = torch.tensor([8, 5, 1, 8, 3])
    embeddings = torch.randn(5, 8, network.layers, network.width, generator=noise)
    return embeddings, (torch.arange(8) < lengths[:, None]).float()
