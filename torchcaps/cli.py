"""The command line: `torchcaps train | test | explain | recipes | reproduce | models | hardest | bench`."""

import argparse
import csv
import io
import itertools
import multiprocessing
import os
import pickle
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcaps.extras import needs
from torchcaps.files import write_text_whole
from torchcaps.models import create_model, list_models
from torchcaps.models.registry import describe_model, nearest
from torchcaps.signals import Stopped, StopSignals

if TYPE_CHECKING:
    from torchcaps.data import ImageData
    from torchcaps.training.cli import RecipeCLI


UNSEEN = (".root", ".cache", ".num_workers")  # options of data that do not change what is trained on


class BadInput(Exception):
    """What the user gave cannot be used: one line that says what, what was expected and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input ends in one line on stderr and status 2."""
    options, overrides = _parser().parse_known_args(arguments)
    try:
        with StopSignals() as options.signals:
            if overrides and not hasattr(options, "recipe"):
                raise BadInput(f"unknown argument {overrides[0]}; see torchcaps {options.command} --help")
            options.run(options, overrides)
    except (BadInput, ImportError, OSError, FloatingPointError) as error:
        print(f"torchcaps: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Stopped as stop:
        with suppress(OSError):  # the terminal may be gone
            print(f"torchcaps: {stop.said}", file=sys.stderr)
        return stop.status
    return 0


def run() -> None:
    """The console script."""
    sys.exit(main())


def train(options: argparse.Namespace, overrides: list[str]) -> None:
    """Train a recipe, then test it."""
    with needs("train"):
        from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    cli = _build(options, overrides, smoke=options.smoke)
    checkpoint = _checkpoint(options, cli, "")[0] if options.ckpt_path else None
    try:
        with _bad_data():
            cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint, weights_only=True)
            if isinstance(cli.trainer.strategy.launcher, _MultiProcessingLauncher):
                cli.trainer.loggers = []  # its processes are new ones, and would begin the logs anew
            _test(cli)
    except Stopped as stop:
        for process in multiprocessing.active_children():  # of a spawned training
            process.terminate()
            process.join()
        if not cli.trainer.is_global_zero:
            sys.exit(0)  # the first process tells; Lightning kills it where another one ends with an error
        if cli.run_folder:
            stop.said += f"; {_way_on(options, overrides, cli.run_folder)}"
        raise
    except OSError as error:
        if cli.run_folder is None:
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        raise BadInput(f"{reason}; {_way_on(options, overrides, cli.run_folder)}") from error
    if cli.trainer.is_global_zero and cli.run_folder:
        print(f"run: {cli.run_folder}")


def _way_on(options: argparse.Namespace, overrides: list[str], run_folder: Path) -> str:
    """The command that goes on with a run."""
    last = run_folder / "checkpoints" / "last.ckpt"
    checkpoint = str(last) if last.is_file() else options.ckpt_path
    command = ["torchcaps", "train", options.recipe, *(["--smoke"] if options.smoke else []), *overrides]
    if options.runs != os.environ.get("TORCHCAPS_RUNS", "runs"):
        command += ["--runs", options.runs]
    if checkpoint:
        command += ["--ckpt_path", checkpoint]
    return f"{'to go on' if checkpoint else 'nothing was saved; to start again'}: {shlex.join(command)}"


def test(options: argparse.Namespace, overrides: list[str]) -> None:
    """Test a checkpoint of a recipe."""
    cli = _build(options, overrides, logs=False)
    _, state = _checkpoint(options, cli, "network.")
    cli.model.load_state_dict(state)
    if options.predictions:
        if cli.model.labels_per_image != 1:
            raise BadInput("--predictions is for images of one class each, and this recipe's have several")
        if cli.trainer.world_size > 1:
            raise BadInput("--predictions needs all images in one process: add --trainer.devices 1")
        if options.predictions.is_dir():
            raise BadInput(f"--predictions {options.predictions} is a folder: give the path of a .csv file")
        cli.model.predictions = []
    with _bad_data():
        _test(cli)
    if cli.model.predictions:
        names = cli.datamodule.names
        rows = torch.cat(cli.model.predictions, 1).T.tolist()
        written = io.StringIO()
        writer = csv.writer(written, lineterminator="\n")
        writer.writerow(("label", "prediction"))
        writer.writerows((names[label], names[prediction]) for label, prediction in rows)
        print(f"predictions: {write_text_whole(options.predictions, written.getvalue())}")


