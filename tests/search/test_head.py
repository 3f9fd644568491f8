"""The head `search` of a recipe: what it may say, and the lines about what it may not."""

from pathlib import Path

import pytest
import yaml
from commands import call, error_of
from searches import RECIPE, write_recipe

from torchcaps.recipes import load_recipe
from torchcaps.recipes.search import Choices, Range

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_what_a_head_says():
    write_recipe()
    search = load_recipe("mine.yaml").search
    assert (search.metric, search.mode, search.trials, search.prune) == ("val/accuracy", "max", 3, True)
    assert search.values == {
        "model.optimizer.lr": Range(0.001, 0.01, log=True),  # 1e-3 is a text in YAML
        "model.network.iterations": Choices((1, 2)),
        "data.batch_size": Range(16, 64, step=16),
    }
    assert search.values["data.batch_size"].is_whole
    assert not search.values["model.optimizer.lr"].is_whole


def test_a_recipe_without_a_head_has_none():
    assert load_recipe("quickstart").search is None
    assert load_recipe("sabour2017/table1/capsnet", small=True).search is None


def test_a_recipe_that_extends_has_the_head_too_or_its_own():
    write_recipe()
    Path("same.yaml").write_text("extends: mine.yaml\n")
    Path("other.yaml").write_text(
        "extends: mine.yaml\nsearch: {metric: val/loss, mode: min, values: {seed_everything: {low: 0, high: 9}}}\n"
    )
    assert load_recipe("same.yaml").search.values == load_recipe("mine.yaml").search.values
    other = load_recipe("other.yaml").search
    assert (other.metric, list(other.values)) == ("val/loss", ["seed_everything"])


def test_a_path_with_spaces_can_be_extended():
    Path("my recipes").mkdir()
    Path("my recipes/base.yaml").write_text("extends: sabour2017/table1/capsnet\n")
    for flag, small in (("", False), (" --small", True)):
        Path("mine.yaml").write_text(f"extends: my recipes/base.yaml{flag}\n")
        expected = load_recipe("sabour2017/table1/capsnet", small)
        assert load_recipe("mine.yaml").config == expected.config


def test_the_head_is_shown(capfd):
    write_recipe()
    assert call("recipes", "mine.yaml") == 0
    out = capfd.readouterr().out
    assert "search:\n  metric: val/accuracy " in out
    assert "      choices: [1, 2] " in out


def test_training_ignores_the_head(capfd):
    write_recipe()
    assert call("train", "mine.yaml", "--smoke") == 0
    assert not list(Path().rglob("search_*"))


