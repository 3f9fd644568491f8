"""Makes small weights of the package, and their card, of a checkpoint: the files in `torchcaps/models/weights`.

torchcaps train pretrained/mnist
python docs/weights.py pretrained/mnist runs/pretrained/mnist/version_0/checkpoints/last.ckpt

Weights are stored in half precision. The card has the accuracy on the test set of the network as it was trained, and of
the network that `create_model` makes of the stored file.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps.data import DataError, ImageData
from torchcaps.models import create_model
from torchcaps.models.pretrained import FOLDER, SUFFIX, write_tensors
from torchcaps.recipes import Recipe, load_recipe
from torchcaps.runs import Run
from torchcaps.utils.checks import one_line, percent
from torchcaps.utils.files import write_text_whole
from torchcaps.utils.machine import commit, hardware
from torchcaps.utils.quiet import quiet_process

MOST_BYTES = 2_000_000

CARD = """# {model}, trained on {dataset}

Trained weights that are part of torchcaps, in half precision: {title}.

    from torchcaps.models import create_model

    model = create_model("{model}", pretrained="{data}")
    evidence = model(images).evidence  # images (batch, {shape}) in [0, 1]; evidence (batch, {classes})

| | |
|---|---|
| network | {model}({arguments}): {parameters:,} parameters |
| data | {dataset}: {train:,} training images, {test:,} test images, {classes} classes |
| classes | {names} |
| test accuracy | {half} with this file |
| test accuracy in float32, as it was trained | {full} |
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


def pack(recipe: Recipe, checkpoint: Path, limits: tuple[str, ...] = ()) -> Path:
    """Write the weights of a checkpoint, and their card, to the folder of the package's weights.

    Args:
        recipe: the checkpoint's recipe, `pretrained/<data>`.
        checkpoint: checkpoint of its training.
        limits: limits of the weights that the card mentions before those of all weights.

    Returns:
        The file of the weights.

    Raises:
        ValueError: the checkpoint is not of this recipe, or the weights are too large or not finite in half precision.
        DataError: the test set is missing or damaged.
    """
    trained = Run.find(checkpoint)
    network, data, values = trained.network(), trained.data(), trained.values["model"]["network"]
    path, arguments, model = values["class_path"], values["init_args"], values["class_path"].rpartition(".")[2]
    if not str(recipe.config["model"]["network"]["class_path"]).endswith(model):
        raise ValueError(f"{checkpoint} has a {path}, and {recipe.name} trains another network")
    if not isinstance(data, ImageData) or trained.values["model"]["labels_per_image"] != 1:
        raise ValueError(f"{recipe.name} has no images with one label each, which the package's weights are for")
    data.setup()
    assert data.train_set is not None
    assert data.test_set is not None
    state = {name: _half(name, value) for name, value in network.state_dict().items()}
    if (size := sum(value.nbytes for value in state.values())) > MOST_BYTES:
        raise ValueError(f"the weights of {model} have {size:,} bytes, and the package takes {MOST_BYTES:,}")
    data_name = Path(recipe.name).name
    file = FOLDER / f"{model}.{data_name}{SUFFIX}"
    write_tensors(file, state, {"model": model, "arguments": json.dumps(arguments), "recipe": recipe.name})
    card = CARD.format(
        model=model,
        data=data_name,
        dataset=recipe.dataset,
        title=recipe.title,
        shape=", ".join(map(str, data.shape)),
        classes=data.classes,
        names=", ".join(data.names),
        arguments=", ".join(f"{name}={value!r}" for name, value in arguments.items()),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        train=len(data.train_set),
        test=len(data.test_set),
        half=percent(accuracy(create_model(model, pretrained=data_name), data)),
        full=percent(accuracy(network, data)),
        recipe=recipe.name,
        commit=commit(),
        date=date.today().isoformat(),
        hardware=hardware(),
        bytes=file.stat().st_size,
        seed=trained.values["seed_everything"],
        limits="\n".join(f"- {limit}" for limit in (*limits, *LIMITS)),
    )
    write_text_whole(file.with_suffix(".md"), card)
    return file


def _half(name: str, value: Tensor) -> Tensor:
    half = value.half() if value.is_floating_point() else value
    if not half.isfinite().all():
        raise ValueError(
            f"{name} has numbers that are infinite in half precision: the largest is {value.abs().max():g}"
        )
    return half


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help="recipe of the checkpoint, e.g. pretrained/mnist")
    parser.add_argument("checkpoint", type=Path, help="checkpoint of its training")
    parser.add_argument("--limit", action="append", default=[], help="a limit that the card mentions; several times")
    options = parser.parse_args()
    quiet_process()
    try:
        path = pack(load_recipe(options.recipe), options.checkpoint, tuple(options.limit))
    except (DataError, ValueError, ImportError, OSError) as error:
        sys.exit(f"torchcaps: {one_line(error)}")
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    print(path)


if __name__ == "__main__":
    main()
