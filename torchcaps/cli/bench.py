"""Measure time and memory of the papers' layers and networks, next to common code and the machine's limit."""

import argparse
import itertools
import sys
from pathlib import Path

from torchcaps.cli.arguments import positive_int
from torchcaps.cli.table import print_table
from torchcaps.utils.checks import nearest
from torchcaps.utils.extras import needs
from torchcaps.utils.files import make_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps bench`."""
    parser.add_argument("--layer", nargs="+", metavar="NAME", help="layers or networks to measure (default: all)")
    parser.add_argument(
        "--way",
        nargs="+",
        metavar="NAME",
        help="ways to compute them (default: all that need no compiler); the baseline is always measured",
    )
    parser.add_argument("--batch", type=positive_int, metavar="N", help="batch size (default: the paper's)")
    parser.add_argument(
        "--children",
        nargs="+",
        type=positive_int,
        default=[1],
        metavar="F",
        help="factors of the paper's number of children, e.g. 1 10 100 (default: 1)",
    )
    parser.add_argument(
        "--iterations",
        nargs="+",
        type=positive_int,
        default=[None],
        metavar="T",
        help="iterations of the routing, e.g. 1 2 3 (default: the paper's)",
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=5, metavar="N", help="rounds to take medians of (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s"
    )
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="time replays of CUDA graphs, the device without the host; memory is that of passes from Python",
    )
    parser.add_argument("--smoke", action="store_true", help="measure tiny layers and networks, as a check")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for bench.json, which has all numbers")


def run(options: argparse.Namespace) -> None:
    """Measure every layer in every way, and print a table."""
    import torch

    from torchcaps.bench import Request, measure, measure_rates
    from torchcaps.bench.report import TABLE, environment, table_rows, write_json
    from torchcaps.ops import backends

    with needs("train"):  # an error now, and not after everything has been measured
        import rich.table  # noqa: F401

    device, layers, ways = _choices(options)
    if options.out:
        make_folder(options.out)
    for name, why_not in backends().items():
        _progress(f"backend {name}: {'there' if why_not is None else why_not}")
    _progress("rates of a matrix product and of a copy")
    rates = measure_rates(device, getattr(torch, options.dtype))
    head = {**environment(device, options.dtype, rates), "smoke": options.smoke, "graphs": options.graphs}
    rows = []
    counts = sorted(set(options.iterations))
    try:
        for layer, factor, iterations in itertools.product(layers, sorted(set(options.children)), counts):
            request = Request(
                layer, factor, options.batch, iterations, options.smoke, device, options.dtype, options.graphs
            )
            rows += measure(request, ways, options.rounds, rates, _progress)
            if options.out:  # now, because a device may fail, or be taken away
                write_json(options.out / "bench.json", head, rows)
    finally:  # what was measured before somebody stopped is not lost
        if rows:
            print_table(TABLE, table_rows(rows, device == "cuda"))
            if options.out:
                print(f"numbers: {options.out / 'bench.json'}")


def _choices(options: argparse.Namespace) -> tuple[str, list[str], list[str]]:
    """Say on which device to measure what, in which ways."""
    import torch

    from torchcaps.bench import MEASURED, NETWORKS, WAYS
    from torchcaps.bench.ways import COMPILED
    from torchcaps.ops import backends

    for kind, names, known in (("layer", options.layer, MEASURED), ("way", options.way, WAYS)):
        for name in names or ():
            if name not in known:
                raise ValueError(f"no {kind} {name!r}{nearest(name, known)}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, and PyTorch finds none: use --device cpu")
    if device == "cpu" and options.graphs:
        raise ValueError("--graphs needs a CUDA device, and this is --device cpu: leave it out")
    missing = {name: reason for name, reason in backends().items() if reason is not None}
    if device == "cpu":
        missing["triton"] = missing["compiled-graphs"] = "it runs on CUDA devices only, and this is --device cpu"
    else:
        missing["native"] = "it is for the CPU"
    if options.graphs:
        missing["compiled-graphs"] = "PyTorch captures its graphs, and --graphs captures all ways"
    for name in options.way or ():
        if name in missing:
            raise ValueError(f"--way {name} cannot run here, {missing[name]}: use --way tiled")
    more = set(options.children) != {1}
    for name in options.layer or ():
        if more and name in NETWORKS:
            raise ValueError(f"--children is for layers, and the number of children of {name} is fixed: leave one out")
    counted = options.iterations != [None]
    for name in options.layer or ():
        if counted and MEASURED[name].iterations is None:
            raise ValueError(f"--iterations is for routings that iterate, and {name} has none: leave one out")
    layers = options.layer or [
        name
        for name, measured in MEASURED.items()
        if not (more and name in NETWORKS) and not (counted and measured.iterations is None)
    ]
    chosen = options.way or [way for way in WAYS if way not in missing and way not in COMPILED]
    ways = ["baseline", *chosen]  # the ratios need the baseline
    return device, list(dict.fromkeys(layers)), list(dict.fromkeys(ways))


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
