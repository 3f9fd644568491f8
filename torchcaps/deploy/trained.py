"""A trained network with all that is needed to use it, read from a checkpoint or from a folder of `save_pretrained`."""

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchcaps.data import LabeledData
from torchcaps.measures.predicting import as_prediction
from torchcaps.models.pretrained import load_state, read_tensors
from torchcaps.recipes.modules import OwnModules
from torchcaps.recipes.values import name_of
from torchcaps.training.checkpoint_files import (
    EXPECTED,
    facts_of,
    files_of,
    keep_split,
    network_state,
    read_checkpoint,
    temperature_of,
    values_of,
)
from torchcaps.training.errors import innermost
from torchcaps.training.names import Names
from torchcaps.training.parts import build_part, untrained
from torchcaps.utils.arguments import checked
from torchcaps.utils.files import read_json, user_path

CONFIG, WEIGHTS, CARD = FILES = ("config.json", "model.safetensors", "README.md")  # of a folder
A_FOLDER = "expected a folder that `save_pretrained` wrote"


@dataclass(frozen=True)
class Trained:
    """A trained network, the data that it was trained on, and its classes.

        trained = Trained.load("runs/own/images/version_0/checkpoints/best.ckpt")
        trained.probabilities(images)

    Args:
        network: the network, in evaluation mode.
        data: the data of its recipe, built of its values; no file of it is read. It prepares inputs as in the training.
        values: all values of the recipe, nested as in YAML.
        temperature: number by which scores are divided before the softmax, chosen on the validation set; None if the
            training had none.
        about: further facts of the training, such as its metrics; see :class:`torchcaps.training.Report`.
    """

    network: nn.Module
    data: LabeledData
    values: dict[str, Any] = field(repr=False)
    temperature: float | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    @checked
    def load(cls, path: str | Path, allow_code: bool = False) -> Self:
        """Read a checkpoint of `torchcaps train`, or a folder that `save_pretrained` wrote. Nothing in it is executed.

        Args:
            path: the checkpoint or the folder.
            allow_code: whether the recipe may name classes and functions of any package, and of modules beside its
                files or beside the files of the folder. Their code then runs.

        Raises:
            ValueError: it cannot be read, is no such checkpoint or folder, or does not hold the values of its recipe
                and a network that fits them.
        """
        path = user_path(path)
        if os.path.isdir(path):  # False for any text, where `path.is_dir` refuses long ones
            values, state, about = _read_folder(path)
            files: tuple[Path, ...] = (path / CONFIG,)
        elif os.path.isfile(path):
            content = read_checkpoint(path, "state_dict")
            values, state, about = values_of(path, content), network_state(content), facts_of(content)
            files = files_of(content)
        else:
            raise ValueError(f"there is no file {path}: {EXPECTED}")
        modules = OwnModules(str(path), files, allow_code)
        try:
            names = Names(allow_code)
            names.check(values["data"], LabeledData)
            names.check(values["model"]["network"], nn.Module)
            own = copy.deepcopy(values["data"])
            keep_split(own, path)
            data = build_part(LabeledData, own)
            network = build_part(nn.Module, untrained(values["model"]["network"]))
        except Exception as error:  # values that anybody wrote, and classes of the user's own
            if isinstance(error, ImportError):
                raise
            reason = modules.why_not(error.__cause__) or innermost(error) or type(error).__name__
            raise ValueError(f"{path}: its network or its data cannot be built: {reason}") from error
        load_state(network, state, path)
        return cls(network.eval(), data, values, temperature_of(about, path), about)

    @property
    def names(self) -> list[str]:
        """Names of the classes."""
        return self.data.names

    @property
    def network_name(self) -> str:
        """Name of the network in the recipe, such as "capsnet_small"; that of its class if there is no recipe."""
        values = self.values.get("model", {}).get("network")
        return name_of(values) if values else type(self.network).__name__

    @torch.no_grad()
    def scores(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return the network's scores `(batch, classes)` of a batch of inputs, as its data makes them.

        Raises:
            ValueError: the scores are NaN or infinite.
        """
        output = self.network(*inputs) if isinstance(inputs, tuple) else self.network(inputs)
        return as_prediction(self.network, output).evidence.float()

    def probabilities(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        r"""Return the probability of each class, `(batch, classes)`: :math:`\text{softmax}(\text{scores} / T)` with the
        temperature T, or 1 if there is none."""
        return (self.scores(inputs) / (self.temperature or 1.0)).softmax(-1)


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Return the values, the network's state and the facts in a folder of `save_pretrained`."""
    path = folder / CONFIG
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: {A_FOLDER}")
    try:
        config = read_json(path, dict)
    except ValueError as error:
        raise ValueError(f"{error}: {A_FOLDER}") from None
    state, _ = read_tensors(folder / WEIGHTS)
    if not isinstance(config.get("values"), dict):
        raise ValueError(f"{path} does not hold the values of a recipe: {A_FOLDER}")
    about = config.get("about", {})
    if not isinstance(about, dict):
        raise ValueError(f"{path}: about must hold facts by name, got {str(about)[:60]!r}: {A_FOLDER}")
    return config["values"], state, {**about, "temperature": config.get("temperature")}
