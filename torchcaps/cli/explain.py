"""Draw what a checkpoint of a recipe has learned."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.checkpoints import find_checkpoint, read_or_refuse
from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.cli.recipe_commands import add_recipe, build_training

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcaps.data import ImageData
    from torchcaps.training.build import Training

IMAGES = 128  # for --dynamics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps explain`."""
    add_recipe(parser)
    parser.add_argument(
        "--ckpt_path",
        required=True,
        nargs="+",
        help="checkpoint, or `last` for the newest of this recipe; several for --dynamics",
    )
    parser.add_argument("--figures", help="folder for the figures (default: beside the checkpoint)")
    parser.add_argument(
        "--image", nargs="+", type=Path, metavar="FILE", help="draw heatmaps of these pictures, not of test images"
    )
    parser.add_argument(
        "--dynamics",
        nargs="*",
        metavar="LAYER",
        help="draw how long the votes of these layers (default: all) are and how well they agree with the parents: a "
        "panel per checkpoint. To keep a checkpoint of each epoch: torchcaps train RECIPE "
        "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.save_top_k=-1",
    )
    parser.add_argument(
        "--images", type=int, metavar="N", help=f"number of test images for --dynamics (default: {IMAGES})"
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Write the figures that there are for the network and the data, and print their paths."""
    from torchcaps.data import ImageData

    if options.dynamics is None and (len(options.ckpt_path) > 1 or options.images is not None):
        raise BadInput("several --ckpt_path, and --images, are for --dynamics: leave them out, or give --dynamics too")
    if options.dynamics is not None and options.image:
        raise BadInput("--dynamics is of test images, and --image of heatmaps: leave one of them out")
    if options.images is not None and options.images < 1:
        raise BadInput(f"--images must be at least 1, got {options.images}")
    training = build_training(options, overrides)
    data = training.datamodule
    if not isinstance(data, ImageData):
        raise BadInput(f"there are figures of what a network does with images, and {type(data).__name__} has none")
    if options.dynamics is not None:
        _draw_dynamics(options, training, data)
        return
    checkpoint, state = find_checkpoint(options, training, options.ckpt_path[0], "network.")
    training.model.load_state_dict(state)
    folder = _figures(options, checkpoint)
    with bad_data():
        if options.image:
            from torchcaps.explain import write_heatmaps

            print(f"figure: {write_heatmaps(training.model.network, options.image, data.shape, folder)}")
            return
        data.setup("test")
        try:
            for path in _write_figures(training.model.network, data, folder):
                print(f"figure: {path}")
        except TypeError as error:  # there are no figures for such a network
            raise BadInput(str(error)) from error


def _write_figures(network: "nn.Module", data: "ImageData", folder: Path) -> Iterator[Path]:
    from torchcaps.data import StereoData
    from torchcaps.explain import has_class_capsules, has_figures, write_figures, write_pose_figures

    if isinstance(data, StereoData) and has_class_capsules(network, data):
        yield from write_pose_figures(network, data, folder)
        if not has_figures(network):
            return
    batches = ((data.center(images), *rest) for images, *rest in data.test_dataloader())
    yield from write_figures(network, batches, folder)


def _draw_dynamics(options: argparse.Namespace, training: "Training", data: "ImageData") -> None:
    """Draw a row of panels per layer, a panel per checkpoint."""
    from torchcaps.explain import capsule_layers, routing_dynamics, routing_dynamics_figure
    from torchcaps.explain.axes import write

    checkpoints: dict[tuple[int, Path], Path] = {}
    epochs: dict[int, int] = {}  # by step
    for given in options.ckpt_path:
        path, _ = find_checkpoint(options, training, given, "network.")
        content = read_or_refuse(path, "global_step", "epoch")
        step, epoch = content["global_step"], content["epoch"]
        epochs[step] = epoch + 1
        checkpoints.setdefault((step, path.parent), path)  # `last` and the newest of a run are the same
    by_epoch = len(set(epochs.values())) == len(epochs)
    network = training.model.network
    with bad_data():
        rows: dict[str, list[Any]] = {name: [] for name in options.dynamics or capsule_layers(network)}
        batches = _first_images(data, options.images or IMAGES)
        for step, folder in sorted(checkpoints):
            path = checkpoints[step, folder]
            training.model.load_state_dict(read_or_refuse(path, "state_dict")["state_dict"])
            title = f"after epoch {epochs[step]}" if by_epoch else f"after step {step:,}"
            for name, row in rows.items():
                row.append((title, routing_dynamics(network, name, batches)))
    figure = routing_dynamics_figure(list(rows.values()), list(rows))
    print(f"figure: {write(figure, _figures(options, path) / 'dynamics.png')}")


def _first_images(data: "ImageData", count: int) -> list["Tensor"]:
    """The first test images, in batches."""
    data.setup("test")
    batches: list[Tensor] = []
    for images, *_ in data.test_dataloader():
        batches.append(data.center(images[:count]))
        count -= len(batches[-1])
        if not count:
            break
    return batches


def _figures(options: argparse.Namespace, checkpoint: Path) -> Path:
    return Path(options.figures) if options.figures else checkpoint.parent.parent / "figures"
