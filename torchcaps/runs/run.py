"""A run: a trained network with its data and all values of its training."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.data import LabeledData
from torchcaps.data.labeled import TargetKind
from torchcaps.measures.labels import DEFAULT, label_probabilities
from torchcaps.measures.predicting import as_prediction, run_network, segment
from torchcaps.models.pretrained import load_state
from torchcaps.recipes import Recipe, load_recipe
from torchcaps.recipes.modules import OwnModules
from torchcaps.recipes.values import name_of, own_arguments, with_source
from torchcaps.runs.checkpoint import Checkpoint
from torchcaps.runs.comparison import check_progress, compare
from torchcaps.runs.hub import HUB
from torchcaps.runs.places import find_checkpoint, folder_of, has_several, is_place
from torchcaps.training.build import Training
from torchcaps.training.curves import Curves, curves_of
from torchcaps.training.errors import innermost
from torchcaps.training.names import Names
from torchcaps.training.overrides import Override, overrides_of
from torchcaps.training.parts import build_part, untrained
from torchcaps.training.values import Values
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import counted
from torchcaps.utils.signals import StopSignals


@dataclass(frozen=True, eq=False)
class Run:
    """A run of a training: what its checkpoint says, and what can be built of it.

        run = Run.find("quickstart")  # the newest run of a recipe; or a folder, a checkpoint, hub:user/name
        run.probabilities(images)
        run.training({"trainer.max_epochs": 20}, resume=True).fit()

    Args:
        checkpoint: what was read of it.
        recipe: the recipe as it is now, where the run was found by its name; else one with the values of the run.
        allow_code: whether the values may name classes and functions of any package, whose code then runs.
        runs: folder of all runs, in which one that goes on from a checkpoint alone gets its folder.
        which: the checkpoint that was asked for, see `find`.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    allow_code: bool = False
    runs: Path = Path("runs")
    which: str | None = None

    @classmethod
    @checked
    def find(
        cls,
        source: str | os.PathLike[str],
        which: str | os.PathLike[str] | None = None,
        small: bool = False,
        runs: str | os.PathLike[str] | None = None,
        allow_code: bool = False,
    ) -> Self:
        """Find a run and read it. Nothing in it is executed.

        Args:
            source: a recipe, which means its newest run; the folder of a run, such as `runs/quickstart/version_0`; a
                checkpoint; a folder of `save_pretrained`; or `hub:user/name`, such a folder on the Hugging Face Hub,
                also `hub:user/name@revision`.
            which: "best" for the best checkpoint of the run, "last" for its newest, None for the best if its recipe
                keeps one and else the newest; or the path of a checkpoint, in place of those of the recipe.
            small: whether the small version of the recipe is meant.
            runs: folder of all runs; None for $TORCHCAPS_RUNS, or `runs`.
            allow_code: whether the recipe may name classes and functions of any package, and of modules beside its
                files or beside the files of the folder. Their code then runs.

        Raises:
            ValueError: there is no such run, or it cannot be read or used; the message says what to do.
        """
        source, root = os.fspath(source), Path(runs or os.environ.get("TORCHCAPS_RUNS") or "runs")
        which = None if which is None else os.fspath(which)
        checkpoint = find_checkpoint(source, which, small, root)
        if is_place(source):
            recipe = Recipe(source, checkpoint.files, with_source(checkpoint.values, str(checkpoint.path)))
        else:
            recipe = load_recipe(source, small)
        return cls(checkpoint, recipe, allow_code, root, which)

    @property
    def path(self) -> Path:
        """The checkpoint, or the folder of `save_pretrained`."""
        return self.checkpoint.path

    @property
    def folder(self) -> Path:
        """Folder of the run: of a checkpoint that lies alone the one that it lies in, of a repository of the Hub the
        working folder."""
        return Path() if self.recipe.name.startswith(HUB) else folder_of(self.path)

    @property
    def values(self) -> dict[str, Any]:
        """All values of the training, nested as in YAML."""
        return self.checkpoint.values

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the training, such as its metrics; see :class:`torchcaps.training.Report`."""
        return self.checkpoint.facts

    @property
    def temperature(self) -> float | None:
        """Number by which scores are divided before the softmax, chosen on the validation set; None if the training has
        chosen none."""
        return self.checkpoint.temperature

    @cached_property
    def thresholds(self) -> Tensor:
        """Probability above which each of several labels is predicted, `(labels,)`, chosen on the validation set; 0.5
        where the training has chosen none."""
        return self._thresholds_of(self.names)

    def _thresholds_of(self, names: Sequence[str]) -> Tensor:
        given = self.checkpoint.thresholds or (DEFAULT,) * len(names)
        if len(given) != len(names):
            raise ValueError(
                f"{self.path} has {counted(len(given), 'threshold')}, and there are {counted(len(names), 'label')}: "
                "give a checkpoint as `torchcaps train` wrote it"
            )
        return torch.tensor(given, dtype=torch.float64)  # as they were chosen

    @property
    def target(self) -> TargetKind:
        """What the network predicts: a class, several labels, numbers, or masks."""
        return self.data().target

    @property
    def names(self) -> list[str]:
        """Names of the classes, labels or numbers."""
        return self.data().names

    @property
    def network_name(self) -> str:
        """Name of the network in the recipe, such as "capsnet_small"."""
        return name_of(self.values["model"]["network"])

    def curves(self) -> Curves:
        """Return loss and accuracy by epoch: by quantity and part ("training", "validation"), the epochs and the
        values. A checkpoint that lies alone has none."""
        return curves_of(self.folder)

    def network(self) -> nn.Module:
        """Return the network with the weights of the run, in evaluation mode; the same one each time."""
        return self._parts[0]

    def data(self) -> LabeledData:
        """Return the data of the training, built of its values; no file of it is read. It prepares inputs as in the
        training. It is the same each time."""
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[nn.Module, LabeledData]:
        modules = OwnModules(str(self.path), self.checkpoint.files, self.allow_code)
        values = self._with_split()
        try:
            names = Names(self.allow_code)
            names.check(values["data"], LabeledData)
            names.check(values["model"]["network"], nn.Module)
            data = build_part(LabeledData, values["data"])
            network = build_part(nn.Module, untrained(values["model"]["network"]))
        except Exception as error:  # values that anybody wrote, and classes of the user's own
            if isinstance(error, ImportError):
                raise
            reason = modules.why_not(error.__cause__) or innermost(error) or type(error).__name__
            raise ValueError(f"{self.path}: its network or its data cannot be built: {reason}") from error
        load_state(network, self.checkpoint.network_state, self.path)
        return network.eval(), data

    def scores(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return the network's scores `(batch, classes)` of a batch of inputs, as its data makes them; or its numbers,
        in the units of the training.

        Raises:
            ValueError: the scores are NaN or infinite.
        """
        if self.target == "masks":
            raise ValueError("the network predicts masks: their probabilities are those of run.probabilities")
        return self._prediction(inputs).evidence.float()

    def probabilities(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        r"""Return the probability of each class, `(batch, classes)`: :math:`\text{softmax}(\text{scores} / T)` with the
        temperature T, or 1 if there is none; of several labels :math:`\sigma(\text{scores})`; of masks those of each
        pixel, `(batch, classes, height, width)`, see :attr:`torchcaps.Segmentation.probabilities`.

        Raises:
            ValueError: the scores are NaN or infinite, or the network predicts numbers.
        """
        if self.target == "numbers":
            raise ValueError("the network predicts numbers, which have no probabilities: they are the scores")
        if self.target == "masks":
            return segment(self.network(), inputs)  # type: ignore[arg-type]  # images
        prediction = self._prediction(inputs)
        if self.target == "labels":
            return label_probabilities(prediction).float()
        return (prediction.evidence.float() / (self.temperature or 1.0)).softmax(-1)

    @torch.no_grad()
    def _prediction(self, inputs: Tensor | tuple[Tensor, ...]) -> Prediction:
        network = self.network()
        return as_prediction(network, run_network(network, inputs))

    @checked
    def training(
        self,
        overrides: Mapping[str, Any] | Sequence[Override] = (),
        resume: bool = False,
        folder: Path | None = None,
        smoke: bool = False,
        signals: StopSignals | None = None,
    ) -> Training:
        """Build the training of this run, with its weights: to test the network, or to go on.

        Args:
            overrides: values to change, by their dotted names, such as `{"trainer.max_epochs": 20}`. What the network
                depends on cannot change; to go on, nothing of the model can.
            resume: whether `fit` goes on where the run stopped: after its newest checkpoint, or after the one that
                was asked for. Otherwise the training writes no files.
            folder: folder in which a run that goes on gets a folder of its own; None for the one beside this run's.
            smoke, signals: see :class:`torchcaps.training.Values` and :class:`torchcaps.training.Training`.

        Raises:
            ValueError: a value cannot be used, or the checkpoint has no state to go on from.
        """
        if resume and self.which is None and has_several(self.recipe.name):  # the best may not be the newest
            newest = Run.find(self.recipe.name, "last", self.recipe.is_small, self.runs, self.allow_code)
            return newest.training(overrides, resume, folder, smoke, signals)
        if resume:
            self.checkpoint.check_state()
        changes = overrides_of(overrides)
        training = Training(
            replace(self.fresh_values(changes, smoke), checkpoint=self.path),
            (folder or self._beside()) if resume else None,
            signals,
            self.path if resume else None,
        )
        if training.model.target == "labels" and (report := training.report()) is not None:
            report.thresholds = self._thresholds_of(training.datamodule.names).tolist()
        try:
            self._load_weights(training)
            compare(self.path, training, changes)
            if resume:
                check_progress(self.checkpoint, training)
        except ValueError:
            training.give_back_folder()
            raise
        return training

    def fresh_values(self, overrides: Mapping[str, Any] | Sequence[Override] = (), smoke: bool = False) -> Values:
        """Return the values of the run, with changes, for a training of its own from the beginning."""
        changes = overrides_of(overrides)
        own_split = any(x.path[0] == "data" and x.path[-1] in ("data", "images", "split") for x in changes)
        values = copy.deepcopy(self.values) if own_split else self._with_split()
        # A list of the trainer that is added to is that of the recipe, so that the same command can be given again.
        for name in [x.path[1] for x in changes if x.adds and x.path[0] == "trainer" and len(x.path) == 2]:
            of_recipe, of_run = (x.get("trainer") or {} for x in (self.recipe.config, values))
            values["trainer"] = {**of_run, name: of_recipe.get(name)}
        recipe = replace(self.recipe, values=with_source(values, str(self.path)))
        return Values.of(recipe, changes, self.allow_code, smoke)

    def load_weights_into(self, network: nn.Module) -> None:
        """Give another network of the same kind the weights of this run."""
        load_state(network, self.checkpoint.network_state, self.path)

    def _load_weights(self, training: Training) -> None:
        state = self.checkpoint.training.get("state_dict")
        if state is None:  # a folder has the network alone
            self.load_weights_into(training.model.network)
            training.model.take_units()
            return
        weighted = "loss.weight" in state
        if weighted != ("loss.weight" in training.model.state_dict()):
            raise ValueError(
                f"{self.path} was trained with{'' if weighted else 'out'} class weights: leave out what changes "
                "model.class_weights"
            )
        load_state(training.model, state, self.path)

    def _with_split(self) -> dict[str, Any]:
        """Return the values with the checkpoint as the split of one's own data: if files were added or deleted since, a
        new split would test on samples that the network was trained on. A folder of `save_pretrained` has no split;
        reading the samples is then an error."""
        values = copy.deepcopy(self.values)
        arguments = own_arguments(values["data"])
        if {"split", "test_share"} <= arguments.keys():
            arguments["split"] = str(self.path.absolute())
        return values

    def _beside(self) -> Path:
        """Return the folder in which a run that goes on gets a new folder."""
        if not is_place(self.recipe.name):
            return self.runs / self.recipe.folder
        return self.folder.parent if self.folder != self.path.parent else self.runs / self.path.stem
