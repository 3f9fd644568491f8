"""Measure time and memory of the papers' layers and networks, next to common code and the machine's limit."""

import argparse
import itertools
import sys
from pathlib import Path

from torchcaps.cli.errors import BadInput
from torchcaps.cli.table import print_table
from torchcaps.utils.checks import nearest
from torchcaps.utils.extras import needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps bench`."""
    parser.add_argument("--layer", nargs="+", metavar="NAME", help="layers or networks to measure (default: all)")
    parser.add_argument(
        "--way", nargs="+", metavar="NAME", help="ways to compute them (default: all); the baseline is always measured"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="batch size (default: the paper's)")
    parser.add_argument(
        "--children",
        nargs="+",
        type=int,
        default=[1],
        metavar="F",
        help="factors of the paper's number of children, e.g. 1 10 100 (default: 1)",
    )
    parser.add_argument(
        "--iterations",
        nargs="+",
        type=int,
        metavar="T",
        help="iterations of the routing, e.g. 1 2 3 (default: the paper's)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="rounds to take medians of (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s"
    )
    parser.add_argument("--smoke", action="store_true", help="measure tiny layers and networks, as a check")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder for bench.json and, with several --children or --iterations, figures",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Measure every layer in every way, and print a table."""
    from torchcaps.bench import Request

    with needs("train"):  # said now, and not after everything has been measured
        import rich.table  # noqa: F401

    device, layers, ways = _check(options)
    counts = sorted(set(options.iterations or ())) or [None]
    requests = [
        Request(layer, factor, options.batch, iterations, options.smoke, device, options.dtype)
        for layer, factor, iterations in itertools.product(layers, sorted(set(options.children)), counts)
    ]
    _measure(options, requests, ways, device)


def _check(options: argparse.Namespace) -> tuple[str, list[str], list[str]]:
    """Check the arguments, and say on which device to measure what, in which ways."""
    import torch

    from torchcaps.bench import MEASURED, NETWORKS, WAYS
    from torchcaps.ops import backends

    for kind, names, known in (("layer", options.layer, MEASURED), ("way", options.way, WAYS)):
        for name in names or ():
            if name not in known:
                raise BadInput(f"no {kind} {name!r}{nearest(name, known)}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda needs a CUDA device, and PyTorch finds none: use --device cpu")
    if "triton" in (options.way or ()) and device != "cuda":
        raise BadInput("--way triton runs on CUDA devices only, and this is --device cpu: use --way tiled")
    given = {
        "--children": options.children,
        "--iterations": options.iterations or [],
        "--batch": [] if options.batch is None else [options.batch],
        "--rounds": [options.rounds],
    }
    for name, numbers in given.items():
        for number in numbers:
            if number < 1:
                raise BadInput(f"{name} must be at least 1, got {number}")
    if len(set(options.children)) > 1 and len(set(options.iterations or ())) > 1:
        raise BadInput("give several --children or several --iterations, not both: a figure has one axis for them")
    for name in options.layer or ():
        if name in NETWORKS and set(options.children) != {1}:
            raise BadInput(f"--children is for layers, and the number of children of {name} is fixed: leave one out")
    missing = {name: reason for name, reason in backends().items() if reason is not None}
    if device != "cpu":
        missing["native"] = "it is for the CPU"
    for name, reason in missing.items():
        if name in (options.way or ()):
            raise BadInput(f"--way {name} cannot run here, {reason}: use --way tiled")
    layers = options.layer or [name for name in MEASURED if name not in NETWORKS or set(options.children) == {1}]
    ways = options.way or [way for way in WAYS if way not in missing and (way != "triton" or device == "cuda")]
    ways = ["baseline", *(way for way in ways if way != "baseline")]  # the ratios need it
    return device, list(dict.fromkeys(layers)), ways


def _measure(options: argparse.Namespace, requests: list, ways: list[str], device: str) -> None:
    import torch

    from torchcaps.bench import measure, measure_rates
    from torchcaps.bench.report import TABLE, environment, table_rows, write_figure, write_json
    from torchcaps.ops import backends

    folder = Path(options.out) if options.out else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    for name, why_not in backends().items():
        _progress(f"backend {name}: {'there' if why_not is None else why_not}")
    _progress("rates of a matrix product and of a copy")
    rates = measure_rates(device, getattr(torch, options.dtype))
    rows = []
    for request in requests:
        rows += measure(request, ways, options.rounds, rates, _progress)
    print_table(TABLE, table_rows(rows, device == "cuda"))
    if folder:
        head = {**environment(device, options.dtype, rates), "smoke": options.smoke}
        print(f"numbers: {write_json(folder / 'bench.json', head, rows)}")
        if len(set(options.children)) > 1:
            print(f"figure: {write_figure(folder / 'bench.png', rows, 'children', device == 'cuda')}")
        if len(set(options.iterations or ())) > 1:
            print(f"figure: {write_figure(folder / 'iterations.png', rows, 'iterations', device == 'cuda')}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
