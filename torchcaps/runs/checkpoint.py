"""Files that anybody may have written, read once and checked: a checkpoint, or a folder of `save_pretrained`."""

import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from torchcaps.measures.calibration import HIGHEST, LOWEST
from torchcaps.models.pretrained import read_tensors
from torchcaps.training.checkpoints import FACTS_KEY, FILES_KEY, VALUES_KEY
from torchcaps.utils.arguments import checked, shown
from torchcaps.utils.checks import one_line
from torchcaps.utils.files import parse_json, read_json, user_path

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"  # files of a folder of `save_pretrained`
NETWORK = "network."  # prefix of the network in the state of a `Classifier`
A_CHECKPOINT = "expected one that `torchcaps train` wrote"
A_FOLDER = "expected a folder that `save_pretrained` wrote"
PARTS: dict[str, type] = {  # of the state of a training
    "state_dict": dict,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "pytorch-lightning_version": str,
}
OF_OPTIMIZER = ("optimizer_states", "lr_schedulers")  # Lightning reads them, if the training goes on


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is in a checkpoint of `torchcaps train`, or in a folder of `save_pretrained`. Nothing in it is executed.

    Args:
        path: the file or the folder.
        values: the values with which it was trained, nested as in YAML.
        network_state: parameters and buffers of the network.
        facts: what is known of the training, such as its metrics; see :class:`torchcaps.training.Report`.
        temperature: number by which scores are divided before the softmax; None if the training has chosen none.
        thresholds: probability above which each of several labels is predicted; None if the training has chosen none.
        files: the user's own files of the recipe; modules beside them may run if code is allowed.
        training: the state of the training by the names in PARTS, without that of the optimizer, which may take twice
            the memory of the weights; {} in a folder.
        missing: the PARTS that the checkpoint lacks.
    """

    path: Path
    values: dict[str, Any] = field(repr=False)
    network_state: dict[str, Tensor] = field(repr=False)
    facts: dict[str, Any] = field(repr=False)
    temperature: float | None = None
    thresholds: tuple[float, ...] | None = None
    files: tuple[Path, ...] = ()
    training: dict[str, Any] = field(default_factory=dict, repr=False)
    missing: tuple[str, ...] = ()

    @classmethod
    @checked
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a checkpoint or a folder.

        Raises:
            ValueError: it cannot be read, is damaged, or is no such checkpoint or folder.
        """
        path = user_path(path)
        if os.path.isdir(path):  # False for any text, where `path.is_dir` refuses long ones
            return cls._of_folder(path)
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path}: {A_CHECKPOINT}")
        content = _content(path)
        state = content["state_dict"]
        try:
            values = parse_json(content.get(VALUES_KEY), f"its {VALUES_KEY}", dict)
            _check_values(values)
        except ValueError as error:
            raise ValueError(f"{path} does not hold the values of a recipe ({error}): {A_CHECKPOINT}") from None
        facts: dict[str, Any] = {}
        files: list[str] = []
        with suppress(ValueError):
            facts = parse_json(content.get(FACTS_KEY), FACTS_KEY, dict)
        with suppress(ValueError):
            files = [name for name in parse_json(content.get(FILES_KEY), FILES_KEY, list) if isinstance(name, str)]
        return cls(
            path,
            values,
            {name.removeprefix(NETWORK): value for name, value in state.items() if name.startswith(NETWORK)},
            facts,
            _temperature(facts.get("temperature"), path, A_CHECKPOINT),
            _thresholds(facts.get("thresholds"), path, A_CHECKPOINT),
            tuple(map(Path, files)),
            {name: content[name] for name in PARTS if name in content and name not in OF_OPTIMIZER},
            tuple(name for name in PARTS if name not in content),
        )

    @classmethod
    def _of_folder(cls, folder: Path) -> Self:
        path = folder / CONFIG
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} has no {name}: {A_FOLDER}")
        try:
            config = read_json(path, dict)
        except ValueError as error:
            raise ValueError(f"{error}: {A_FOLDER}") from None
        state, _ = read_tensors(folder / WEIGHTS)
        try:
            _check_values(config.get("values"))
        except ValueError as error:
            raise ValueError(f"{path} does not hold the values of a recipe ({error}): {A_FOLDER}") from None
        about = config.get("about", {})
        if not isinstance(about, dict):
            raise ValueError(f"{path}: about must hold facts by name, got {str(about)[:60]!r}: {A_FOLDER}")
        return cls(
            folder,
            config["values"],
            state,
            about,
            _temperature(config.get("temperature"), folder, A_FOLDER),
            _thresholds(about.get("thresholds"), folder, A_FOLDER),
            (path,),
        )

    @property
    def epoch(self) -> int:
        """Number of epochs that were finished before the one in which the checkpoint was saved."""
        return int(self.part("epoch"))

    @property
    def step(self) -> int:
        """Number of steps that were taken."""
        return int(self.part("global_step"))

    def part(self, name: str) -> Any:
        """Return a part of the state of the training; see `check_state`."""
        self.check_state(name)
        return self.training[name]

    def check_state(self, *names: str) -> None:
        """Check that the checkpoint has parts of the state of a training, by default all that a training goes on from.

        Raises:
            ValueError: one of them is missing, or it is a folder.
        """
        if not self.training:
            raise ValueError(
                f"{self.path} is a folder of `save_pretrained`, without the training: give a run or a checkpoint"
            )
        for name in self.missing:
            if name in (names or PARTS):
                raise ValueError(f"{self.path} is not a checkpoint of a training: it has no {name}: {A_CHECKPOINT}")


