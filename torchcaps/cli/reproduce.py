"""Train the papers' rows that have no result yet; each continues where it stopped."""

import argparse
from datetime import datetime
from pathlib import Path

from torchcaps.cli.arguments import add_runs, positive_int
from torchcaps.cli.table import print_table
from torchcaps.utils.signals import Stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps reproduce`."""
    parser.epilog = (
        "Results go to results.csv in the folder of the runs. Ctrl-C, SIGTERM and even kill -9 lose minutes at most: "
        "the same command continues. Two of them on one folder share the work."
    )
    rows = parser.add_argument("rows", nargs="*", metavar="NAME", help="papers, tables or recipes (default: all)")
    rows.completer = _complete  # type: ignore[attr-defined]
    parser.add_argument("--small", action="store_true", help="the small versions of the named rows")
    parser.add_argument(
        "--hours", type=float, metavar="H", help="stop after this many hours (default: when all is done)"
    )
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="threads of a run (default: as many as PyTorch takes)"
    )
    parser.add_argument(
        "--check_hashes",
        choices=("true", "false"),
        default="true",
        help="false: train also with files that do not have their published hashes; results are filed apart",
    )
    parser.add_argument(
        "--again", action="store_true", help="train also rows whose result comes with the package, as if it did not"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the trainings: 10 to 17 %% less time for the ResNets of Zhao & Huang",
    )
    parser.add_argument(
        "--resident",
        action="store_true",
        help="keep the samples on the device and, on a GPU, replay each step as a graph: see trainer.resident",
    )
    parser.add_argument("--list", action="store_true", help="show published, ours so far, and what is left")
    add_runs(parser)


def _complete(prefix: str, **_: object) -> list[str]:
    """Names of papers, tables and recipes, for the completion of a shell."""
    from torchcaps.reproduce.plan import names_of_runs

    return [name for name in names_of_runs() if name.startswith(prefix)]


def run(options: argparse.Namespace) -> None:
    """Train what is missing, or list it."""
    import torch

    from torchcaps.reproduce import queue
    from torchcaps.reproduce.plan import plan

    root, names = Path(options.runs), options.rows
    if options.small:
        if not names:
            raise ValueError("--small needs the names of papers, tables or recipes")
        names = [f"{name} --small" for name in names]
    threads = options.threads or torch.get_num_threads()
    if options.hours is not None and not 0 < options.hours <= 500:
        raise ValueError(f"--hours must be more than 0 and at most 500, got {options.hours}: leave it out for no limit")

    def progress(text: str) -> None:
        print(f"{datetime.now().isoformat(' ', 'seconds')} {text}", flush=True)

    runs = plan(names, options.check_hashes == "true", options.compile, options.resident)
    if options.list:
        print_table(queue.HEADER, queue.table(root, runs, options.again))
        return
    try:
        queue.reproduce(root, runs, options.hours, threads, progress, options.again)
    except Stopped as stop:
        stop.message += "; the same command continues"
        raise
