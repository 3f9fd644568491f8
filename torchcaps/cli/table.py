"""Tables on the terminal."""

from collections.abc import Sequence

from torchcaps.utils.extras import needs


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, without the columns that are empty in all rows.

    Lines stay whole where the output is no terminal, so that it can be searched.
    """
    with needs("train"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

    table = Table(box=None, pad_edge=False)
    columns = [index for index in range(len(header)) if index == 0 or any(row[index] for row in rows)]
    for index in columns:
        table.add_column(header[index], no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in columns))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    console.print(table)


def as_text(value: float) -> str:
    """Return a metric with four decimals, or with four digits if these would show too little or too much of it."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"
