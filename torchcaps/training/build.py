"""Builds the trainer, the model and the data of a recipe and of overrides such as `--trainer.max_epochs 5`.

The commands of `torchcaps` (`torchcaps.cli`) and the queue of `torchcaps reproduce` build their trainings here.
"""

import copy
import inspect
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning
import torch
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning import seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    ModelCheckpoint,
    ProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from torchcaps.data import ImageData, LabeledData
from torchcaps.data.labeled import TERMS
from torchcaps.nn import CapsuleHead, CapsuleRegressor, RoutingPool2d
from torchcaps.routing import Routing
from torchcaps.training.checkpoints import (
    MONITORS_OF_NEWEST,
    AtomicCheckpointIO,
    BlamingConnector,
    FirstStep,
    KeepsValues,
    LastCheckpoints,
    add_facts,
    blame_checkpoint,
)
from torchcaps.training.checks import check_callbacks, check_classes, check_optimizer, check_shares, check_trainer
from torchcaps.training.classifier import Classifier
from torchcaps.training.errors import innermost
from torchcaps.training.monitors import ChecksMonitors, validates
from torchcaps.training.names import import_name
from torchcaps.training.parts import build_part, plain_values, untrained
from torchcaps.training.progress import ProgressLines
from torchcaps.training.report import Report
from torchcaps.training.trainer import Trainer
from torchcaps.training.values import Values
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import counted
from torchcaps.utils.files import name_file_in_errors, take_folder, write_text_whole
from torchcaps.utils.quiet import quiet_lightning
from torchcaps.utils.signals import StopSignals

# Learning rate of the features of a library's network, pretrained or not, as a part of the optimizer's.
FEATURES_LR = {True: 0.1, False: 0.5}