def _content(path: Path) -> dict[str, Any]:
    """Return what is in the file of a checkpoint, after a check of the parts that it has."""
    if problem := damage(path):
        raise ValueError(f"{path} is damaged, or not a checkpoint ({problem}): {A_CHECKPOINT}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError(f"it contains a {type(content).__name__}")
        content["state_dict"]
    except Exception as error:  # bytes that anybody wrote make torch raise errors of many types
        raise ValueError(
            f"{path} is not a checkpoint that can be read safely ({type(error).__name__}): {A_CHECKPOINT}"
        ) from error
    for name in PARTS.keys() & content.keys():
        if not _is_part(name, content[name]):
            raise ValueError(
                f"{path} is not a checkpoint of a training: its {name} is not what `torchcaps train` writes"
            )
    return content


def _is_part(name: str, value: Any) -> bool:
    """Return whether a value is of the kind that a part of the state of a training is."""
    if name == "state_dict" and isinstance(value, dict):
        return all(isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items())
    return is_count(value) if PARTS[name] is int else isinstance(value, PARTS[name])


def is_count(value: Any) -> bool:
    """Return whether a value is a number of epochs, steps or samples, as a training counts them."""
    return type(value) is int and 0 <= value < 2**63


def _check_values(values: Any) -> None:
    """Check that values have the parts of a recipe."""
    for part in ("model", "data"):
        if not isinstance(values, dict) or not isinstance(values.get(part), dict):
            raise ValueError(f"it has no {part}")
    if not isinstance(values.get("trainer", {}), dict):
        raise ValueError("its trainer has no values")
    if "network" not in values["model"]:
        raise ValueError("its model has no network")


def _temperature(value: Any, source: Path, expected: str) -> float | None:
    """Return a temperature within the bounds of `best_temperature`: divided by others, scores may not be finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST <= value <= HIGHEST:
        raise ValueError(
            f"{source}: temperature must be a number from {LOWEST:g} to {HIGHEST:g}, got {shown(value)}: {expected}"
        )
    return float(value)


def _thresholds(value: Any, source: Path, expected: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(x, float) and 0 <= x <= 1 for x in value):
        raise ValueError(f"{source}: thresholds must be numbers from 0.0 to 1.0, got {shown(value)}: {expected}")
    return tuple(value)


def check_alike(state: Any, fresh: Any, name: str = "fit_loop") -> None:
    """Raise a TypeError if the state of a loop, which anybody may have written, has no count where the state of a fresh
    loop has one, or a value of another type. A name that only one of them has is that of another version."""
    for key, value, expected in _leaves_of_both(state, fresh, name):
        fits = is_count(value) if type(expected) is int else type(value) is type(expected)
        if not fits:
            raise TypeError(f"{key} is {shown(value)} ({type(value).__name__})")


def _leaves_of_both(state: Any, fresh: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(fresh, dict) and isinstance(state, dict):
        for key in fresh.keys() & state.keys():
            yield from _leaves_of_both(state[key], fresh[key], key)
    else:
        yield name, state, fresh


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint according to its own checksums, or None if it is intact.

    Raises:
        PermissionError: it may not be read, which says nothing about what is in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                return "it is compressed"  # as no checkpoint is; a few bytes could fill the memory
            changed = archive.testzip()
    except PermissionError:
        raise
    except Exception as error:  # damaged bytes make zipfile raise errors of many types
        return one_line(error) or type(error).__name__
    return f"{changed} is not what was written" if changed else None
