"""The consoles that commands print lines of text and tables on.

plain_console().print(f"study {name}")          # as it is: `2001:db8:a:b::1` has no emoji in it
set_width(Console(), 120)                       # a table that wide, whatever the terminal
"""

from rich.console import Console, ConsoleDimensions


def plain_console(stderr: bool = False) -> Console:
    """Return a console that prints text as it is, however long the line: no markup, no colours, no emoji codes."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)


def set_width(console: Console, columns: int) -> Console:
    """Let the console print so many columns, and return it. A terminal that is narrower wraps its lines.

    Rich heeds a width without a height on no terminal with TERM=dumb (Emacs, CI): it takes 80 columns there, and leaves
    out what does not fit.
    """
    console.size = ConsoleDimensions(columns, console.height)
    return console
