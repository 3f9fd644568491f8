"""Show what a checkpoint has learned: a page to open in a browser, and figures."""

import argparse
import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.arguments import add_checkpoint, add_recipe, find_run

if TYPE_CHECKING:
    from torch import nn

    from torchcaps.explain.page import Samples
    from torchcaps.runs import Run
    from torchcaps.training.build import Training

SAMPLES = 1000
CHECKPOINTS = 8  # on a page at most: each takes half a megabyte or more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps explain`."""
    add_recipe(parser, run=True)
    add_checkpoint(parser, nargs="+")
    parser.add_argument("--figures", help="folder for index.html and the figures (default: beside the checkpoint)")
    parser.add_argument(
        "--image",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="show these pictures or arrays, not those of the test, as examples",
    )
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help=f"number of test samples (default: {SAMPLES})"
    )
    parser.add_argument(
        "--shuffled",
        type=Path,
        metavar="CKPT",
        help="checkpoint of the same recipe, trained with --data.shuffle_labels true, or a folder of runs with one: "
        "what it shows is shown beside",
    )
    parser.epilog = (
        f"With several checkpoints, the page shows {CHECKPOINTS} of them at most over the training. To keep one of "
        "each epoch: torchcaps train RECIPE --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.save_top_k=-1; "
        "then torchcaps explain RECIPE --ckpt_path runs/RECIPE/version_0/checkpoints/epoch*.ckpt"
    )


def run(options: argparse.Namespace) -> None:
    """Write the page and the figures that there are for the network and the data, and print their paths."""
    from torchcaps.explain import write_figures
    from torchcaps.explain.page import write_page

    if options.samples < 2:
        raise ValueError(f"--samples must be at least 2, got {options.samples}")
    runs = [find_run(options, which=which) for which in options.ckpt_path or [None]]
    training = runs[-1].training(options.overrides)
    for other in runs[:-1]:
        other.load_weights_into(training.model.network)  # to see that they fit: the report loads each again
    checkpoints = _checkpoints(runs)
    folder = Path(options.figures) if options.figures else checkpoints[-1][1].folder / "figures"
    network = training.model.network
    states = [(label, partial(run.load_weights_into, network)) for label, run in checkpoints]
    samples = _samples(options, training)
    report = _report(options, training, samples, checkpoints, states)
    for path, caption in write_figures(network, samples, folder, training.datamodule, states):
        report["figures"].append((path.name, caption))
        print(f"figure: {path}")
    if samples.target in ("labels", "numbers"):
        print("torchcaps: figures that need one class for each sample are left out", file=sys.stderr)
    page = write_page(report, folder / "index.html")
    print(f"page: {page}")


def _checkpoints(runs: "list[Run]") -> "list[tuple[str, Run]]":
    """Return labels of the checkpoints, and the checkpoints as runs, in the order of the training, CHECKPOINTS at most;
    the same step of a run comes once."""
    from torchcaps.data.order import evenly_chosen

    if runs[0].path.is_dir():  # of save_pretrained
        return [("the network", runs[0])]
    places: dict[tuple[int, Path], Run] = {}
    for run in runs:
        places.setdefault((run.checkpoint.step, run.path.parent), run)
    by_epoch = len({run.checkpoint.epoch for run in places.values()}) == len(places)
    labeled = [
        (f"after epoch {run.checkpoint.epoch + 1}" if by_epoch else f"after step {step:,}", run)
        for (step, _), run in sorted(places.items(), key=lambda item: item[0])
    ]
    if len(labeled) > CHECKPOINTS:
        print(f"torchcaps: {CHECKPOINTS} of {len(labeled)} checkpoints, evenly spaced, are shown", file=sys.stderr)
    return [labeled[index] for index in evenly_chosen(len(labeled), CHECKPOINTS)]


def _samples(options: argparse.Namespace, training: "Training") -> "Samples":
    from torchcaps.data import TextData
    from torchcaps.data.images import FileData
    from torchcaps.explain.page import image_samples, picture_samples, text_samples

    data = training.datamodule
    if options.image:
        if not isinstance(data, FileData):
            raise ValueError(f"--image is for networks of images and arrays, and {type(data).__name__} has none")
        return picture_samples(data, options.image)
    if isinstance(data, FileData):
        return image_samples(data, options.samples)
    if isinstance(data, TextData):
        return text_samples(data, options.samples)
    raise ValueError(f"there are pages about networks of images, arrays and texts, and {type(data).__name__} has none")


def _report(
    options: argparse.Namespace,
    training: "Training",
    samples: "Samples",
    checkpoints: "list[tuple[str, Run]]",
    states: Sequence[tuple[str, Callable[[], None]]],
) -> dict[str, Any]:
    from torchcaps.explain.page import report
    from torchcaps.recipes.values import name_of

    network, run = training.model.network, checkpoints[-1][1]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    facts = [
        ("recipe", f"{options.recipe}{' --small' if options.small else ''}"),
        ("checkpoint", run.path.name),
        ("network", f"{name_of(training.values['model']['network'])}, {parameters:,} parameters"),
        ("data", training.datamodule.title),
        *[(name, str(run.facts[name])) for name in ("command", "date", "torchcaps") if name in run.facts],
    ]
    page = report(
        network,
        samples,
        _title(run),
        facts,
        states,
        run.temperature if len(checkpoints) == 1 else None,  # it is that of one network
        _shuffled(options, training),
        lambda text: print(f"torchcaps: {text}", file=sys.stderr),
        run.thresholds if run.target == "labels" and len(checkpoints) == 1 else None,
    )
    for quantity, lines in run.curves().items():
        page["curves"][quantity] = [{"name": name, **_finite(xs, ys)} for name, (xs, ys) in lines.items()]
    return page


def _title(run: "Run") -> str:
    """Return the folder of a run: its path in the folder of all runs or in the working folder, if it is in one."""
    from torchcaps.runs.hub import HUB

    if run.recipe.name.startswith(HUB):
        return run.recipe.name
    folder = run.folder.resolve()
    for base in (run.runs.resolve(), Path.cwd()):
        if folder != base and folder.is_relative_to(base):
            return folder.relative_to(base).as_posix()
    return "/".join(folder.parts[-2:])


def _finite(xs: Sequence[float], ys: Sequence[float]) -> dict[str, list[float]]:
    """Return the points of a line without those that cannot be drawn."""
    points = [(float(x), y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def _shuffled(options: argparse.Namespace, training: "Training") -> "nn.Module | None":
    """Return the network that was trained with shuffled labels."""
    from torchcaps.models.pretrained import load_state
    from torchcaps.runs import Checkpoint
    from torchcaps.runs.places import A_RUN, newest_intact

    path: Path | None = options.shuffled
    if path is None:
        return None
    if not path.exists():
        raise ValueError(f"--shuffled: there is no {path}: give a checkpoint, or the folder of a run")
    if path.is_dir():
        folder, (path, _) = path, newest_intact(path.glob("**/checkpoints"))
        if path is None:
            raise ValueError(f"--shuffled: {folder} has no checkpoint of a run: {A_RUN}")
    checkpoint = Checkpoint.read(path)
    arguments = checkpoint.values["data"].get("init_args")
    if not isinstance(arguments, dict) or not arguments.get("shuffle_labels"):
        raise ValueError(f"--shuffled: {path} was not trained with --data.shuffle_labels true")
    network = copy.deepcopy(training.model.network)
    load_state(network, checkpoint.network_state, f"--shuffled: {path}")
    return network
