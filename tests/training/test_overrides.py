"""Options that change values of a recipe: how they are read."""

import pytest

from torchcaps.training.overrides import read_overrides


@pytest.mark.parametrize(
    ("tokens", "values"),
    [
        (["--a.b", "3"], {"a.b": "3"}),
        (["--a", "0", "4095"], {"a": "[0, 4095]"}),
        (["--a", "-1000", "+.5", "3.", "1e-3", "--b=2"], {"a": "[-1000, +.5, 3., 1e-3]", "b": "2"}),
        (["--a=1", "--b", "x"], {"a": "1", "b": "x"}),
    ],
)
def test_several_numbers_are_a_list(tokens, values):
    assert {".".join(override.path): override.value for override in read_overrides(tokens)} == values


@pytest.mark.parametrize("tokens", [["--a", "x", "1"], ["--a", "1", "x"], ["--a=1", "2"], ["--a", "my", "folder"]])
def test_other_values_are_one(tokens):
    with pytest.raises(
        ValueError, match=f"unexpected argument {tokens[-1]!r}: give values of the recipe as --NAME VALUE"
    ):
        read_overrides(tokens)
