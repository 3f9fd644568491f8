"""Measure what trained networks keep of what capsules promise: viewpoints, overlaps, parts, poses, attacks."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.arguments import add_checkpoint, add_recipe, find_run, positive_int
from torchcaps.cli.table import print_table
from torchcaps.utils.files import locked, read_json, take_folder, write_text_whole

if TYPE_CHECKING:
    from torch import nn

    from torchcaps.runs import Run

FILE = "evaluate.json"  # in the folder of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps evaluate`."""
    add_recipe(parser, run=True, several=True)
    add_checkpoint(parser)
    from torchcaps.evaluate import PROTOCOL_NAMES, TRAINING_PROTOCOL_NAMES

    parser.add_argument(
        "--protocols",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(PROTOCOL_NAMES)} (default: all of these); {', '.join(TRAINING_PROTOCOL_NAMES)}, which trains "
        "the network anew",
    )
    parser.add_argument(
        "--images",
        type=positive_int,
        default=2000,
        metavar="N",
        help="number of test images at most, at random (default: %(default)s); some protocols take fewer, or "
        "images of their own",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random numbers (default: 0)")
    parser.epilog = (
        "Numbers and curves are written to evaluate.json in each run, figures to the folder evaluate beside it."
    )


def run(options: argparse.Namespace) -> None:
    """Evaluate each run, write its results, and print and draw all side by side."""
    from torchcaps.evaluate import PROTOCOLS

    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}, got {options.seed}")
    for name in options.protocols or ():
        if name not in PROTOCOLS:
            raise ValueError(f"--protocols: there is no {name!r}: choose some of {', '.join(PROTOCOLS)}")
    if len(options.recipe) > 1 and options.ckpt_path not in (None, "last", "best"):
        raise ValueError("--ckpt_path FILE is for one run: give the checkpoints in place of the runs, or last or best")
    runs = {name: find_run(options, name) for name in options.recipe}  # all, before any work
    folders = {name: run.folder for name, run in runs.items()}
    files: dict[str, Path] = {}
    for name, run in runs.items():
        beside = [other.path.resolve() for other in runs.values() if other.folder.samefile(run.folder)]
        several = len(set(beside)) > 1
        files[name] = run.folder / (f"evaluate-{run.path.stem}.json" if several else FILE)
        _read(files[name])
    results: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        results[name] = _evaluated(options, name, run, files[name])
        print(f"results: {files[name]}", flush=True)
    from torchcaps.data.own_files import OwnFiles

    beside_papers = not all(isinstance(run.data(), OwnFiles) for run in runs.values())
    pictures = next(iter(folders.values())) if len(folders) == 1 else take_folder(Path(options.runs), "evaluate")
    for protocol in next(iter(results.values())):
        _print(protocol, results, beside_papers)
        if any(result[protocol].get("curves") for result in results.values()):
            from torchcaps.evaluate.drawing import protocol_figure
            from torchcaps.measures.axes import write

            measured = {name: result[protocol] for name, result in results.items()}
            figure = protocol_figure(PROTOCOLS[protocol].question, measured)
            print(f"figure: {write(figure, pictures / 'evaluate' / f'{protocol}.png')}")


def _evaluated(options: argparse.Namespace, name: str, run: "Run", path: Path) -> dict[str, Any]:
    """Return the results of a run by protocol, with what they were measured with. Each is written at once."""
    from torchcaps.evaluate import PROTOCOL_NAMES, evaluate
    from torchcaps.evaluate.runs import subject_of, trained_on_few
    from torchcaps.training.build import Training

    def progress(line: str) -> None:
        print(f"{name}: {line}", file=sys.stderr, flush=True)

    def trained(count: int) -> "nn.Module":
        return trained_on_few(Training(run.fresh_values(options.overrides)), count, options.seed)

    training = run.training(options.overrides)
    thresholds = run.thresholds if run.target == "labels" else None
    subject = subject_of(training, options.images, options.seed, progress, trained, thresholds)
    about = {"seed": options.seed, "checkpoint": str(run.path), "overrides": options.tokens}
    results = {}
    for protocol in options.protocols or PROTOCOL_NAMES:
        results[protocol] = {**evaluate(subject, [protocol])[protocol], **about}
        _merge(path, results)
    return results


def _merge(path: Path, results: dict[str, Any]) -> None:
    """Write results beside those of other protocols that the file already has."""
    with locked(path):
        write_text_whole(path, json.dumps({**_read(path), **results}, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    """Return the results that a file already has."""
    try:
        return read_json(path, dict) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{error}: move the file away") from None


def _print(protocol: str, results: dict[str, dict[str, Any]], beside_papers: bool) -> None:
    """Print a table of a protocol with a column for each run, and what papers have on sets that others have too."""
    from torchcaps.evaluate import PROTOCOLS

    print(f"\n{protocol}: {PROTOCOLS[protocol].question}")
    measured = {name: result[protocol] for name, result in results.items()}
    numbers = list(dict.fromkeys(number for result in measured.values() for number in result.get("numbers", {})))
    if numbers:
        rows = [
            [n, *(_spelled(r["numbers"][n]) if n in r.get("numbers", {}) else "" for r in measured.values())]
            for n in numbers
        ]
        rows.append(["number of images", *(str(r.get("images", "")) for r in measured.values())])
        print_table(["", *measured], rows)
    for name, result in measured.items():
        if "reason" in result:
            print(f"does not apply to {name}: {result['reason']}")
        for note in result.get("notes", ()):
            print(f"note on {name}: {note}")
    for published in PROTOCOLS[protocol].published if beside_papers else ():
        print(f"published: {published}")


def _spelled(value: float) -> str:
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"