def explain(options: argparse.Namespace, overrides: list[str]) -> None:
    """Draw what a checkpoint of a recipe has learned."""
    from torchcaps.data import ImageData
    from torchcaps.explain import write_heatmaps

    if options.dynamics is None and (len(options.ckpt_path) > 1 or options.images is not None):
        raise BadInput("several --ckpt_path, and --images, are for --dynamics: leave them out, or give --dynamics too")
    if options.dynamics is not None and options.image:
        raise BadInput("--dynamics is of test images, and --image of heatmaps: leave one of them out")
    cli = _build(options, overrides, logs=False)
    data = cli.datamodule
    if not isinstance(data, ImageData):
        raise BadInput(f"there are figures of what a network does with images, and {type(data).__name__} has none")
    if options.dynamics is not None:
        return _explain_dynamics(options, cli, data)
    checkpoint, state = _checkpoint(options, cli, "network.", options.ckpt_path[0])
    cli.model.load_state_dict(state)
    folder = _figures(options, checkpoint)
    if options.image:
        with _bad_data():
            print(f"figure: {write_heatmaps(cli.model.network, options.image, data.shape, folder)}")
        return
    with _bad_data():
        data.setup("test")
    try:
        with _bad_data():  # photographs are read only now
            for path in _write_figures(cli.model.network, data, folder):
                print(f"figure: {path}")
    except TypeError as error:  # not a network that there are figures for
        raise BadInput(str(error)) from error


def _write_figures(network: torch.nn.Module, data: "ImageData", folder: Path) -> Iterator[Path]:
    """All that there are of this network on this data."""
    from torchcaps.data import StereoData
    from torchcaps.explain import has_class_capsules, has_figures, write_figures, write_pose_figures

    if isinstance(data, StereoData) and has_class_capsules(network, data):
        yield from write_pose_figures(network, data, folder)
        if not has_figures(network):
            return
    batches = ((data.centre(images), *rest) for images, *rest in data.test_dataloader())
    yield from write_figures(network, batches, folder)


def _explain_dynamics(options: argparse.Namespace, cli: "RecipeCLI", data: "ImageData") -> None:
    """A row of panels per layer, a panel per checkpoint."""
    from torchcaps.explain import capsule_layers, routing_dynamics, routing_dynamics_figure
    from torchcaps.explain.pictures import write

    left = 128 if options.images is None else options.images
    if left < 1:
        raise BadInput(f"--images must be at least 1, got {left}")
    checkpoints: dict[tuple[int, Path], Path] = {}
    epochs: dict[int, int] = {}  # by step
    for given in options.ckpt_path:
        path, _ = _checkpoint(options, cli, "network.", given)
        step, epoch = _read(path, "global_step", "epoch")
        epochs[step] = epoch + 1
        checkpoints.setdefault((step, path.parent), path)  # of a run, `last` and the newest are the same
    by_epoch = len(set(epochs.values())) == len(epochs)
    network = cli.model.network
    with _bad_data():
        rows: dict[str, list[Any]] = {name: [] for name in options.dynamics or capsule_layers(network)}
        data.setup("test")
        batches = []
        for images, *_ in data.test_dataloader():
            batches.append(data.centre(images[:left]))
            left -= len(batches[-1])
            if not left:
                break
        for step, folder in sorted(checkpoints):
            path = checkpoints[step, folder]
            cli.model.load_state_dict(*_read(path, "state_dict"))
            title = f"after epoch {epochs[step]}" if by_epoch else f"after step {step:,}"
            for name, row in rows.items():
                row.append((title, routing_dynamics(network, name, batches)))
    figure = routing_dynamics_figure(list(rows.values()), list(rows))
    print(f"figure: {write(figure, _figures(options, path) / 'dynamics.png')}")


def _figures(options: argparse.Namespace, checkpoint: Path) -> Path:
    return Path(options.figures) if options.figures else checkpoint.parent.parent / "figures"