LR = "model.optimizer.lr"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("search: 3", "mine.yaml: search must have metric, mode, trials, prune, values, got 3"),
        ({"metrics": "x"}, "search: unknown key 'metrics', expected metric, mode, trials, prune, values"),
        ({"metric": None}, "search has no metric: expected metric, mode, trials, prune, values"),
        ({"metric": "train/loss"}, "metric must be a metric of the validation, such as val/accuracy, got 'train/loss'"),
        ({"metric": "test/accuracy"}, "such as val/accuracy, got 'test/accuracy'"),
        ({"metric": 3}, "such as val/accuracy, got 3"),
        ({"mode": "best"}, "search.mode must be max or min, got 'best'"),
        ({"trials": 0}, "search.trials must be a number of trainings, at least 1, got 0"),
        ({"trials": "many"}, "search.trials must be a number of trainings, at least 1, got 'many'"),
        ({"trials": True}, "at least 1, got True"),
        ({"prune": "maybe"}, "search.prune must be true or false, got 'maybe'"),
        ({"values": {}}, "search.values must have a line for each value, NAME: {low: NUMBER, high: NUMBER} or {choi"),
        ({"values": {"lr": {"low": 1, "high": 2}}}, "search.values: 'lr' must be a name of a value as on the command"),
        ({"values": {"model.": {"low": 1, "high": 2}}}, "'model.' must be a name of a value as on the command line"),
        ({"values": {5: {"low": 1, "high": 2}}}, "5 must be a name of a value as on the command line"),
        ({LR: 0.1}, f"{LR} must be {{low: NUMBER, high: NUMBER}} or {{choices: [VALUE, VALUE]}}, got 0.1"),
        (
            {LR: [0.1, 0.2]},
            f"{LR} must be {{low: NUMBER, high: NUMBER}} or {{choices: [VALUE, VALUE]}}, got [0.1, 0.2]",
        ),
        ({LR: {}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"low": 1, "choices": [1, 2]}}, f"{LR} must be {{low: NUMBER"),
        ({LR: {"low": 0.1}}, f"{LR} has no high: expected low, high, log, step"),
        ({LR: {"low": 0.1, "high": 1, "steps": 2}}, f"{LR}: unknown key 'steps', expected low, high, log, step"),
        ({LR: {"low": "a", "high": 1}}, f"{LR}: low must be a number, got 'a'"),
        ({LR: {"low": True, "high": 2}}, f"{LR}: low must be a number, got True"),
        ({LR: {"low": 0.1, "high": float("inf")}}, f"{LR}: high must be a number, got inf"),
        ({LR: {"low": 2, "high": 1}}, f"{LR}: low must be less than high, got 2 and 1"),
        ({LR: {"low": 0.0, "high": 1.0, "log": True}}, f"{LR}: low must be above 0 on a logarithmic scale, got 0.0"),
        ({LR: {"low": 0.1, "high": 1.0, "log": 10}}, f"{LR}: log must be true or false, got 10"),
        ({LR: {"low": 1, "high": 8, "log": True, "step": 2}}, "has a step or a logarithmic scale, not both"),
        ({LR: {"low": 1, "high": 8, "step": 0.5}}, f"{LR}: step must be an integer above 0, got 0.5"),
        ({LR: {"low": 1.0, "high": 8, "step": -1}}, f"{LR}: step must be a number above 0, got -1"),
        (
            {LR: {"low": 1, "high": 8, "step": 2}},
            f"{LR}: steps of 2 from 1 must end at high=8, and the last one is at 7",
        ),
        ({LR: {"low": 0.1, "high": 0.5, "step": 0.3}}, "steps of 0.3 from 0.1 must end at high=0.5, and the last one"),
        ({LR: {"choices": 3}}, f"{LR}: choices must be a list of two or more values, got 3"),
        ({LR: {"choices": [3]}}, f"{LR}: choices must be a list of two or more values, got [3]"),
        ({LR: {"choices": [1, [2]]}}, f"{LR}: choices must be texts, numbers, true, false or null, got [2]"),
        ({LR: {"choices": [1, 2, 1]}}, f"{LR}: choices must be different values, got [1, 2, 1]"),
        ({LR: {"choices": [1, 2], "log": True}}, f"{LR}: unknown key 'log', expected choices"),
    ],
)
def test_bad_heads(capfd, change, said):
    content = yaml.safe_load(RECIPE)
    if isinstance(change, str):
        content |= yaml.safe_load(change)
    elif LR in change:
        content["search"]["values"] = change
    else:
        content["search"] |= change
        content["search"] = {key: value for key, value in content["search"].items() if value is not None}
    write_recipe(yaml.safe_dump(content))
    assert said in error_of(capfd, "search", "mine.yaml")
    assert said in error_of(capfd, "train", "mine.yaml")


def test_steps_of_floats_end_at_the_high_end():
    write_recipe(RECIPE.replace("{low: 1e-3, high: 1e-2, log: true}", "{low: 0.1, high: 0.7, step: 0.2}"))
    assert load_recipe("mine.yaml").search.values[LR] == Range(0.1, 0.7, step=0.2)


@pytest.mark.parametrize(
    ("recipe", "arguments", "said"),
    [
        ("quickstart", [], "quickstart has no head `search`: write a recipe that extends it and add search: {metric: "),
        ("mine.yaml", ["--trials", "0"], "--trials must be at least 1, got 0"),
        ("mine.yaml", ["--trials", "x"], "argument --trials: invalid int value: 'x'"),
        ("mine.yaml", ["--with", "grid"], "argument --with: invalid choice: 'grid'"),
        ("mine.yaml", ["--workers", "2"], "--workers and --address are for --with ray"),
        ("mine.yaml", ["--resume"], "no search under runs/mine: leave out --resume to begin one"),
        ("mine.yaml", ["--data.batch_size", "8"], "data.batch_size is searched: leave out --data.batch_size, or take"),
        ("mine.yaml", ["--data.val_size", "0"], "a search needs a validation, and this recipe holds out no samples"),
        ("mine.yaml", ["--data.val_size=0"], "set data.val_size in the recipe or as --data.val_size N"),
        ("mine.yaml", ["--trainer.limit_val_batches=0"], "set trainer.limit_val_batches to more than 0"),
        ("mine.yaml", ["--trainer.devices=2", "--trainer.accelerator=cpu"], "a trial trains in one process"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_trial(capfd, recipe, arguments, said):
    write_recipe()
    assert said in error_of(capfd, "search", recipe, *arguments)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("optimizer.lr", "optimizer.rl", "--model.optimizer.rl=0.001: there is no 'rl'; did you mean lr"),
        ("[1, 2]", "[1, many]", "--model.network.iterations=many: expected int, got 'many'"),
        ("low: 16, high: 64, step: 16", "low: 16.0, high: 64.5", "--data.batch_size=16.0: expected int, got '16.0'"),
        ("val/accuracy", "val/acuracy", "search.metric is 'val/acuracy', which is not logged; did you mean val/accur"),
    ],
)
def test_values_and_metrics_that_do_not_exist(capfd, old, new, said):
    write_recipe(RECIPE.replace(old, new))
    assert said in error_of(capfd, "search", "mine.yaml")
    assert not Path("runs").exists()
