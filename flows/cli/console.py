"""The consoles that commands print lines of text and tables on.

plain_console().print(f"study {name}")          # as it is: `2001:db8:a:b::1` has no emoji in it
lasting_console("the run goes on")              # whose reader may go: `| head -1`
set_width(Console(), 120)                       # a table that wide, whatever the terminal
"""

import os
import sys

from rich.console import Console, ConsoleDimensions

from flows.cli.streams import discard_output


def plain_console(stderr: bool = False) -> Console:
    """Return a console that prints text as it is, however long the line: no markup, no colours, no emoji codes."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)


class _LastingConsole(Console):
    """A console that prints into the null device from when its reader has gone, and says so once on standard error.

    Rich would end the process: with exit code 1, without a word, in whichever thread printed.
    """

    note = ""

    def on_broken_pipe(self) -> None:
        """Go on without a reader."""
        discard_output()
        try:
            print(f"standard output is closed; {self.note}", file=sys.stderr, flush=True)
        except OSError:  # as by `2>&1 | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def lasting_console(note: str) -> Console:
    """Return a `plain_console` that outlives its reader. note: what goes on then, and where its result will be."""
    console = _LastingConsole(soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.note = note
    return console


def set_width(console: Console, columns: int) -> Console:
    """Let the console print so many columns, and return it. A terminal that is narrower wraps its lines.

    Rich heeds a width without a height on no terminal with TERM=dumb (Emacs, CI): it takes 80 columns there, and leaves
    out what does not fit.
    """
    console.size = ConsoleDimensions(columns, console.height)
    return console


def redraws(console: Console) -> bool:
    """Whether what stands on the console can be drawn over again.

    FORCE_COLOR, which many CI systems set, makes a terminal for rich of a pipe or a file, and TERM=dumb is one that
    moves no cursor: rich shows nothing there before the end.
    """
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