def recipes(options: argparse.Namespace, overrides: list[str]) -> None:
    """List the recipes and the numbers they reproduce."""
    from torchcaps.recipes import list_recipes, published
    from torchcaps.reproduce.results import known_results, summary

    rows = []
    try:
        results = known_results(Path(options.runs))
    except ValueError as error:
        raise BadInput(str(error)) from error
    for name in list_recipes():
        head = published(name)
        rows.append((name, head.row, head.number, summary(results, name), head.data))
    _print_table(("recipe", "row", "published", "ours", "data"), rows)


def reproduce(options: argparse.Namespace, overrides: list[str]) -> None:
    """Train what is missing of the papers' rows, each resumed where it stopped."""
    from torchcaps.reproduce import queue

    root = Path(options.runs)
    if options.threads < 1:
        raise BadInput(f"--threads must be at least 1, got {options.threads}")
    if options.hours is not None and not options.hours > 0:
        raise BadInput(f"--hours must be more than 0, got {options.hours}")
    torch.set_num_threads(options.threads)  # what rows were measured with, too

    def say(text: str) -> None:
        print(f"{datetime.now().isoformat(' ', 'seconds')} {text}", flush=True)

    try:
        if options.measure:
            queue.measure(root, options.papers, options.threads, say)
        if options.list or options.measure:
            _print_table(queue.HEADER, queue.table(root, options.papers))
        else:
            queue.reproduce(root, options.papers, options.hours, options.threads, say)
    except ValueError as error:
        raise BadInput(str(error)) from error
    except Stopped as stop:
        stop.said += "; the same command goes on"
        raise


def models(options: argparse.Namespace, overrides: list[str]) -> None:
    """List the models and their sizes."""
    rows = []
    for name in list_models(options.pattern):
        with torch.device("meta"):
            model = create_model(name)
        rows.append((name, f"{sum(p.numel() for p in model.parameters()):,}", describe_model(name)))
    if not rows:
        raise BadInput(f"no model matches {options.pattern!r}: there are {', '.join(list_models())}")
    _print_table(("model", "parameters", ""), rows)


def hardest(options: argparse.Namespace, overrides: list[str]) -> None:
    """List the classes that a classifier is most often wrong about, as a class_list of ImageNet."""
    from torchcaps.data.hardest import class_list, read_predictions

    with _bad_data():
        text = class_list(*read_predictions(options.file), options.classes)
    if options.out:
        if options.out.is_dir():
            raise BadInput(f"--out {options.out} is a folder: give the path of a text file")
        print(f"classes: {write_text_whole(options.out, text)}")
    else:
        print(text, end="")


