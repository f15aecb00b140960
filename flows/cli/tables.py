"""Tables on standard output: rich on a terminal, plain columns elsewhere.

print_table(("name", "GB"), [("opt-1.3b", "2.6")], words=1)
"""

import shutil
import sys
from collections.abc import Collection, Sequence

from configs.common.printable import padded, printable, terminal_columns


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int | Collection[str] = 1) -> None:
    """Print a table. The first `words` columns, or the named ones, are left-aligned text; others right-aligned."""
    rows = [[printable(cell) for cell in row] for row in rows]
    left = [number < words if isinstance(words, int) else name in words for number, name in enumerate(header)]
    widths = [max(terminal_columns(row[column]) for row in (header, *rows)) for column in range(len(header))]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from flows.cli.console import set_width

        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if left[number] else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        # A table wider than the terminal is wrapped by it; rich would truncate figures.
        needed = sum(widths) + 2 * len(widths)
        set_width(Console(), max(needed, shutil.get_terminal_size().columns)).print(table)
        return
    for row in (header, *rows):
        cells = [
            padded(cell, width, right=not left[number])
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
