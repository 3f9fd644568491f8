"""What is written in a figure: whether all of it is seen."""

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def assert_texts_fit(figure: Figure) -> None:
    """Check that no text of a figure is cut off or covers another one."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [text for axis in figure.axes for text in (axis.title, axis.yaxis.label)]
    texts += [text for axis in figure.axes if axis.axison for text in axis.get_xticklabels()]
    texts += [*figure.texts, figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    shown = {id(text): text for text in texts if text is not None and text.get_visible() and text.get_text()}
    boxes = [text.get_window_extent(renderer) for text in shown.values()]
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
