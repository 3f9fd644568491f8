"""Parts of messages that all modules share."""

import pytest

from torchcaps.utils.checks import counted


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 pictures"), (1, "1 picture"), (2, "2 pictures"), (1234567, "1,234,567 pictures")]
)
def test_a_number_of_things_in_words(count, words):
    assert counted(count, "picture") == words


def test_a_plural_without_an_s_is_given():
    assert [counted(count, "class", "classes") for count in (1, 3)] == ["1 class", "3 classes"]
