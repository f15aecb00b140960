"""The console that commands print lines of text on.

plain_console().print(f"study {name}")          # as it is: `2001:db8:a:b::1` has no emoji in it
"""

from rich.console import Console


def plain_console(stderr: bool = False) -> Console:
    """Return a console that prints text as it is, however long the line: no markup, no colours, no emoji codes."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