def bench(options: argparse.Namespace, overrides: list[str]) -> None:
    """Measure time and memory of the papers' layers and networks, beside what people copy and the machine's bound."""
    from torchcaps.bench import MEASURED, NETWORKS, WAYS, Request, measure, measure_rates
    from torchcaps.bench.report import TABLE, environment, table_rows, write_figure, write_json
    from torchcaps.bench.tune import tune
    from torchcaps.ops import backends

    with needs("train"):  # now, and not after all has been measured
        import rich.table  # noqa: F401

    for kind, names, known in (("layer", options.layer, MEASURED), ("way", options.way, WAYS)):
        for name in names or ():
            if name not in known:
                raise BadInput(f"no {kind} {name!r}{nearest(name, list(known))}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda needs a CUDA device, and PyTorch finds none: use --device cpu")
    if "triton" in (options.way or ()) and device != "cuda":
        raise BadInput("--way triton runs on CUDA devices only, and this is --device cpu: use --way tiled")
    factors, counts = sorted(set(options.children)), sorted(set(options.iterations or ()))
    batches = [] if options.batch is None else [options.batch]
    given = {"--children": factors, "--iterations": counts, "--batch": batches, "--rounds": [options.rounds]}
    for name, numbers in given.items():
        for number in numbers:
            if number < 1:
                raise BadInput(f"{name} must be at least 1, got {number}")
    if len(factors) > 1 and len(counts) > 1:
        raise BadInput("several --children or several --iterations, and not both: a figure has one axis for them")
    for name in options.layer or ():
        if name in NETWORKS and factors != [1]:
            raise BadInput(f"--children is for layers, and the number of children of {name} is fixed: leave one out")
        if name in NETWORKS and options.tune:
            raise BadInput(f"--tune is for layers, and {name} is a network: give its layers")
    reason = None if options.tune is None else backends()["triton"]
    if reason is not None:
        raise BadInput(f"--tune tries the tiles of the Triton kernels, and they cannot run here: {reason}")
    layers = options.layer or [name for name in MEASURED if name not in NETWORKS or factors == [1]]
    missing = {name: reason for name, reason in backends().items() if reason is not None}
    if device != "cpu":
        missing["native"] = "it is for the CPU"
    for name, reason in missing.items():
        if name in (options.way or ()):
            raise BadInput(f"--way {name} cannot run here, {reason}: use --way tiled")
    ways = options.way or [way for way in WAYS if way not in missing and (way != "triton" or device == "cuda")]
    ways = ["baseline", *(way for way in ways if way != "baseline")]  # the ratios need it
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if options.tune:
        layers = [name for name in layers if options.layer or name not in NETWORKS]
        requests = [Request(name, 1, options.batch, None, options.smoke, device, options.dtype) for name in layers]
        print(f"new tiles in {options.tune}: {tune(requests, options.tune, options.rounds, progress)}")
        return
    for name, why_not in backends().items():
        progress(f"backend {name}: {'there' if why_not is None else why_not}")
    progress("rates of a matrix product and of a copy")
    rates = measure_rates(device, getattr(torch, options.dtype))
    rows = []
    for layer, factor, iterations in itertools.product(dict.fromkeys(layers), factors, counts or [None]):
        request = Request(layer, factor, options.batch, iterations, options.smoke, device, options.dtype)
        rows += measure(request, ways, options.rounds, rates, progress)
    _print_table(TABLE, table_rows(rows, device == "cuda"))
    if options.out:
        head = {**environment(device, options.dtype, rates), "smoke": options.smoke}
        print(f"numbers: {write_json(folder / 'bench.json', head, rows)}")
        if len(factors) > 1:
            print(f"figure: {write_figure(folder / 'bench.png', rows, 'children', device == 'cuda')}")
        if len(counts) > 1:
            print(f"figure: {write_figure(folder / 'iterations.png', rows, 'iterations', device == 'cuda')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchcaps", description="Train, test and look inside capsule networks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run in (train, test, explain):
        command = commands.add_parser(
            run.__name__,
            help=run.__doc__,
            description=run.__doc__,
            epilog="Any value of the recipe can be overridden: --trainer.max_epochs 5 --model.optimizer.lr 0.01",
            allow_abbrev=False,
        )
        command.add_argument("recipe", metavar="RECIPE", help="a name from `torchcaps recipes`, or a YAML file")
        command.add_argument(
            "--ckpt_path",
            required=run is not train,
            nargs="+" if run is explain else None,
            help="a checkpoint, or `last` for the newest of this recipe"
            + {train: " to resume", explain: "; several for --dynamics"}.get(run, ""),
        )
        if run is train:
            command.add_argument("--smoke", action="store_true", help="two steps of two images, to see that all runs")
        _add_runs(command)
        if run is test:
            command.add_argument(
                "--predictions", type=Path, metavar="FILE", help="also write each image's label and prediction, as CSV"
            )
        if run is explain:
            command.add_argument("--figures", help="folder for the figures (default: beside the checkpoint)")
            command.add_argument(
                "--image",
                nargs="+",
                type=Path,
                metavar="FILE",
                help="pictures instead of test images, for heatmaps",
            )
            command.add_argument(
                "--dynamics",
                nargs="*",
                metavar="LAYER",
                help="how votes agree with the parents of these layers, by default of all, and how long they are: a "
                "panel per checkpoint. To keep one of each epoch: torchcaps train RECIPE "
                "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.save_top_k=-1",
            )
            command.add_argument("--images", type=int, metavar="N", help="test images for --dynamics (default: 128)")
        command.set_defaults(run=run)
    command = commands.add_parser("recipes", help=recipes.__doc__, description=recipes.__doc__)
    _add_runs(command)
    command.set_defaults(run=recipes)
    command = commands.add_parser(
        "reproduce",
        help=reproduce.__doc__,
        description=reproduce.__doc__,
        epilog="Results go to results.csv in the folder of the runs. Ctrl-C, SIGTERM and even kill -9 lose nothing but "
        "minutes: the same command goes on. Two of them on one folder share the work.",
        allow_abbrev=False,
    )
    command.add_argument("papers", nargs="*", metavar="PAPER", help="or recipes (default: all)")
    command.add_argument("--hours", type=float, metavar="H", help="stop after so many (default: when all is done)")
    command.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of a run (default: %(default)s)"
    )
    command.add_argument("--list", action="store_true", help="show published, ours so far, what is left and how long")
    command.add_argument(
        "--measure", action="store_true", help="as --list, after taking a few steps of each row not measured before"
    )
    _add_runs(command)
    command.set_defaults(run=reproduce)
    command = commands.add_parser("models", help=models.__doc__, description=models.__doc__)
    command.add_argument("pattern", nargs="?", default="*", help="shell-style, e.g. 'capsnet*'")
    command.set_defaults(run=models)
    command = commands.add_parser("hardest", help=hardest.__doc__, description=hardest.__doc__, allow_abbrev=False)
    command.add_argument(
        "file", type=Path, metavar="FILE", help="a CSV with columns label and prediction, as of `torchcaps test`"
    )
    command.add_argument("--classes", type=int, required=True, metavar="N", help="how many to list")
    command.add_argument("--out", type=Path, metavar="FILE", help="to write the list to (default: print it)")
    command.set_defaults(run=hardest)
    command = commands.add_parser("bench", help=bench.__doc__, description=bench.__doc__, allow_abbrev=False)
    command.add_argument("--layer", nargs="+", metavar="NAME", help="default: all")
    command.add_argument("--way", nargs="+", metavar="NAME", help="default: all; the baseline is always measured")
    command.add_argument("--batch", type=int, metavar="N", help="instead of the paper's")
    command.add_argument(
        "--children", nargs="+", type=int, default=[1], metavar="F", help="times the paper's number, e.g. 1 10 100"
    )
    command.add_argument(
        "--iterations", nargs="+", type=int, metavar="T", help="of the routing, instead of the paper's, e.g. 1 2 3"
    )
    command.add_argument("--rounds", type=int, default=5, metavar="N", help="to take medians of (default: %(default)s)")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s"
    )
    command.add_argument("--smoke", action="store_true", help="tiny layers and networks, to see that all runs")
    command.add_argument(
        "--tune",
        type=Path,
        metavar="FILE",
        help="measure nothing, but write the fastest tiles of the Triton kernels on this device; they count once the "
        "file is torchcaps/ops/triton/sizes.json",
    )
    command.add_argument(
        "--out",
        metavar="FOLDER",
        help="for bench.json and, if there are several, figures over --children and --iterations",
    )
    command.set_defaults(run=bench)
    return parser


