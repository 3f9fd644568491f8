"""Find the fastest tiles of the Triton kernels on this device, for the table in which the kernels look them up.

`torchcaps bench --tune FILE` runs it. Nothing is tuned while a network runs, so that results are the same each time and
a graph can be captured.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.bench.measurement import time_side_by_side
from torchcaps.bench.passes import (
    NoNumber,
    by_samples,
    check_values,
    first_line,
    prepare,
    relative_errors,
    tolerances,
)
from torchcaps.bench.request import Request
from torchcaps.files import write_text_whole
from torchcaps.ops.triton.sizes import Layer, Tile, read_table, tile_by_rule, try_tiles

MARGIN = 0.98  # a tile must take less of the rule's time than this; a smaller gain may be noise


def tune(requests: Sequence[Request], file: Path, rounds: int, progress: Callable[[str], None]) -> int:
    """Try tiles for each kernel of the layers, and add those that are faster than the rule's to the table in `file`.

    Args:
        requests: layers to tune, forward and backward.
        file: JSON file of the table; other entries stay.
        rounds: timed runs of each tile.
        progress: function that is given a line of progress.

    Returns:
        Number of new entries.
    """
    from torchcaps.ops.triton import launch  # Triton may be missing

    device = torch.device(requests[0].device)
    architecture = launch.architecture(device)
    table = {name: dict(of) for name, of in read_table(file).items()}
    found = table.setdefault(architecture, {})
    before = len(found)
    for request in requests:
        for key, tile in tune_layer(request, rounds, progress):
            found[key] = tile
        # Written after each layer, because tuning may be interrupted.
        write_text_whole(file, json.dumps(table, indent=1, sort_keys=True) + "\n")
    return len(found) - before


def tune_layer(request: Request, rounds: int, progress: Callable[[str], None]) -> Iterator[tuple[str, Tile]]:
    """Yield key and tile of each kernel for which a tile is faster than the rule's; its values must agree."""
    from triton.errors import TritonError  # Triton may be missing

    case = request.build()
    run = prepare("triton", case, True)
    with try_tiles({}) as trial:
        run()
    exact = by_samples(case.to(request.device, torch.float64))
    eager = relative_errors(prepare("reference", case, True)(), exact)
    allowed = tolerances(eager, getattr(torch, request.dtype))
    best: dict[Layer, Tile] = {}
    for layer in trial.asked:
        rule = tile_by_rule(layer)
        runs: dict[Tile, Callable[[], dict[str, Tensor]]] = {}
        for tile in [rule, *candidates(layer)]:

            def with_tile(tile: Tile = tile, layer: Layer = layer) -> dict[str, Tensor]:
                with try_tiles({**best, layer: tile}):
                    return run()

            try:
                check_values(relative_errors(with_tile(), exact), allowed)
                runs[tile] = with_tile
            except (
                NoNumber,
                RuntimeError,
                TritonError,
            ) as error:  # the tile does not compile, or the device is too small for it
                progress(f"{request.layer}, {layer.key}, {tuple(tile)}: {first_line(error)}")
        if not runs:
            raise NoNumber(f"{request.layer}, {layer.key}: no tile gives the right values")
        taken = time_side_by_side({str(tuple(tile)): of for tile, of in runs.items()}, rounds, request.device)
        seconds = {tile: statistics.median(taken[str(tuple(tile))]) for tile in runs}
        fastest = min(seconds, key=lambda tile: seconds[tile])
        rule_seconds = seconds.get(rule)
        if rule_seconds is None or seconds[fastest] < MARGIN * rule_seconds:
            best[layer] = fastest
            yield layer.key, fastest
        gain = (
            "" if rule_seconds is None else f", {seconds[best.get(layer, rule)] / rule_seconds:.2f} of the rule's time"
        )
        progress(f"{request.layer}, {layer.key}: {tuple(best.get(layer, rule))}{gain}")


def candidates(layer: Layer) -> list[Tile]:
    """Return tiles around the rule's: more or fewer parents per lane, warps, samples, programs and weights."""
    rule, found = tile_by_rule(layer), dict[Tile, None]()
    for per_lane in (1, 2, 4):
        if layer.parents % per_lane == 0:
            parents = max(per_lane, rule.parents // rule.per_lane * per_lane)
            found[rule._replace(per_lane=per_lane, parents=parents)] = None
            found[rule._replace(per_lane=per_lane)] = None
    for warps in (1, 2, 4):
        scale = warps / rule.warps
        found[rule._replace(warps=warps, samples=max(1, int(rule.samples * scale)))] = None
        found[rule._replace(warps=warps, parents=max(rule.per_lane, int(rule.parents * scale)))] = None
    for programs in (rule.programs // 2, rule.programs * 2, rule.programs * 4):
        found[rule._replace(programs=max(1, programs))] = None
    for weights in (32, 64, 128):
        found[rule._replace(weights=weights)] = None
    found.pop(rule, None)
    return [tile for tile in found if tile.per_lane <= tile.parents]
