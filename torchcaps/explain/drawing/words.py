"""Figure of the words that classes take their input from."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from torchcaps.explain.axes import BLUE, ORANGE, in_style
from torchcaps.utils.arguments import CountOrZero, FloatTensor, checked, shown

HEIGHT = 0.19  # inches of a word


@checked
@in_style
def words_figure(
    words: Sequence[str], shares: FloatTensor, first: CountOrZero, second: CountOrZero, names: Sequence[str]
) -> Figure:
    """Draw the share of each word of a text in two classes, such as the predicted one and the next.

    Args:
        words: the words, in order.
        shares: shares of the words in all classes, `(classes, words)`; see :func:`torchcaps.explain.words.word_shares`.
        first, second: the classes.
        names: names of all classes.

    Raises:
        ValueError: there is no word, or shares or names do not fit.
    """
    if not words or shares.shape != (len(names), len(words)) or max(first, second) >= len(names):
        raise ValueError(
            f"expected shares of shape (classes, words) for {len(words)} words and {len(names)} names, and classes "
            f"{first} and {second} among them, got {shown(shares)}"
        )
    figure = Figure(figsize=(6.5, HEIGHT * 1.6 * len(words) + 1.2))
    axis = figure.subplots()
    places = range(len(words))
    styles: tuple[dict[str, Any], ...] = (
        {"color": BLUE},
        {"facecolor": "white", "edgecolor": ORANGE, "hatch": "////"},
    )
    for offset, class_, style in zip((-0.2, 0.2), (first, second), styles, strict=True):
        values = (100 * shares[class_]).tolist()
        axis.barh([place + offset for place in places], values, height=0.36, label=names[class_], **style)
    axis.set_yticks(places, words)
    axis.invert_yaxis()
    axis.set(xlabel="share in the class, %")
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")
    figure.legend(title="What the two classes take from each word", loc="outside upper center", ncols=2)
    return figure