def _add_runs(command: argparse.ArgumentParser) -> None:
    default = os.environ.get("TORCHCAPS_RUNS", "runs")
    command.add_argument(
        "--runs", default=default, help="folder of all runs (default: $TORCHCAPS_RUNS, or runs; now %(default)s)"
    )


def _build(options: argparse.Namespace, overrides: list[str], logs: bool = True, smoke: bool = False) -> "RecipeCLI":
    with needs("train"):
        from jsonargparse import ArgumentError
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from torchcaps.recipes import find_recipe
    from torchcaps.training.cli import RecipeCLI

    try:
        files = find_recipe(options.recipe)
        return RecipeCLI(files, overrides, _runs(options) if logs else None, smoke, options.signals)
    except (ArgumentError, ValueError, MisconfigurationException) as error:
        said = " ".join(str(error).split())
        # Of values that may be none or of several classes, what is wrong stands before what else they could be.
        others = "Expected a <class 'NoneType'>|Not a valid subclass of "
        reason = re.search(rf"Errors: - (?!Expected a )(.+?) - (?:{others})", said)
        raise BadInput(reason[1] if reason else said) from error


def _runs(options: argparse.Namespace) -> Path:
    from torchcaps.recipes import run_name

    return Path(options.runs) / run_name(options.recipe)


