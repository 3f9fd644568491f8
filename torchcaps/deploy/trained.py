"""A trained network with all that is needed to use it, read from a checkpoint alone."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.data import LabeledData
from torchcaps.training.checkpoint_files import EXPECTED, facts_of, network_state, read_checkpoint, values_of
from torchcaps.training.errors import innermost
from torchcaps.training.names import known_names_only
from torchcaps.training.parts import build_part, untrained
from torchcaps.utils.arguments import Positive, checked


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
            allow_code: whether the recipe may name classes and functions of any package, which then run.

        Raises:
            ValueError: it cannot be read, is no such checkpoint, or does not hold the values of its recipe.
        """
        path = Path(path).expanduser()
        if path.is_dir():
            from torchcaps.deploy.hub import from_pretrained

            return cls(**vars(from_pretrained(path, allow_code=allow_code)))
        if not path.is_file():
            raise ValueError(f"there is no file {path}: {EXPECTED}")
        content = read_checkpoint(path, "state_dict")
        values = values_of(path, content)
        if values is None:
            raise ValueError(f"{path} does not say with which values it was trained: {EXPECTED}")
        return cls.built(path, values, network_state(content), facts_of(content), allow_code)

    @classmethod
    def built(
        cls,
        path: Path,
        values: dict[str, Any],
        state: Mapping[str, Tensor],
        about: dict[str, Any],
        allow_code: bool = False,
    ) -> Self:
        """Build the network and the data of the values of a recipe.

        Args:
            path: where the values come from, for messages.
            values: see `Trained`.
            state: state of the network.
            about: see `Trained`; also with the temperature, under this name.
            allow_code: see `load`.

        Raises:
            ValueError: the values are not those of a recipe, or the state does not fit the network.
        """
        try:
            with nullcontext() if allow_code else known_names_only():
                data = build_part(LabeledData, values["data"])
                network = build_part(nn.Module, untrained(values["model"]["network"]))
        except Exception as error:  # values that anybody wrote, and classes of the user's own
            if isinstance(error, ImportError):
                raise
            said = innermost(error) or type(error).__name__
            raise ValueError(f"{path}: its network or its data cannot be built: {said}") from error
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise ValueError(f"{path}: its weights do not fit its network: {said[:300]}") from None
        temperature = about.get("temperature")
        if not (isinstance(temperature, float) and 0 < temperature < float("inf")):
            temperature = None
        return cls(network.eval(), data, values, temperature, about)

    @property
    def names(self) -> list[str]:
        """Names of the classes."""
        return self.data.names

    @torch.inference_mode()
    def scores(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return the network's scores `(batch, classes)` of a batch of inputs, as its data makes them."""
        output = self.network(*inputs) if isinstance(inputs, tuple) else self.network(inputs)
        assert isinstance(output, Prediction)
        return output.evidence.float()

    def probabilities(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        r"""Return the probability of each class, `(batch, classes)`: :math:`\text{softmax}(\text{scores} / T)` with the
        temperature T, or 1 if there is none."""
        return probabilities_of(self.scores(inputs), self.temperature or 1.0)


@checked
def probabilities_of(scores: Tensor, temperature: Positive = 1.0) -> Tensor:
    """Return softmax(scores / temperature) over the last dimension."""
    return (scores / temperature).softmax(-1)