class Training:
    """The trainer, the model and the data of a recipe. Building them runs nothing.

        training = Training(Values.of(load_recipe("quickstart"), {"trainer.max_epochs": 5}), Path("runs/quickstart"))
        training.fit()
        training.test()["test/accuracy"]

    With `allow_code` the values may name any class or function, also of modules in the recipe's own folder; see
    `torchcaps.recipes.modules`. Without it, only those that `torchcaps.training.names` knows, and nothing else is run.

    Args:
        given: the values, of a recipe or of a run. Those of a run are not fitted to the data again.
        folder: folder of the runs of this recipe; logs and checkpoints go to a new `version_N` in it, or `smoke_N`;
            None writes none.
        signals: signals that ask the training to stop.
        resumed: checkpoint from which the training goes on; None to begin.

    Raises:
        ValueError: a value cannot be used; the message is one line for the user of the command.

    Attributes:
        values: all values, as they stand in a run's `config.yaml`.
        trainer, model, datamodule: what is built of them.
        run_folder: folder of this run, or None if it writes no logs and checkpoints.
        best: the best checkpoint after `fit`, if the recipe keeps one.
    """

    @checked
    @quiet_lightning()
    def __init__(
        self,
        given: Values,
        folder: Path | None = None,
        signals: StopSignals | None = None,
        resumed: Path | None = None,
    ):
        self.given, self.folder, self.signals, self.resumed = given, folder, signals or StopSignals(), resumed
        self.run_folder: Path | None = None
        self.best: Path | None = None
        self._first_step = FirstStep()
        self.parser = recipe_parser(logs=folder is not None)
        try:
            self.config = self.parser.parse_object(copy.deepcopy(given.merged))  # it changes them
        except (ArgumentError, RecursionError) as error:
            raise given.refusal(error) from error
        check_trainer(self.config.seed_everything, self.config.trainer)
        seed = self.config.seed_everything  # True for any, False for none
        if seed is not False:
            self.config.seed_everything = seed_everything(None if seed is True else seed, workers=True)
        try:
            self._build()
        except Exception as error:
            self.give_back_folder()
            if given.allow_code and not isinstance(error, ValueError):
                raise  # perhaps an error in the user's own modules
            if isinstance(error, OSError | ImportError):
                raise
            message = innermost(error) or f"the training cannot be built: {type(error).__name__}"
            raise ValueError(message) from error  # without the lines that jsonargparse adds

    @quiet_lightning()
    def fit(self) -> None:
        """Train to the end, and give the model the weights of the best checkpoint if the recipe keeps one.

        Raises:
            ValueError: the data, or the checkpoint to resume, do not fit the training.
            Stopped: a signal has stopped it, after a checkpoint.
        """
        try:
            self.trainer.fit(self.model, self.datamodule, ckpt_path=self.resumed, weights_only=True)
            if isinstance(self.trainer.strategy.launcher, _MultiProcessingLauncher):
                self.trainer.loggers = []  # the test starts new processes, which would begin the logs anew
            self._take_best()
            if self.report() and validates(self.trainer, self.datamodule):  # the report sees the validation samples
                loggers, self.trainer.loggers = self.trainer.loggers, []  # the curves would get one more point
                self.trainer.validate(self.model, self.datamodule, verbose=False)
                self.trainer.loggers = loggers
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error
        except Exception as error:
            if not self._first_step.under_way or isinstance(error, ValueError):
                raise
            with blame_checkpoint(self.resumed):
                raise

    def _take_best(self) -> None:
        for callback in self.trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint) or callback.monitor in MONITORS_OF_NEWEST:
                continue
            if callback.best_model_path:
                self.best = Path(callback.best_model_path)
                content = torch.load(self.best, map_location="cpu", weights_only=True)
                self.model.load_state_dict(content["state_dict"])
                self.best_epoch = content["epoch"] + 1
                if report := self.report():
                    report.about["epoch"] = self.best_epoch
                return

    @quiet_lightning()
    def test(self) -> dict[str, float]:
        """Test the model, and return the metrics by name. What the report found is written into the checkpoint of this
        training that was tested."""
        try:
            (metrics,) = self.trainer.test(self.model, self.datamodule, verbose=False)
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error
        report = self.report()
        if report is not None and self.run_folder is not None and self.trainer.is_global_zero:
            tested = self.best or self.run_folder / "checkpoints" / "last.ckpt"
            if tested.is_file():
                add_facts(tested, report.about)
        return dict(metrics)

    def _build(self) -> None:
        """Build the trainer, the model and the data."""
        given, config = self.given, self.config.clone()
        for part in (config.data, config.model.network):
            if "init_args" not in part:
                part.init_args = Namespace()  # of a class whose constructor takes no arguments
        if given.smoke and "max_texts" in config.data.init_args and config.data.init_args.max_texts is None:
            config.data.init_args.max_texts = 8  # otherwise all texts would be embedded before the first step
        if given.checkpoint is not None:  # its values are fitted to the data, and its weights follow
            data = build_part(LabeledData, config.data)
            network = build_part(nn.Module, untrained(config.model.network.as_dict()))
        elif import_name(config.data.class_path).network_arguments is not LabeledData.network_arguments:  # one's own
            data, network = _fitted_to_each_other(config.data, config.model)
        else:
            data = build_part(LabeledData, config.data)
            network = build_part(nn.Module, config.model.network)
        self.config, self.values = config, plain_values(config)
        built = self.parser.instantiate(_with_parts(config, data, network))
        self.model: Classifier = built.model.train()  # weights of the package come in evaluation mode
        self.datamodule = data
        self.trainer = self._trainer(built.trainer.as_dict())
        check_shares(given, self.values)
        check_classes(self.model, data)
        check_optimizer(self.model, given.overrides)
        check_callbacks(self.trainer, self.model)

    def _trainer(self, arguments: dict[str, Any]) -> Trainer:
        """Build the trainer of its arguments in the recipe, and the folder of its run if it writes one."""
        if self.folder is not None and not arguments["fast_dev_run"]:
            self.run_folder = self._take_folder(self.folder)
        if arguments["logger"] is True:
            arguments["logger"] = _loggers(self.run_folder) if self.run_folder else False
        callbacks = self._callbacks(arguments)
        if not any(isinstance(callback, Checkpoint) for callback in callbacks):
            arguments["enable_checkpointing"] = False  # otherwise Lightning adds a callback of its own
        plugins = arguments["plugins"] or []
        plugins = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        try:
            trainer = Trainer(**{**arguments, "callbacks": callbacks, "plugins": plugins})
        except (TypeError, MisconfigurationException) as error:  # for a wrong value
            raise ValueError(str(error)) from error
        trainer._checkpoint_connector = BlamingConnector(trainer)
        return trainer

    def _callbacks(self, arguments: dict[str, Any]) -> list[Any]:
        """Return the callbacks of the recipe, and those of every training."""
        callbacks = arguments["callbacks"] or []
        # First, so that an error of another callback behind the first step is not taken for one of the state.
        callbacks = [self._first_step, *(callbacks if isinstance(callbacks, list) else [callbacks])]
        if self.run_folder is None:
            callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        for callback in callbacks:
            if isinstance(callback, Report):
                callback.folder = self.run_folder
                callback.describe(self.given.recipe.name, self.given.arguments)
        callbacks.append(ChecksMonitors())
        if arguments["enable_progress_bar"] is not False and not any(isinstance(x, ProgressBar) for x in callbacks):
            callbacks.append(TQDMProgressBar() if sys.stdout.isatty() else ProgressLines())
        if self.run_folder is not None and arguments["enable_checkpointing"] is not False:
            callbacks.append(LastCheckpoints(self.run_folder / "checkpoints", self.signals))
            callbacks.append(KeepsValues(self.values, self.given.own_modules.files))
        return callbacks

    def summary(self) -> str:
        """Return in one line what is trained: the network, its routing, its parameters, the classes and the inputs."""
        values, network = self.config.model.network, self.model.network
        arguments = values.init_args
        name = arguments.get("name") or values.class_path.rpartition(".")[2]
        name += f" of {counted(arguments.depth, 'layer')}" if "depth" in arguments else ""
        routings: dict[str, None] = {}  # in order
        for module in network.modules():
            if isinstance(module, CapsuleHead | CapsuleRegressor | RoutingPool2d):
                routings[f"a {type(module).__name__}"] = None
            elif isinstance(module, Routing):
                routings[type(module).__name__] = None
        parameters = sum(p.numel() for p in network.parameters())
        trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
        shape = getattr(self.datamodule, "shape", None)
        inputs = "images" if isinstance(self.datamodule, ImageData) else "arrays"
        return "".join(
            (
                name,
                f" with {', '.join(routings)}" if routings else "",
                f": {parameters:,} parameters",
                f", {trained:,} of them trained" if trained < parameters else "",
                f", {counted(self.model.classes, *TERMS[self.model.target])}",
                f", {inputs} of {'x'.join(map(str, shape))}" if shape else "",
                f"; its features at a learning rate of {rate:g}" if (rate := self.model.features_lr) else "",
            )
        )

    def report(self) -> Report | None:
        """Return the report on this training, if its recipe asks for one."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, Report)), None)

    def give_back_folder(self) -> None:
        """Remove the folder of a run that has no checkpoint and no metrics yet."""
        folder = self.run_folder
        if folder is not None and not (folder / "metrics.csv").exists() and not any(folder.glob("checkpoints/*")):
            shutil.rmtree(folder, ignore_errors=True)  # only the first process has made it

    def _take_folder(self, folder: Path) -> Path:
        kind = "smoke" if self.given.smoke else "version"
        rank = getattr(rank_zero_only, "rank", 0)
        if rank:  # a placeholder: the first process takes the folder, and broadcasts it when all are connected
            return folder / f"{kind}_of_the_first_process"
        taken = take_folder(folder, kind)
        write_text_whole(taken / "config.yaml", self.parser.dump(self.config, skip_unset=False))
        return taken


def recipe_parser(logs: bool) -> ArgumentParser:
    """Return the parser of the values of a recipe.

    Args:
        logs: whether the trainer writes logs, unless the recipe says it.
    """
    parser = ArgumentParser(exit_on_error=False, dump_header=[f"lightning.pytorch=={lightning.__version__}"])
    parser.add_argument("--seed_everything", type=bool | int, default=True)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, fail_untyped=False)
    parser.set_defaults({"trainer.logger": logs, "trainer.enable_model_summary": False})  # see `Training.summary`
    parser.add_class_arguments(Classifier, "model", fail_untyped=False)
    parser.add_subclass_arguments(LabeledData, "data", fail_untyped=False, required=True)
    return parser


def _check_kind(network: Namespace, data: Namespace) -> None:
    """Check that a network of ours reads what the data has: texts, pictures, or arrays, which may be pictures too."""
    if not network.class_path.startswith("torchcaps."):
        return
    reads_texts = "layers" in network.init_args and "width" in network.init_args
    reads = ["texts"] if reads_texts else ["pictures", "arrays"] if "dims" in network.init_args else ["pictures"]
    has = "arrays" if "layout" in data else "pictures" if "size" in data else "texts"
    if has not in reads:
        name = network.class_path.rpartition(".")[2]
        raise ValueError(
            f"{name} is a network of {' and '.join(reads)}, and the data has {has}: choose another --model"
        )


def _fitted_to_each_other(data_values: Namespace, model_values: Namespace) -> tuple[LabeledData, nn.Module]:
    """Build the user's own data and a network for it. Write into the values what each determines of the other, such as
    the classes and the shape of the images, and a learning rate and a loss that suit the network."""
    _check_kind(model_values.network, data_values.init_args)
    arguments = model_values.network.init_args
    if "size" in arguments and arguments.size is None:
        arguments.size = data_values.init_args.size  # a library's network takes images of the size asked for
    if arguments.get("decoder") is True and not model_values.reconstruction_weight:
        arguments["decoder"] = False  # nothing would train it
    data = build_part(LabeledData, data_values)
    determined = data.network_arguments()
    if data.target == "numbers" and "numbers" not in arguments:
        name = model_values.network.class_path.rpartition(".")[2]
        raise ValueError(
            f"{name} gives classes, and the data has numbers: choose --model capsule_cnn, or a network of torchvision "
            "or timm, such as torchvision/resnet18"
        )
    _set(arguments, {name: value for name, value in determined.items() if name in arguments})
    random = torch.get_rng_state()
    network = build_part(nn.Module, model_values.network)
    channels, size, *_ = getattr(network, "image_shape", None) or (None, None)
    if channels not in (None, determined.get("in_channels")) or size not in (None, determined.get("image_size")):
        _set(data_values.init_args, {"channels": channels, "size": size})
        data = build_part(LabeledData, data_values)
        changed = {name: value for name, value in data.network_arguments().items() if name in arguments}
        if any(arguments[name] != value for name, value in changed.items()):
            _set(arguments, changed)
            torch.set_rng_state(random)
            network = build_part(nn.Module, model_values.network)
    gives_masks, name = getattr(network, "gives_masks", False), model_values.network.class_path.rpartition(".")[2]
    if gives_masks and data.target != "masks":
        raise ValueError(f"{name} gives a class of each pixel, and the data has no masks: choose another --model")
    if not gives_masks and data.target == "masks" and type(network).__module__.startswith("torchcaps."):
        raise ValueError(f"{name} gives no class of each pixel: choose --model segcaps or unet")
    _fit_target(data, network, model_values)
    of_library = model_values.network.class_path == "torchcaps.models.library_network"
    rate = model_values.optimizer.get("init_args", {}).get("lr")
    one_cycle = model_values.scheduler and "max_lr" in model_values.scheduler.get("init_args", {})
    chosen = model_values.features_lr is not None or one_cycle
    if of_library and arguments.trainable == "all" and not chosen and isinstance(rate, float):
        model_values.features_lr = rate * FEATURES_LR[bool(arguments.pretrained)]
    _set(data_values.init_args, data.resolved_arguments())
    return data, network


def _fit_target(data: LabeledData, network: nn.Module, values: Namespace) -> None:
    """Write into the values of the model what its targets are, and the loss that they and the network need in place of
    a cross-entropy."""
    values.classes = data.classes
    if data.target == "labels":
        values.labels_per_image = None
    elif data.target != "class":
        values.predicts = data.target
    loss, options = values.loss, inspect.signature(torch.nn.CrossEntropyLoss).parameters
    arguments = loss.get("init_args", {})
    plain = all(arguments.get(name, option.default) == option.default for name, option in options.items())
    if loss.class_path == "torch.nn.CrossEntropyLoss" and plain:
        if data.target == "numbers":
            values.loss = Namespace(class_path="torch.nn.MSELoss")
        elif data.target == "masks":
            values.loss = Namespace(class_path="torchcaps.SegmentationLoss")
        elif not getattr(network, "gives_logits", True):
            values.loss = Namespace(class_path="torchcaps.MarginLoss")  # it gives activations in [0, 1]
        elif data.target == "labels":
            values.loss = Namespace(class_path="torch.nn.BCEWithLogitsLoss")
    elif loss.class_path == "torch.nn.CrossEntropyLoss" and data.target != "class":
        raise ValueError(
            f"this CrossEntropyLoss is for one class of each sample, and the data has {data.target}: leave out the "
            "options of model.loss"
        )


def _with_parts(config: Namespace, data: LabeledData, network: nn.Module) -> Namespace:
    """Return values with two parts that are built, for the parser to build the others."""
    config = config.clone()
    config.data, config.model.network = data, network
    return config


def _set(arguments: Namespace, values: dict[str, Any]) -> None:
    for name, value in values.items():
        arguments[name] = value


def _loggers(run_folder: Path) -> list[Logger]:
    place: dict[str, Any] = {"save_dir": run_folder.parent, "name": "", "version": run_folder.name}
    loggers: list[Logger] = [_CSVLogger(**place)]
    if find_spec("tensorboard"):  # it is optional
        loggers.append(TensorBoardLogger(**place))
    return loggers


class _CSVLogger(CSVLogger):
    """Lightning's logger, whose errors name the file."""

    def save(self) -> None:
        with name_file_in_errors(Path(self.log_dir) / "metrics.csv"):
            super().save()
