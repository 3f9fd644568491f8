"""Tables on the terminal."""

from collections.abc import Sequence

from torchcaps.utils.extras import needs


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header. Lines stay whole where the output is no terminal, so that it can be searched."""
    with needs("train"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(header):
        table.add_column(title, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    console.print(table)
