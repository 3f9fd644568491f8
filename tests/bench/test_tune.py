"""Tuning tries tiles and keeps the fastest that is right, in Triton's interpreter."""

import json

import pytest
import torch

from torchcaps import cli
from torchcaps.bench import tune
from torchcaps.bench.passes import NoNumber
from torchcaps.ops.backend import HAS_TRITON, INTERPRETED
from torchcaps.ops.triton.sizes import Layer, Tile, read_table, tile_by_rule

TUNE = ["bench", "--tune", "tune.json", "--smoke", "--layer", "digit-capsules", "--rounds", "1"]


LAYERS = [Layer("sums", "dot", False, False, 4, 1, 4, 6), Layer("grads", "dot", False, False, 4, 1, 4, 6)]


@pytest.fixture
def two_kernels(monkeypatch, tmp_path):
    """A pass that asks for the tiles of two kernels; each has one candidate."""
    if not HAS_TRITON or not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    from torchcaps.ops.triton import launch

    def passes(way, case, backward):
        def run():
            return {"poses": torch.tensor([sum(launch.choose_tile(layer, "sm_90").samples for layer in LAYERS)])}

        return run if way == "triton" else lambda: {"poses": torch.ones(1, dtype=torch.float64)}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "prepare", passes)
    monkeypatch.setattr(tune, "by_samples", lambda case: {"poses": torch.ones(1, dtype=torch.float64)})
    monkeypatch.setattr(tune, "check_values", lambda errors, allowed: None)
    monkeypatch.setattr(tune, "candidates", lambda layer: [CANDIDATE])


CANDIDATE = Tile(4, 1, 2, 1, 1, 64)


def seconds(candidate: float):
    """A timer by which the candidate takes `candidate` seconds and all other tiles 1."""
    return lambda runs, *_: {name: [candidate if name == str(tuple(CANDIDATE)) else 1.0] for name in runs}


def test_the_fastest_tile_is_written(two_kernels, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "time_side_by_side", seconds(0.5))
    (tmp_path / "tune.json").write_text(json.dumps({"sm_10": {"other": [1, 1, 1, 1, 1, 1]}}))
    assert cli.main(TUNE) == 0
    assert "new tiles in tune.json: 2" in capsys.readouterr().out
    found = json.loads((tmp_path / "tune.json").read_text())
    expected = {layer.key: list(CANDIDATE) for layer in LAYERS}
    assert found == {"sm_10": {"other": [1, 1, 1, 1, 1, 1]}, "interpreter": expected}
    assert read_table(tmp_path / "tune.json")["interpreter"][LAYERS[0].key] == CANDIDATE


@pytest.mark.parametrize("candidate", [0.99, 1.0, 2.0])
def test_the_rule_stays_where_nothing_is_faster(two_kernels, monkeypatch, tmp_path, candidate):
    monkeypatch.setattr(tune, "time_side_by_side", seconds(candidate))
    assert cli.main(TUNE) == 0
    assert json.loads((tmp_path / "tune.json").read_text()) == {"interpreter": {}}


def test_a_tile_with_other_values_is_not_taken(two_kernels, monkeypatch, tmp_path, capsys):
    def check(errors, allowed):
        if errors["poses"] < 4.5:  # the candidate is in use, which has fewer samples than the rule's tile
            raise NoNumber("values disagree")

    monkeypatch.setattr(tune, "tile_by_rule", lambda layer: CANDIDATE._replace(samples=4))
    monkeypatch.setattr(tune, "check_values", check)
    monkeypatch.setattr(tune, "time_side_by_side", seconds(0.5))
    assert cli.main(TUNE) == 0
    assert "values disagree" in capsys.readouterr().err
    found = json.loads((tmp_path / "tune.json").read_text())["interpreter"]
    assert list(CANDIDATE) not in found.values()


@pytest.mark.slow
def test_in_the_interpreter(monkeypatch, tmp_path):
    if not HAS_TRITON or not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "candidates", lambda layer: [tile_by_rule(layer)._replace(samples=4)])
    assert cli.main(TUNE) == 0
    assert json.loads((tmp_path / "tune.json").read_text()).keys() == {"interpreter"}


def test_candidates_are_tiles_that_triton_takes():
    for layer in (
        Layer("sums", "dot", False, False, 32, 4, 4, 4),
        Layer("grads", "gaussian", True, False, 10, 4, 4, 4),
        Layer("weight_grads", "unit", False, True, 5, 1, 8, 16),
    ):
        found = tune.candidates(layer)
        assert tile_by_rule(layer) not in found
        assert len(set(found)) == len(found) > 5
        for tile in found:
            assert all(x == 1 << (x.bit_length() - 1) for x in tile[:4])
            assert layer.parents % tile.per_lane == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--tune", "x.json", "--layer", "tsai-resnet"], "--tune is for layers, and tsai-resnet is a network"),
        (["bench", "--tune", "x.json", "--layer", "digit"], "no layer 'digit'"),
    ],
)
def test_bad_input(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_needs_a_device(capsys, monkeypatch):
    monkeypatch.setattr(
        "torchcaps.ops.backends",
        lambda: dict.fromkeys(("reference", "tiled", "native")) | {"triton": "there is no CUDA device"},
    )
    assert cli.main(["bench", "--tune", "x.json"]) == 2
    assert "they cannot run here: there is no CUDA device" in capsys.readouterr().err
