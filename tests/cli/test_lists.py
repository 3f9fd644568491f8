"""`torchcaps recipes` and `torchcaps models`."""

import re
from pathlib import Path

import yaml
from commands import call, error_of

from torchcaps.recipes import list_recipes, load_recipe


def test_recipes_and_models_are_listed(capfd):
    assert call("recipes") == 0
    out = capfd.readouterr().out
    assert all(name in out for name in list_recipes())
    assert max(map(len, out.splitlines())) <= 120
    assert "0.25 ± 0.005" in out
    assert call("models") == 0
    assert max(map(len, capfd.readouterr().out.splitlines())) <= 120
    assert call("models", "capsnet_m*") == 0
    out = capfd.readouterr().out
    assert "8,215,568" in out
    assert "convnet" not in out


def test_rows_of_a_table(capfd):
    assert call("recipes", "zhao2019/table2") == 0
    head, *rows = capfd.readouterr().out.splitlines()
    assert head.split() == ["recipe", "published", "ours"]
    assert len(rows) == 8
    assert all(row.startswith("zhao2019/table2/resnet") for row in rows)
    assert call("recipes", "zhao2019/table1", "--small") == 0
    out = capfd.readouterr().out
    assert re.search(r"fashion-mnist-routing .*7\.52 % test error +18\.85 ± 0\.38 % \(3 seeds\)", out)


def test_the_values_of_a_recipe_and_where_they_come_from(capfd):
    assert call("recipes", "zhao2019/table2/resnet20-average", "--small") == 0
    out = capfd.readouterr().out
    assert "# published: 8.73 % test error (mean of 3 runs)\n" in out
    assert "# runs: runs/zhao2019/table2/resnet20-average-small\n" in out
    assert re.search(r"\n      pooling: average +# row\n", out)
    assert re.search(r"\n  max_steps: 6400 +# small\n", out)
    assert re.search(r"\n      depth: 20 +# base\n", out)
    assert yaml.safe_load(out) == load_recipe("zhao2019/table2/resnet20-average", small=True).config
    Path("mine.yaml").write_text("extends: quickstart\ntrainer: {max_epochs: 2}\n")
    assert call("recipes", "mine.yaml") == 0
    assert re.search(r"\n  max_epochs: 2 +# mine.yaml\n", capfd.readouterr().out)


def test_unknown_names(capfd):
    message = error_of(capfd, "recipes", "zhao2019/table2/resnet20-averag")
    assert "did you mean zhao2019/table2/resnet20-average" in message
    assert "no model matches 'vgg*'" in error_of(capfd, "models", "vgg*")
    assert "unknown argument --all" in error_of(capfd, "recipes", "--all")
    assert "unknown argument --all" in error_of(capfd, "models", "--all")
