"""Make the small weights of the package, and their card, of a checkpoint: the files in `torchcaps/models/weights`.

    torchcaps train pretrained/mnist
    python -m torchcaps.deploy.pack pretrained/mnist runs/pretrained/mnist/version_0/checkpoints/last.ckpt

Weights are stored in half precision. The card has the accuracy on the test set of the network as it was trained, and of
the network that `create_model` makes of the stored file.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.data import DataError, ImageData
from torchcaps.models import create_model
from torchcaps.models.pretrained import FOLDER, SUFFIX, load_state, write_tensors
from torchcaps.recipes import Recipe, load_recipe
from torchcaps.reproduce.pace import hardware
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import write_text_whole
from torchcaps.utils.machine import commit
from torchcaps.utils.quiet import quiet_process

with needs("train"):
    from torchcaps.training.build import Training
    from torchcaps.training.checkpoint_files import network_state

MOST_BYTES = 2_000_000

CARD = """# {model}, trained on {dataset}

Trained weights that are part of torchcaps, in half precision: {title}.

    from torchcaps.models import create_model

    model = create_model("{model}", pretrained="{data}")
    evidence = model(images).evidence  # images (batch, {shape}) in [0, 1]; evidence (batch, {classes})

| | |
|---|---|
| network | {model}({arguments}): {parameters:,} parameters |
| data | {dataset}: {train} training images, {test} test images, {classes} classes |
| classes | {names} |
| test accuracy | {half:.2%} with this file |
| test accuracy in float32, as it was trained | {full:.2%} |
| recipe | `{recipe}` |
| command | `torchcaps train {recipe}` |
| commit | {commit} |
| date | {date} |
| hardware | {hardware} |
| file | {bytes:,} bytes |
| license | MIT, as the package; the data set has terms of its own |

One training with seed {seed}. No hyperparameter was chosen on the test set.

## Limits

{limits}
"""

LIMITS = (
    "A network of this size is for trying things out, for tests and for teaching. Those of the papers are larger.",
    "Images must look like those of the data set: the same size, gray levels or colors from 0 to 1, the same "
    "background. An image of anything else gets one of the classes too.",
    "Nothing is known about its accuracy on other data, or about its robustness.",
)


def accuracy(network: nn.Module, data: ImageData) -> float:
    """Return the accuracy of a network on a test set of images with one label each."""
    network.eval()
    right = []
    with torch.inference_mode():
        for images, labels in data.test_dataloader():
            right.append(network(data.center(images)).evidence.argmax(1) == labels)
    return torch.cat(right).double().mean().item()


def pack(recipe: Recipe, checkpoint: Path, limits: tuple[str, ...] = (), about: dict[str, str] | None = None) -> Path:
    """Write the weights of a checkpoint, and their card, to the folder of the package's weights.

    Args:
        recipe: the checkpoint's recipe, `pretrained/<data>`.
        checkpoint: checkpoint of its training.
        limits: limits of the weights that the card mentions before those of all weights.
        about: entries of the card, in place of those found out: `names`, `commit`, `hardware`.

    Returns:
        The file of the weights.

    Raises:
        ValueError: the checkpoint is not of this recipe, or the weights are too large or not finite in half precision.
        DataError: the test set is missing or damaged.
    """
    training = Training(recipe, [])
    network, data = training.model.network, training.datamodule
    if not isinstance(data, ImageData) or training.model.labels_per_image != 1:
        raise ValueError(f"{recipe.name} has no images with one label each, which the package's weights are for")
    values = training.values["model"]["network"]
    model, arguments = values["class_path"].rpartition(".")[2], values["init_args"]
    load_state(network, _state(checkpoint), checkpoint)
    data.setup()
    assert data.train_set is not None
    assert data.test_set is not None
    full = accuracy(network, data)
    path = FOLDER / f"{model}.{Path(recipe.name).name}{SUFFIX}"
    state = {name: _half(name, value) for name, value in network.state_dict().items()}
    facts = {"model": model, "arguments": json.dumps(arguments), "recipe": recipe.name}
    if (size := sum(value.nbytes for value in state.values())) > MOST_BYTES:
        raise ValueError(f"the weights of {model} have {size:,} bytes, and the package takes {MOST_BYTES:,}")
    write_tensors(path, state, facts)
    half = accuracy(create_model(model, pretrained=Path(recipe.name).name), data)
    entries: dict[str, Any] = {
        "model": model,
        "data": Path(recipe.name).name,
        "dataset": recipe.dataset,
        "title": recipe.title,
        "shape": ", ".join(map(str, data.shape)),
        "classes": data.classes,
        "names": ", ".join(data.names),
        "arguments": ", ".join(f"{name}={value!r}" for name, value in arguments.items()),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "train": f"{len(data.train_set):,}",
        "test": f"{len(data.test_set):,}",
        "half": half,
        "full": full,
        "recipe": recipe.name,
        "commit": commit(),
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "bytes": path.stat().st_size,
        "seed": training.config.seed_everything,
        "limits": "\n".join(f"- {limit}" for limit in (*limits, *LIMITS)),
    }
    write_text_whole(path.with_suffix(".md"), CARD.format(**{**entries, **(about or {})}))
    return path


def _state(checkpoint: Path) -> dict[str, Tensor]:
    """Return the state dict of the network in a checkpoint."""
    try:
        return network_state(torch.load(checkpoint, map_location="cpu", weights_only=True))
    except Exception as error:  # bytes that anybody wrote make torch raise errors of many types
        raise ValueError(f"{checkpoint} is not a checkpoint of `torchcaps train` ({one_line(error)})") from error


def _half(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    half = value.half()
    if not half.isfinite().all():
        raise ValueError(
            f"{name} has numbers that are infinite in half precision: the largest is {value.abs().max():g}"
        )
    return half


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m torchcaps.deploy.pack", description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help="recipe of the checkpoint, e.g. pretrained/mnist")
    parser.add_argument("checkpoint", type=Path, help="checkpoint of its training")
    parser.add_argument("--limit", action="append", default=[], help="a limit that the card mentions; several times")
    parser.add_argument("--names", help="names of the classes (default: those of the data set)")
    parser.add_argument("--commit", help="commit of the training (default: that of this clone)")
    parser.add_argument("--hardware", help="hardware of the training (default: this machine)")
    options = parser.parse_args()
    quiet_process()
    about = {name: value for name in ("names", "commit", "hardware") if (value := getattr(options, name))}
    try:
        path = pack(load_recipe(options.recipe), options.checkpoint, tuple(options.limit), about)
    except (DataError, ValueError, ImportError, OSError) as error:
        sys.exit(f"torchcaps: {one_line(error)}")
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    print(path)


if __name__ == "__main__":
    main()