def _checkpoint(
    options: argparse.Namespace, cli: "RecipeCLI", part: str, given: str | None = None
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint that was asked for and the model's state in it, if it fits the model and was trained with the
    same values of `part`."""
    given = given or options.ckpt_path
    if given == "last":
        path = _last(options)
    else:
        path = _whole(Path(given))
    (state,) = _read(path, "state_dict")
    expected = {name: tuple(value.shape) for name, value in cli.model.state_dict().items()}
    found_shapes = {name: tuple(value.shape) for name, value in state.items()}
    for name in {**expected, **found_shapes}:
        if expected.get(name) != found_shapes.get(name):
            raise BadInput(
                f"{path} is a checkpoint of another architecture than {options.recipe}: {name} has shape "
                f"{found_shapes.get(name, 'none')} there, expected {expected.get(name, 'none')}"
            )
    config = path.parent.parent / "config.yaml"
    if config.is_file():  # shapes do not tell iterations, say
        import yaml

        then, now = _flat(yaml.safe_load(config.read_text(encoding="utf-8"))), _flat(cli.arguments())
        for name in {**then, **now}:
            if then.get(name) == now.get(name):
                continue
            said = f"{path} was trained with {name} = {then.get(name)}, and now it is {now.get(name)}"
            if name.startswith(f"model.{part}"):
                raise BadInput(f"{said}: give the same recipe and overrides as then")
            if name in ("data.init_args.encoder", "data.init_args.revision"):  # which may be the same under two names
                print(f"torchcaps: {said}: embeddings of another encoder mean nothing to it", file=sys.stderr)
            elif not part and (name == "seed_everything" or name.startswith("data.")) and not name.endswith(UNSEEN):
                kept = "the seed stays" if name == "seed_everything" else "it will not go on as it would have"
                print(f"torchcaps: {said}: {kept}", file=sys.stderr)
    return path, state


def _whole(path: Path) -> Path:
    """A checkpoint that was asked for; if it is a damaged `last.ckpt`, the one before."""
    from torchcaps.training.checkpoints import damage

    if not path.is_file():
        raise BadInput(f"no checkpoint {path}: give the path of a .ckpt file, or `last`")
    previous = path.with_name("previous.ckpt")
    if path.name == "last.ckpt" and previous.is_file() and (problem := damage(path)) and not damage(previous):
        print(f"torchcaps: {path} is damaged ({problem}): taking {previous}, the one before", file=sys.stderr)
        return previous
    return path


def _last(options: argparse.Namespace) -> Path:
    """The newest whole checkpoint of a recipe."""
    from torchcaps.training.checkpoints import newest_whole

    path, problem = newest_whole(_runs(options).glob("version_*/checkpoints"))
    if path is None and problem:
        raise BadInput(f"{problem}, and there is no whole checkpoint under {_runs(options)}: train again")
    if path is None:
        raise BadInput(f"no checkpoint under {_runs(options)}: run `torchcaps train {options.recipe}` first")
    if problem:
        print(f"torchcaps: {problem}: taking {path}, the newest that is whole", file=sys.stderr)
    return path


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _read(path: Path, *keys: str) -> list[Any]:
    """Parts of a checkpoint."""
    from torchcaps.training.checkpoints import damage

    if problem := damage(path):
        raise BadInput(f"{path} is damaged, or not a checkpoint ({problem}): expected one that `torchcaps train` wrote")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return [content[key] for key in keys]
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is not a checkpoint that can be read safely ({type(error).__name__}): "
            "expected one that `torchcaps train` wrote"
        ) from error


@contextmanager
def _bad_data() -> Iterator[None]:
    from torchcaps.data import DataError

    try:
        yield
    except (DataError, ValueError) as error:  # or data that the network or the loss does not take
        raise BadInput(str(error)) from error


def _test(cli: "RecipeCLI") -> None:
    tested = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    if not tested:
        raise BadInput("no batch to test on: set trainer.limit_test_batches to more than 0")
    (metrics,) = tested
    if cli.trainer.is_global_zero:  # of several processes one tells
        for name, value in metrics.items():
            print(f"{name}: {value:.4f}")


def _print_table(header: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    with needs("train"):
        from rich.console import Console
        from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(header):
        table.add_column(title, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # to be searched by line
    console.print(table)
