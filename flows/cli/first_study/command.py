"""`rankwise init`: write a first study of a program of yours; `rankwise schema`: the JSON schema of study files.

    rankwise init --from train.py
    rankwise schema > study.schema.json

Exit codes: 0 written, 2 wrong arguments, 1 anything else.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.errors import plainly


def init(
    context: typer.Context,
    source: Annotated[Path | None, typer.Option("--from", metavar="SCRIPT.py", help="script to look through")] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="study file to write")] = Path("study.yaml"),
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="largest number of ranks of the first experiment")] = 2,
) -> None:
    """Write a first study of a script of yours, by looking at its source or by asking."""
    from flows.cli.errors import guarded
    from flows.cli.first_study.write import init_study

    ask = None if source is not None or not sys.stdin.isatty() else _ask
    work = lambda: plainly(lambda: init_study(source, output, ranks, ask))  # noqa: E731
    raise typer.Exit(guarded(work, output, context.obj["debug"]))


def schema(context: typer.Context) -> None:
    """Print the JSON schema of study files, for editors."""
    from flows.cli.errors import guarded
    from flows.cli.first_study.write import print_schema

    raise typer.Exit(guarded(lambda: plainly(print_schema), Path("schema"), context.obj["debug"]))


def _ask(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default))
