"""Writing the page: template, style, scripts and content in one HTML file."""

import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from torch import Tensor

from torchcaps.utils.arguments import checked
from torchcaps.utils.files import write_text_whole

FOLDER = Path(__file__).parent
# Each script uses functions of those before it.
EXAMPLE_SCRIPTS = ("base", "charts", "maps", "example", "words", "tree", "poses", "sections")
SCRIPTS = (*EXAMPLE_SCRIPTS, "masks", "how", "results", "more", "page")
MOST_BYTES = 10_000_000
DIGITS = 5  # of a number; more cannot be seen, and make the page larger


@checked
def write_page(report: Mapping[str, object], path: Path) -> Path:
    """Write the page of a report; return its path.

    Args:
        report: result of :func:`torchcaps.explain.page.report`.
        path: the HTML file. It appears only when it is complete.

    Raises:
        ValueError: a number of the report is infinite or nan, or the page is larger than 10 MB.
    """
    title = html.escape(str(report["title"]))
    page = Template(read("page.html")).substitute(
        title=title,
        heading=title.replace("/", "/<wbr>"),  # a path is broken into lines between its folders
        style=read("parts.css") + read("page.css"),
        report=_as_json(as_plain(report, "report")),
        scripts="\n".join(f"<script>\n{read(f'{name}.js')}</script>" for name in SCRIPTS),
    )
    if (size := len(page.encode())) > MOST_BYTES:
        raise ValueError(
            f"the page would have {size / 1e6:.1f} MB, and at most {MOST_BYTES / 1e6:.0f} MB can be sent around: "
            "show fewer examples or checkpoints"
        )
    return write_text_whole(path, page)


@checked
def read(name: str) -> str:
    """Return the text of a script or a style of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def _as_json(value: object) -> str:
    """Return JSON in ASCII that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def as_plain(value: object, place: str = "answer") -> Any:
    """Return a report, or a part of one, as values of JSON with shorter numbers. Tensors become lists.

    Args:
        value: the report.
        place: where it stands, for messages.

    Raises:
        ValueError: a number is infinite or nan.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: as_plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise ValueError(f"{place} is {value}: all numbers of a report must be finite")
    return float(f"{value:.{DIGITS}g}")
